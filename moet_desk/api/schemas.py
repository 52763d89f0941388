"""Shapes of chat requests, and what all protocols check alike.

Owns what a client may send: types, ranges, which parameters are refused because they would change
the answer, and which are ignored because they would not. Messages and tools pass through as they
are: the engine prepares and checks them for every front end. Pure; runs in the endpoint's thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from moet_desk.engine.handle import (
    GenerateRequest,
    Grammar,
    GrammarKind,
    ModelInfo,
    Quality,
    Sampling,
)
from moet_desk.engine.reasoning import effort_switches
from moet_desk.errors import MoetError, fail

_T = TypeVar("_T")
_S = TypeVar("_S", bound=msgspec.Struct)

MAX_STOP_STRINGS = 16
_TOOL_CHOICES = ("auto", "none", "required")
MAX_TOP_LOGPROBS = 20
MAX_ANSWERS = 8  # each is a request of its own in the engine

# Parameters that would change the answer and are not served. Null, false and empty count as left
# out, and so does the value that means "as usual".
REFUSED: Mapping[str, str] = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is made",
    "web_search_options": "there is no web search",
    "verbosity": "it cannot be steered",
    "best_of": "one answer per request",
    "echo": "it belongs to text completions",
    "suffix": "it belongs to text completions",
    "min_tokens": "not served; max_tokens is",
    "stop_token_ids": "not served; stop is",
    "bad_words": "not served; logit_bias is",
    "typical_p": "not served; top_p, top_k and min_p are",
    "repeat_penalty": "its name is repetition_penalty",
    "chat_template": "the model's own template is used",
    "guided_json": "use response_format",
    "guided_regex": "use response_format",
    "guided_choice": "use response_format",
    "guided_grammar": "use response_format",
    "structured_outputs": "use response_format",
    "grammar": "use response_format",
    "json_schema": "use response_format",
}

_AS_USUAL: Mapping[str, Any] = {
    "best_of": 1,
    "typical_p": 1,
    "repeat_penalty": 1,
}


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class Thinking(msgspec.Struct):
    """How much to reason, as some clients write it."""

    effort: str | None = None
    max_tokens: int | None = None


class Common(msgspec.Struct, kw_only=True):
    """What chat and text completions share. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    quality: Literal["fast", "balanced", "exact"] | None = None
    gate: float | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Common, kw_only=True):
    """Body of POST /v1/chat/completions; the other protocols of chats are turned into it."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    reasoning: Thinking | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None

    @property
    def effort(self) -> str | None:
        """How hard to think."""
        nested = None if self.reasoning is None else self.reasoning.effort
        return _first(self.reasoning_effort, nested)

    @property
    def budget(self) -> int | None:
        """Most tokens of reasoning."""
        nested = None if self.reasoning is None else self.reasoning.max_tokens
        return _first(self.thinking_budget, nested)

    @property
    def wants_calls(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"


def read_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat request; what depends on the model is left to `to_generate`.

    Raises:
        MoetError: MD-API-05 not JSON or a wrong type, MD-API-04 a parameter out of range or not
            served.
    """
    return check_chat(read_struct(body, ChatRequest, refused=REFUSED))


def read_struct(body: bytes, kind: type[_S], *, refused: Mapping[str, str]) -> _S:
    """Decode a body; what is not in `kind` and not `refused` is ignored.

    Raises:
        MoetError: MD-API-05 not JSON or a wrong type, MD-API-04 a refused parameter.
    """
    given = decode_object(body)
    # Clients that build the body by hand send the Python client's extra_body as it is.
    extra = given.pop("extra_body", None)
    if isinstance(extra, dict):
        given = {**extra, **given}
    for name, reason in refused.items():
        if given.get(name) and given[name] != _AS_USUAL.get(name):
            raise refuse(name, reason)
    return _convert(given, kind)


def _convert(given: Mapping[str, Any], kind: type[_S]) -> _S:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error


def chat_request(**fields: Any) -> ChatRequest:
    """A chat request made of another protocol's fields; None ones are left out.

    Raises:
        MoetError: as `read_chat`.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return check_chat(_convert(given, ChatRequest))


def check_chat(request: ChatRequest) -> ChatRequest:
    """Check what does not depend on the model.

    Raises:
        MoetError: MD-API-04, a parameter out of range or not served.
    """
    _check_choices(request)
    check_numbers(request)
    if not request.messages:
        raise refuse("messages", "there must be at least one")
    return request


def to_generate(request: ChatRequest, model: ModelInfo, *, client: str) -> GenerateRequest:
    """Turn a checked request into the engine's own.

    Raises:
        MoetError: MD-API-04, a token id outside the vocabulary.
    """
    return replace(
        shared_part(request, model, client=client),
        messages=request.messages,
        tools=(request.tools or ()) if request.wants_calls else (),
        max_tokens=_first(request.max_completion_tokens, request.max_tokens),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        template=_switches(request, model),
        grammar=_grammar(request.response_format),
        must_call=_must_call(request),
        thinking_budget=request.budget,
        one_call=request.parallel_tool_calls is False or isinstance(request.tool_choice, dict),
    )


def shared_part(request: Common, model: ModelInfo, *, client: str) -> GenerateRequest:
    """The engine's request, without what it is about. Raises as `to_generate`."""
    default = model.default_quality
    return GenerateRequest(
        sampling=_sampling(request, model.vocab),
        stop=_stop_strings(request.stop),
        max_tokens=request.max_tokens,
        quality=default if request.quality is None else Quality(request.quality),
        gate=request.gate,
        ignore_eos=bool(request.ignore_eos),
        client=client,
    )


def each_answer(request: GenerateRequest, n: int | None) -> list[GenerateRequest]:
    """One request per answer that is wanted. With a seed the first is as if it were alone, and the
    others have the seeds that follow.
    """
    seed = request.sampling.seed
    if seed is None:
        return [request] * (n or 1)
    return [
        replace(request, sampling=replace(request.sampling, seed=_wrapped(seed + i)))
        for i in range(n or 1)
    ]


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _switches(request: ChatRequest, model: ModelInfo) -> dict[str, Any]:
    """What the template is told about reasoning.

    Raises:
        MoetError: MD-API-04, the template does not know it.
    """
    given = request.chat_template_kwargs or {}
    unknown = next((name for name in given if name not in model.switches), None)
    if unknown is not None:
        known = ", ".join(model.switches) or "none"
        raise refuse("chat_template_kwargs", f'"{unknown}" is not a switch of this model ({known})')
    if request.effort is None:
        return given
    try:
        return {**effort_switches(request.effort, model), **given}
    except ValueError as problem:
        raise refuse("reasoning_effort", str(problem)) from problem


def refuse(parameter: str, reason: str) -> MoetError:
    """The error for a parameter that is not served or out of range."""
    return fail("MD-API-04", parameter=parameter, reason=reason)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises MD-API-05."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise fail("MD-API-05", reason=f"The body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise fail("MD-API-05", reason="The body is not a JSON object")
    return given


def _wrong_type(words: str) -> MoetError:
    what, _, where = words.partition(" - at `$.")
    parameter = where.rstrip("`") or None
    reason = f"{parameter}: {what}" if parameter else what
    return fail("MD-API-05", reason=reason, parameter=parameter)


def _check_choices(request: ChatRequest) -> None:
    if isinstance(request.tool_choice, str) and request.tool_choice not in _TOOL_CHOICES:
        raise refuse("tool_choice", f"it is one of {', '.join(_TOOL_CHOICES)}, or names a function")
    if request.modalities not in (None, ["text"]):
        raise refuse("modalities", "only text is made")
    if request.top_logprobs is not None and not request.logprobs:
        raise refuse("top_logprobs", "it needs logprobs: true")


def _must_call(request: ChatRequest) -> tuple[str, ...]:
    """Names of the tools of which one must be called."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return ()
    known = [_tool_name(tool) for tool in request.tools or ()]
    if not known:
        raise refuse("tool_choice", "there are no tools")
    if choice == "required":
        return tuple(name for name in known if name)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in known:
        raise refuse("tool_choice", f"{name!r} is no function among the tools")
    return (str(name),)


def _tool_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _grammar(form: ResponseFormat | None) -> Grammar | None:
    """The form that the answer's text must have."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    given = form.json_schema or {}
    if not isinstance(given.get("schema"), dict):
        raise refuse("response_format", "json_schema.schema must be an object")
    schema = json.dumps(given["schema"])
    return Grammar(GrammarKind.JSON_SCHEMA, schema, strict=given.get("strict") is not False)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, 2**31),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 10),
    ("gate", 0, 1),
    ("seed", -(2**63), 2**63 - 1),
    ("n", 1, MAX_ANSWERS),
    ("top_logprobs", 0, MAX_TOP_LOGPROBS),
    ("max_tokens", 1, 2**31),
    ("max_completion_tokens", 1, 2**31),
    ("budget", 0, 2**31),
)


def check_numbers(request: Common) -> None:
    """Check ranges, and how many stop strings there are. Raises MD-API-04."""
    stop = request.stop
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise refuse("stop", f"at most {MAX_STOP_STRINGS} strings")
    for name, low, high in _RANGES:
        value = getattr(request, name, None)
        if value is not None and not low <= value <= high:
            shown = "thinking_budget" if name == "budget" else name
            raise refuse(shown, f"{value} is not within {low} to {high}")
    for name in ("repetition_penalty", "top_p"):
        if getattr(request, name) == 0:
            raise refuse(name, "it must be above 0")
    for token, bias in (request.logit_bias or {}).items():
        if not -100 <= bias <= 100:
            raise refuse("logit_bias", f"{bias} for {token} is not within -100 to 100")


def _sampling(request: Common, vocab: int) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(0, request.top_k),  # -1 also means off
        min_p=request.min_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, 1.0),
        seed=request.seed,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab),
    )


def _logit_bias(given: Mapping[str, float], vocab: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
            raise refuse("logit_bias", f'"{key}" is not a token id below {vocab}')
        bias[int(key)] = value
    return bias


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    return tuple(string for string in strings if string)


def _first(value: _T | None, default: _T) -> _T:
    return default if value is None else value
