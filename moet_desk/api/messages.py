"""Anthropic's messages, coming in: bodies turned into chat requests.

Owns how content blocks become chat messages and which parameters are served. Pure; runs in the
endpoint's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from moet_desk.api.blocks import string_of, texts_of
from moet_desk.api.schemas import ChatRequest, chat_request, read_struct, refuse
from moet_desk.engine.handle import ModelInfo
from moet_desk.engine.reasoning import effort_switches

# What would change the answer and is not served; an empty value counts as left out.
_REFUSED: Mapping[str, str] = {
    "mcp_servers": "tools are called by the client",
    "container": "there is none",
}


class Thinking(msgspec.Struct):
    """Whether to reason first, and how many tokens at most."""

    type: str  # "disabled", or one of several words for on
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    """How much to think, and what the text must look like."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    """Which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    quality: Literal["fast", "balanced", "exact"] | None = None
    gate: float | None = None


def read_messages(body: bytes, model: ModelInfo) -> ChatRequest:
    """A body as chat request.

    Raises:
        MoetError: MD-API-05 not JSON or a wrong type, MD-API-04 a value that is not served.
    """
    given = read_struct(body, MessagesRequest, refused=_REFUSED)
    return chat_request(
        **_prompt(given, model),
        stream=given.stream,
        max_tokens=given.max_tokens,
        thinking_budget=_budget(given.thinking, model),
        stop=given.stop_sequences,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        quality=given.quality,
        gate=given.gate,
    )


def read_count(body: bytes, model: ModelInfo) -> ChatRequest:
    """The same for counting tokens. Raises as `read_messages`."""
    given = read_struct(body, CountRequest, refused=_REFUSED)
    return chat_request(**_prompt(given, model))


def model_of(body: bytes) -> str | None:
    """The model that a body names; what is wrong with it is told by whoever reads the rest."""
    try:
        named = msgspec.json.decode(body, type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return named.model


class _Named(msgspec.Struct):
    model: str | None = None


def _prompt(given: CountRequest, model: ModelInfo) -> dict[str, Any]:
    if not given.messages:
        raise refuse("messages", "there must be at least one")
    if given.messages[-1].get("role") == "assistant":
        raise refuse("messages", "the last one must be the user's: answers cannot be begun")
    system = _text(given.system or "", "system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(given.messages):
        messages += _chat_messages(message, f"messages[{i}]")
    choice = given.tool_choice
    return {
        "model": given.model,
        "messages": messages,
        "tools": _tools(given.tools or ()),
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": _switches(given, model),
        "response_format": _format(given.output_config),
    }


def _switches(given: CountRequest, model: ModelInfo) -> dict[str, Any]:
    """What the template is told about thinking. Clients send it to every model, so it is a wish:
    nothing changes where it is unknown.
    """
    effort = None if given.output_config is None else given.output_config.effort
    if given.thinking is not None:
        is_off = given.thinking.type == "disabled"
        effort = "none" if is_off else effort or "medium"
    try:
        return {} if effort is None else effort_switches(effort, model)
    except ValueError:
        return {}


def _budget(thinking: Thinking | None, model: ModelInfo) -> int | None:
    """Most tokens of reasoning; a wish as well."""
    if thinking is None or thinking.type == "disabled" or not model.thinks:
        return None
    return thinking.budget_tokens


def _format(config: OutputConfig | None) -> dict[str, Any] | None:
    given = None if config is None else config.format
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {"name": "output", "schema": given.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise refuse("tool_choice", "it must name the tool")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools of the client as functions. Those that the vendor's servers run are left out."""
    tools = []
    for i, tool in enumerate(given):
        if tool.get("type") not in (None, "custom"):
            continue
        if not isinstance(tool.get("name"), str):
            raise refuse(f"tools[{i}].name", "it must be text")
        function = {"name": tool["name"], "parameters": tool.get("input_schema")}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{where}.role", "it must be user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise refuse(f"{where}.content", "it must be text or a list of blocks")
    if role == "assistant":
        return [_assistant(content, where)]
    return _user(role, content, where)


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        here, kind = f"{where}.content[{i}]", block.get("type")
        if kind == "text":
            texts.append(string_of(block, "text", here))
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", here))
        elif kind == "tool_use":
            function = {
                "name": string_of(block, "name", here),
                "arguments": block.get("input") or {},
            }
            call = {"id": string_of(block, "id", here), "type": "function", "function": function}
            calls.append(call)
        elif kind != "redacted_thinking":  # nobody but its vendor can read that
            raise refuse(f"{here}.type", f"{kind} blocks are not served")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Tool results become messages of their own; they come before the text beside them."""
    results, texts = [], []
    for i, block in enumerate(blocks):
        here, kind = f"{where}.content[{i}]", block.get("type")
        if kind == "text":
            texts.append(string_of(block, "text", here))
        elif kind == "tool_result":
            call_id = string_of(block, "tool_use_id", here)
            text = _text(block.get("content") or "", f"{here}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise refuse(f"{here}.type", f"only text is read, not {kind} blocks")
    texts = texts if texts or not results else []
    return [*results, *([{"role": role, "content": "\n\n".join(texts)}] if texts else [])]


def _text(content: object, where: str) -> str:
    """Text, or the text of blocks."""
    return "\n\n".join(texts_of(content, where, kinds=("text",), word="blocks"))
