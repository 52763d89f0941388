"""What goes out in more than one place: usage, log-probabilities, models and errors. Plain dicts.

Owns the words of both vendors' protocols for these, and that errors of ours do not tell where files
are. Pure; runs in the endpoint's thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from moet_desk.engine.handle import ModelInfo
from moet_desk.errors import MoetError
from moet_desk.telemetry import TokenLogprob, Usage


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts as OpenAI names them; balanced answers also say how many were made again, and
    the seconds that took; opportunistic ones that they are such.
    """
    details: dict[str, Any] = {}
    if reasoning_tokens:
        details["reasoning_tokens"] = reasoning_tokens
    if usage.rerun_tokens is not None:
        details |= {"rerun_tokens": usage.rerun_tokens, "rerun_s": usage.rerun_s}
    if usage.opportunistic:
        details["opportunistic"] = True
    own = {"completion_tokens_details": details} if details else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **own,
    }


def logprob_body(token: TokenLogprob) -> dict[str, Any]:
    """One entry of `logprobs.content`."""
    return {
        **_token_body(token.text, token.logprob),
        "top_logprobs": [_token_body(text, logprob) for _, text, logprob in token.top],
    }


def _token_body(text: bytes, logprob: float) -> dict[str, Any]:
    # A token may hold part of a character; `bytes` has it whole. JSON has no -inf.
    return {
        "token": text.decode("utf-8", "replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(text),
    }


def models_body(model: ModelInfo | None, names: Sequence[str], *, created: int) -> dict[str, Any]:
    """The list of /v1/models: the loaded model by all its names, for clients of both vendors."""
    data = [] if model is None else [model_body(model, name, created=created) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
    return {"object": "list", "data": data, "has_more": False, **ends}


def model_body(model: ModelInfo, name: str, *, created: int) -> dict[str, Any]:
    """One entry of /v1/models, with the window a request really has."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "moet-desk",
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "context_length": model.context,
        "max_model_len": model.context,
        "family": model.family,
        "quality": model.default_quality.value,
        "opportunistic": model.opportunistic,
    }


_OPENAI_CODE: Mapping[str, str] = {
    "MD-API-02": "model_not_found",
    "MD-API-03": "context_length_exceeded",
    "MD-API-04": "unsupported_parameter",
    "MD-API-05": "invalid_request",
    "MD-API-06": "invalid_api_key",
    "MD-API-11": "previous_response_not_found",
}

_OPENAI_TYPE: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


_ANTHROPIC_TYPE: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_body(error: MoetError) -> dict[str, Any]:
    """The error as Anthropic's clients read it."""
    status = error.spec.http
    kind = _ANTHROPIC_TYPE.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message, do = _words(error)
    inner = {"type": kind, "message": message, "moet_code": error.code, "do": do}
    return {"type": "error", "error": inner}


def _words(error: MoetError) -> tuple[str, str]:
    """What happened and what to do, for a client. It may be elsewhere, so faults of ours do not
    tell where files are.
    """
    message, do = f"{error.title}. {error.cause}", error.do
    if error.spec.http < 500:
        return message, do
    return _FOLDERS.sub("", message), _FOLDERS.sub("", do)


# Folders of an absolute path, up to the last name in it.
_FOLDERS = re.compile(
    r"""(?<![^\s"'(=:])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\"':;,]*)*[/\\](?=[^\s/\\])"""
)


def error_body(error: MoetError) -> dict[str, Any]:
    """The error as OpenAI clients read it, with our own code and next step beside.

    `code` is OpenAI's word where it has one (clients act on context_length_exceeded), otherwise
    ours.
    """
    status = error.spec.http
    message, do = _words(error)
    other = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": message,
            "type": _OPENAI_TYPE.get(status, other),
            "param": error.facts.get("parameter"),
            "code": _OPENAI_CODE.get(error.code, error.code),
            "moet_code": error.code,
            "do": do,
        }
    }
