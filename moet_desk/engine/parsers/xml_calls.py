"""Calls with one tag per parameter: Qwen3-Coder, MiniMax-M2, and DSML of DeepSeek V3.2 and V4."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moet_desk.engine.parsers.arguments import (
    ToolBook,
    in_string,
    is_name,
    load_json,
    object_text,
    read_object,
)
from moet_desk.engine.parsers.base import Found, TagSyntax


@dataclass(frozen=True, slots=True)
class _Markup:
    """How a call's name and parameters are written.

    Attributes:
        head: the rest of the opening tag, with the name as its group 1.
        parameter: opens a parameter; group 1 is its name, group 2, if any, says whether it is text.
        close: closes one.
        value: the text between them, as the tool gets it.
    """

    head: re.Pattern[str]
    parameter: re.Pattern[str]
    close: re.Pattern[str]
    value: Callable[[str], str]

    def read(self, body: str, tools: ToolBook) -> Found | None:
        """See `base.Read`."""
        head = self.head.match(body)
        if head is None or not is_name(head[1].strip()):
            return None
        name, rest = head[1].strip(), body[head.end() :]
        if head[0].endswith("/>"):
            return Found(name, "{}") if not rest.strip() else None
        whole = read_object(rest)  # instead of parameters
        if whole is not None:
            return Found(name, whole)
        arguments = self._parameters(name, rest, tools)
        text = None if arguments is None else object_text(arguments)
        return None if text is None else Found(name, text)

    def _parameters(self, name: str, text: str, tools: ToolBook) -> dict[str, Any] | None:
        arguments: dict[str, Any] = {}
        at = len(text) - len(text.lstrip())
        while at < len(text):
            opened = self.parameter.match(text, at)
            if opened is None:
                return None
            missing = tools.keys(name) - set(arguments)
            end, at = self._value_end(text, opened.end(), missing - {opened[1].strip()})
            value = self.value(text[opened.end() : end])
            is_text = opened[2] if self.parameter.groups > 1 else None
            try:
                key = opened[1].strip()
                arguments[key] = _value(name, key, value, is_text, tools)
            except (ValueError, RecursionError):
                return None
        return arguments

    def _value_end(self, text: str, start: int, others: frozenset[str]) -> tuple[int, int]:
        """Where a value ends and where what follows begins. A closing tag that was left out stands
        where another parameter of this tool opens.
        """
        closed = self.close.search(text, start)
        end = len(text) if closed is None else closed.start()
        for opened in self.parameter.finditer(text, start, end):
            if opened[1].strip() in others:
                return opened.start(), opened.start()
        behind = end if closed is None else closed.end()
        return end, len(text) - len(text[behind:].lstrip())

    def is_open(self, body: str) -> bool:
        """Whether a body cut off here is inside of a value."""
        head = self.head.match(body)
        if head is None:
            return False
        if in_string(body[head.end() :]):
            return True
        opened = [match.end() for match in self.parameter.finditer(body, head.end())]
        return bool(opened) and self.close.search(body, opened[-1]) is None


def _value(name: str, key: str, text: str, is_text: str | None, tools: ToolBook) -> Any:
    if is_text == "true":
        return text
    if is_text == "false":
        return load_json(text)
    return tools.typed(name, key, text)


def _without_newlines(text: str) -> str:
    """Without one newline at each end; spaces matter, in code they are part of the value."""
    return text.removeprefix("\n").removesuffix("\n")


_QWEN = _Markup(
    head=re.compile(r"([^>\n<]*)>"),
    parameter=re.compile(r"<parameter=([^>\n]*)>"),
    close=re.compile(r"</parameter>"),
    value=_without_newlines,
)
QWEN3_CODER = TagSyntax(
    begins=("<function=",), ends=("</function>", "</tool_call>"),
    read=_QWEN.read, is_open=_QWEN.is_open,
    sections=("<tool_call>",), trailers=("</tool_call>",), in_reasoning=True,
)  # fmt: skip

_MINIMAX = _Markup(
    head=re.compile(r"""\s*["']?([^"'>\n]*)["']?\s*>"""),
    parameter=re.compile(r"""<parameter name=["']?([^"'>\n]*)["']?\s*>"""),
    close=re.compile(r"</parameter>"),
    value=_without_newlines,
)
MINIMAX_M2 = TagSyntax(
    begins=("<invoke name=",), ends=("</invoke>",), read=_MINIMAX.read, is_open=_MINIMAX.is_open,
    sections=("<minimax:tool_call>",), section_needed=True,
    trailers=("</minimax:tool_call>", "[e~["),
)  # fmt: skip

MARK = "｜DSML｜"
_BLOCKS = ("function_calls", "tool_calls", "calls")
_SPACES = ("", " ")  # V4.1 puts a space before each word


def _tags(form: str, words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(form.format(MARK + space + word) for word in words for space in _SPACES)


_DSML = _Markup(
    head=re.compile(r'\s+name="([^"\n]*)"\s*/?>'),
    parameter=re.compile(
        rf'<{MARK} ?parameter\s+name="([^"\n]*)"(?:\s+string="(true|false)")?\s*>'
    ),
    close=re.compile(rf"</{MARK} ?parameter>"),
    value=str,
)


def _read_dsml(body: str, tools: ToolBook) -> Found | None:
    # A self-closing tag has been cut at its "/>", which counts as an end.
    return _DSML.read(body, tools) or _read_closed(body)


def _read_closed(body: str) -> Found | None:
    closed = re.fullmatch(r'\s+name="([^"\n]*)"\s*', body)
    return Found(closed[1], "{}") if closed is not None and is_name(closed[1]) else None


DSML = TagSyntax(
    begins=_tags("<{}", ("invoke",)), ends=(*_tags("</{}>", ("invoke",)), "/>"),
    read=_read_dsml, is_open=_DSML.is_open,
    sections=_tags("<{}>", _BLOCKS), trailers=_tags("</{}>", _BLOCKS),
    in_reasoning=True,
)  # fmt: skip
