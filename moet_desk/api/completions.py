"""Text completions, OpenAI's older protocol: a prompt goes on, with no roles and no tools.

Owns what a client may send and how answers look; the loop is `relay`'s. Pure; runs in the
endpoint's thread.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from moet_desk.api.bodies import error_body, usage_body
from moet_desk.api.chat import DONE, KEEP_ALIVE, Envelope
from moet_desk.api.parts import Delta
from moet_desk.api.relay import Answer, sse, total_usage
from moet_desk.api.schemas import (
    MAX_TOP_LOGPROBS,
    REFUSED,
    Common,
    check_numbers,
    each_answer,
    read_struct,
    refuse,
    shared_part,
)
from moet_desk.engine.handle import GenerateRequest, ModelInfo
from moet_desk.errors import MoetError
from moet_desk.telemetry import TokenLogprob

MAX_CHOICES = 16
"""Answers of one call: prompts times `n`."""

_USUAL_MAX_TOKENS = 16  # OpenAI's; clients that want more say so

_SERVED_HERE = frozenset(("echo", "best_of"))
_REFUSED: Mapping[str, str] = {
    **{name: reason for name, reason in REFUSED.items() if name not in _SERVED_HERE},
    "suffix": "text is only made behind the prompt",
    "tools": "they belong to chat completions",
    "tool_choice": "it belongs to chat completions",
    "response_format": "it belongs to chat completions",
    "reasoning_effort": "it belongs to chat completions",
    "chat_template_kwargs": "it belongs to chat completions",
    "thinking_budget": "it belongs to chat completions",
}


class CompletionRequest(Common, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]  # a text, texts, ids, or lists of ids
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or _are_ids(given) else given

    @property
    def wants_prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


def read_completion(body: bytes) -> CompletionRequest:
    """Decode and check a body.

    Raises:
        MoetError: MD-API-05 not JSON or a wrong type, MD-API-04 a parameter out of range or not
            served.
    """
    request = read_struct(body, CompletionRequest, refused=_REFUSED)
    only_reads = bool(request.echo) and request.max_tokens == 0
    check_numbers(msgspec.structs.replace(request, max_tokens=None) if only_reads else request)
    if not isinstance(request.prompt, str) and not _is_list_of_prompts(request.prompt):
        raise refuse("prompt", "it must be a text, a list of texts, token ids, or lists of these")
    n_choices = len(request.prompts) * (request.n or 1)
    if not 1 <= n_choices <= MAX_CHOICES:
        raise refuse("prompt", f"prompts times n must be 1 to {MAX_CHOICES}, not {n_choices}")
    if not all(request.prompts):
        raise refuse("prompt", "it is empty")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
        raise refuse("logprobs", f"{request.logprobs} is not within 0 to {MAX_TOP_LOGPROBS}")
    if request.best_of not in (None, request.n or 1):
        raise refuse("best_of", "it must be as n: all answers are returned")
    if request.stream and request.wants_prompt_logprobs:
        raise refuse("logprobs", "of an echoed prompt they are not streamed")
    return request


def _are_ids(given: list[Any]) -> bool:
    return bool(given) and all(type(item) is int for item in given)


def _is_list_of_prompts(given: list[Any]) -> bool:
    texts = all(isinstance(item, str) for item in given)
    return texts or _are_ids(given) or all(isinstance(i, list) and _are_ids(i) for i in given)


def completion_requests(
    request: CompletionRequest, model: ModelInfo, *, client: str
) -> list[GenerateRequest]:
    """The engine's requests: every prompt `n` times. Raises MD-API-04."""
    shared = replace(
        shared_part(request, model, client=client),
        max_tokens=_USUAL_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        top_logprobs=request.logprobs,
        # without an answer the prompt is all there is to see, so it is read like that too
        prompt_logprobs=request.wants_prompt_logprobs or request.max_tokens == 0,
    )
    return [
        one for prompt in request.prompts for one in each_answer(_about(shared, prompt), request.n)
    ]


def _about(shared: GenerateRequest, prompt: str | list[int]) -> GenerateRequest:
    if isinstance(prompt, str):
        return replace(shared, prompt=prompt)
    return replace(shared, prompt_ids=prompt)


class PlainDeltas:
    """All text is content."""

    has_calls = False
    is_full = False

    def add(self, text: str) -> list[Delta]:
        """See `relay.Deltas`."""
        return [{"content": text}] if text else []

    def end(self) -> list[Delta]:
        """See `relay.Deltas`."""
        return []


@dataclass(slots=True)
class Echo:
    """An echoed prompt: its text, and the text of its first token, which nothing predicts."""

    text: str
    first: str


@dataclass(slots=True)
class _Places:
    """Where tokens begin in the text of one answer, in characters."""

    at: int = 0
    _decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def next(self, token: bytes) -> int:
        begin = self.at
        self.at += len(self._decode.decode(token))
        return begin


class CompletionWriter:
    """The `relay.Writer` of text completions.

    `echoes` has an entry for each answer, or none if prompts are not echoed.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self, request: CompletionRequest, shared: Envelope, echoes: Sequence[Echo] = ()
    ) -> None:
        self._shared = shared
        self._echoes = echoes
        self._n_prompts = len(request.prompts)
        self._wants_logprobs = request.logprobs is not None
        self._wants_usage = request.wants_usage
        self._places: dict[int, _Places] = {}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `relay.Writer`."""
        choices = [self._choice(answer, self._echo(answer) + answer.text()) for answer in answers]
        usage = usage_body(total_usage(answers, self._n_prompts))
        return self._shared.wrap("text_completion", choices, usage=usage)

    def start(self, answers: Sequence[Answer]) -> bytes:
        """The echoed prompts."""
        if not self._echoes:
            return b""
        return b"".join(self._chunk(answer, self._echo(answer)) for answer in answers)

    def add(self, answer: Answer, deltas: list[Delta]) -> bytes:
        """See `relay.Writer`."""
        text = "".join(delta["content"] for delta in deltas)
        return self._chunk(answer, text) if text or answer.reason else b""

    def close(self, answers: Sequence[Answer]) -> bytes:
        """See `relay.Writer`."""
        if not self._wants_usage:
            return DONE
        usage = usage_body(total_usage(answers, self._n_prompts))
        return sse(self._shared.wrap("text_completion", [], usage=usage)) + DONE

    def failed(self, error: MoetError) -> bytes:
        """See `relay.Writer`."""
        return sse(error_body(error))

    def _echo(self, answer: Answer) -> str:
        return self._echoes[answer.index].text if self._echoes else ""

    def _chunk(self, answer: Answer, text: str) -> bytes:
        return sse(self._shared.wrap("text_completion", [self._choice(answer, text)]))

    def _choice(self, answer: Answer, text: str) -> dict[str, Any]:
        return {
            "index": answer.index,
            "text": text,
            "logprobs": self._logprobs(answer) if self._wants_logprobs else None,
            "finish_reason": answer.reason or None,
        }

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        tokens: list[TokenLogprob | str] = []
        if self._echoes and answer.finished is not None:
            echo = self._echoes[answer.index]
            # A token that opens every prompt, unseen, is not part of the text.
            tokens += [echo.first] if echo.text.startswith(echo.first) else []
            tokens += answer.finished.prompt
        tokens += answer.take_logprobs()
        return _logprobs_body(tokens, self._places.setdefault(answer.index, _Places()))


def _logprobs_body(tokens: Iterable[TokenLogprob | str], places: _Places) -> dict[str, Any]:
    """The four lists of this protocol. A bare text is a token that nothing predicted."""
    body: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    for token in tokens:
        if isinstance(token, str):
            body["tokens"].append(token)
            body["token_logprobs"].append(None)
            body["top_logprobs"].append(None)
            body["text_offset"].append(places.next(token.encode()))
            continue
        body["tokens"].append(token.text.decode("utf-8", "replace"))
        body["token_logprobs"].append(_finite(token.logprob))
        # The first of two tokens with the same text is the likelier one; it keeps its place.
        top: dict[str, float] = {}
        for _, text, logprob in token.top:
            top.setdefault(text.decode("utf-8", "replace"), _finite(logprob))
        body["top_logprobs"].append(top)
        body["text_offset"].append(places.next(token.text))
    return body


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -inf
