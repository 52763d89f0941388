"""OpenAI-shaped messages made ready for a chat template, and guarded against forged special tokens.

What clients send varies (null fields, content as parts, arguments as JSON strings, several system
messages); templates are picky. Everything here is pure: plain data in, new plain data out. Runs in
whichever thread submits a request.

Two decisions on the order of messages: all system (and developer) messages are merged into one at
the front, because many templates refuse a second one or one in the middle; and assistant turns with
no text, reasoning or tool call are left out, because models copy empty answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moet_desk.errors import MoetError, fail

_ROLE_OF = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

# Unicode noncharacters: never part of interchanged text; no tokenizer or template looks for them.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as templates expect them.

    Content becomes a string (parts are joined, null is ""), tool-call arguments become objects,
    null fields vanish, system messages are merged to the front, empty assistant turns are dropped.

    Raises:
        MoetError: MD-API-04 naming the message and what is wrong with it.
    """
    if not messages:
        raise _refuse("messages", "there must be at least one")
    system: list[str] = []
    others: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        clean = _clean_message(message, f"messages[{i}]")
        if clean["role"] == "system":
            system.append(clean["content"])
        elif clean["role"] != "assistant" or _says_something(clean):
            others.append(clean)
    text = "\n\n".join(part for part in system if part)
    if not text and not others:
        raise _refuse("messages", "all of them are empty")
    return ([{"role": "system", "content": text}] if text else []) + others


def prepare_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with a parameter schema each, as templates walk through its properties.

    Raises:
        MoetError: MD-API-04, a tool is not a function with a name.
    """
    ready: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refuse(where, "it must be a function with a name")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise _refuse(f"{where}.function.parameters", "it must be a JSON schema")
        schema = {"type": "object", "properties": {}, **parameters}
        ready.append({"type": "function", "function": {**function, "parameters": schema}})
    return ready


class SpecialText:
    """Finds the text of special tokens where it must stay plain text.

    Inside guarded strings a mark (one noncharacter) is put behind the first character of every
    occurrence, overlapping ones included, so that nothing there can be read as the special token.
    The mark is removed again just before encoding. Marks go nowhere else: templates that strip,
    split or compare content see ordinary text.
    """

    __slots__ = ("_anywhere", "_unpaired")

    def __init__(self, tokens: Iterable[str]) -> None:
        """Prepare the search.

        Args:
            tokens: text of all tokens that must not be forged.
        """
        every = {token for token in tokens if len(token) > 1}  # a mark cannot cut one character
        # An assistant turn repeats what the model wrote, so markup that opens and closes
        # (<think>, <tool_call>) is read as tokens there, as it was when it was written.
        paired = {t for t in every if _partner(t) in every}
        self._anywhere = _any_start(every)
        self._unpaired = _any_start(every - paired)

    def guard(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str | None]:
        """Return messages and tools with marks put in, and the mark; None if nothing needed one.

        Raises:
            MoetError: MD-CHAT-01, the text uses every noncharacter there is.
        """
        texts = [text for value in (messages, tools) for text in _strings(value)]
        if not any(self._anywhere.search(text) for text in texts):
            return messages, tools, None
        used = set().union(*map(set, texts))
        mark = next((mark for mark in _MARKS if mark not in used), None)
        if mark is None:
            raise fail("MD-CHAT-01", reason="the text uses all Unicode noncharacters")
        marked = [self._guard_message(message, mark) for message in messages]
        return marked, _mark_all(tools, self._anywhere, mark), mark

    def _guard_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        guarded: dict[str, Any] = _mark_all(message, self._anywhere, mark)
        if message["role"] == "assistant":
            for name in ("content", "reasoning_content"):
                if isinstance(message.get(name), str):
                    guarded[name] = _mark_all(message[name], self._unpaired, mark)
        return guarded


def _refuse(parameter: str, reason: str) -> MoetError:
    return fail("MD-API-04", parameter=parameter, reason=reason)


def _clean_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refuse(where, "it must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLE_OF:
        known = ", ".join(_ROLE_OF)
        raise _refuse(f"{where}.role", f"it must be one of {known}")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["role"] = _ROLE_OF[role]
    clean["content"] = _content_text(message.get("content"), f"{where}.content")
    if "tool_calls" in clean:
        clean["tool_calls"] = _clean_calls(clean["tool_calls"], f"{where}.tool_calls")
    return clean


def _content_text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refuse(where, "it must be text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            raise _refuse(f"{where}[{i}]", f"only text parts are supported, not {kind}")
        if not isinstance(part.get("text"), str):
            raise _refuse(f"{where}[{i}].text", "it must be text")
        texts.append(part["text"])
    return "".join(texts)


def _clean_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _refuse(where, "it must be a list")
    ready = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refuse(f"{where}[{i}]", "it must have a function with a name")
        arguments = _parse_arguments(function.get("arguments"))
        ready.append({**call, "function": {**function, "arguments": arguments}})
    return ready


def _parse_arguments(arguments: object) -> object:
    """Arguments as an object: rendering the JSON string would encode it twice.

    A string that is no JSON is what a model once wrote; it stays as it is.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _says_something(message: Mapping[str, Any]) -> bool:
    return bool(
        message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    )


def _partner(token: str) -> str:
    """The other end of markup: "</x>" for "<x>" and the reverse."""
    if token.startswith("</"):
        return "<" + token[2:]
    return "</" + token[1:] if token.startswith("<") else ""


def _any_start(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match the first character of any token; looking ahead finds overlapping ones too."""
    bodies = sorted(re.escape(token) for token in tokens if token)
    if not bodies:
        return re.compile(r"(?!)")
    return re.compile(f"(?=(?:{'|'.join(bodies)}))(.)", re.DOTALL)


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _mark_all(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(rf"\1{mark}", value)
    if isinstance(value, Mapping):
        return {
            _mark_all(key, pattern, mark): _mark_all(inner, pattern, mark)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence):
        return [_mark_all(inner, pattern, mark) for inner in value]
    return value
