"""OpenAI's responses, coming in: bodies turned into chat requests.

Owns how input items become chat messages, and which parameters are served. Pure; runs in the
endpoint's thread. What goes out is in `responses_wire`; what is kept in `store.responses`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from moet_desk.api.blocks import string_of, texts_of
from moet_desk.api.schemas import MAX_TOP_LOGPROBS, ChatRequest, chat_request, read_struct, refuse

# What would change the answer and is not served; null, false and empty count as left out.
_REFUSED: Mapping[str, str] = {
    "background": "answers are made while the client waits",
    "conversation": "not served; previous_response_id is",
    "prompt": "there are no stored prompts",
    "max_tool_calls": "tools are called by the client",
    "context_management": "nothing is cut off",
}

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""Types of parts that are text."""


class Reasoning(msgspec.Struct):
    """How much to reason first."""

    effort: str | None = None


class TextOptions(msgspec.Struct):
    """What the text must look like."""

    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None  # too long is an error either way
    metadata: dict[str, Any] | None = None
    user: str | None = None
    quality: Literal["fast", "balanced", "exact"] | None = None
    gate: float | None = None
    seed: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a later request may go on from the answer."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        asked = self.include or ()
        return bool(self.top_logprobs) or "message.output_text.logprobs" in asked


def read_responses(body: bytes) -> ResponsesRequest:
    """Decode a body. Raises MD-API-04, MD-API-05."""
    request = read_struct(body, ResponsesRequest, refused=_REFUSED)
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise refuse("top_logprobs", f"{top} is not within 0 to {MAX_TOP_LOGPROBS}")
    limit = request.max_output_tokens
    if limit is not None and limit < 1:
        raise refuse("max_output_tokens", f"{limit} is not within 1 to {2**31}")
    return request


def conversation(
    request: ResponsesRequest, before: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The chat messages of a request, behind those up to the previous response. Its instructions
    are not among them: later requests do not inherit these.

    Raises:
        MoetError: MD-API-04, an item that is not served.
    """
    given = request.input
    if isinstance(given, str):
        return [*map(dict, before), {"role": "user", "content": given}]
    return merged([*before, *_messages(given)])


def to_chat(request: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """The request about these messages as a chat request. Raises MD-API-04."""
    first = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return chat_request(
        model=request.model,
        messages=[*first, *map(dict, messages)],
        stream=request.stream,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        quality=request.quality,
        gate=request.gate,
        logprobs=request.wants_logprobs or None,
        top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        tools=_tools(request.tools or ()),
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
    )


def merged(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join assistant messages in a row: text, reasoning and calls of one answer are items of their
    own in this protocol.
    """
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or not message["role"] == last["role"] == "assistant":
            joined.append(dict(message))
            continue
        for name in ("content", "reasoning_content"):
            if name in message:
                last[name] = (last.get(name) or "") + (message[name] or "")
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return joined


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """The format as chats spell it: its parts are in an object of their own there."""
    given = None if text is None else text.format
    if given is None:
        return None
    if given.get("type") == "json_schema":
        schema = {key: value for key, value in given.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return given


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Function tools, flat or nested. Tools of the vendor's servers are left out."""
    tools = []
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            continue
        nested = tool.get("function")
        function = nested if isinstance(nested, dict) else tool
        if not isinstance(function.get("name"), str):
            raise refuse(f"tools[{i}].name", "it must be text")
        names = ("name", "description", "parameters", "strict")
        kept = {key: function[key] for key in names if function.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def _choice(given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if given is None or isinstance(given, str):
        return given
    if given.get("type") == "function" and isinstance(given.get("name"), str):
        return {"type": "function", "function": {"name": given["name"]}}
    return dict(given)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_message(item, f"input[{i}]") for i, item in enumerate(items)]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise refuse(f"{where}.role", "it must be user, assistant, system or developer")
        return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        call_id = string_of(item, "call_id", where)
        function = {
            "name": string_of(item, "name", where),
            "arguments": string_of(item, "arguments", where),
        }
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        call_id = string_of(item, "call_id", where)
        text = _text(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": text}
    if kind == "reasoning":
        text = _text(item.get("content") or [], f"{where}.content")
        return {"role": "assistant", "content": "", "reasoning_content": text}
    raise refuse(f"{where}.type", f"{kind} items are not served")


def _text(content: object, where: str) -> str:
    return "".join(texts_of(content, where, kinds=_TEXTS, word="parts"))
