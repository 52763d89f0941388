"""Calls of Kimi K2. Their ids, `functions.NAME:COUNTER`, must be said back as they are."""

from __future__ import annotations

import re

from moet_desk.engine.parsers.arguments import (
    ToolBook,
    in_string,
    is_name,
    load_json,
    read_object,
)
from moet_desk.engine.parsers.base import Found, TagSyntax

SECTION = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
BEGIN = "<|tool_call_begin|>"
END = "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_ID = re.compile(r"(?:functions\.)?(?:([A-Za-z_][\w.\-/]*)(?::\d+)?|\d+)")


def _read(body: str, tools: ToolBook) -> Found | None:
    head, separator, rest = body.partition(ARGUMENTS)
    name_and_count = _ID.fullmatch(head.strip())
    arguments = read_object(rest)
    if not separator or name_and_count is None or arguments is None:
        return None
    name = name_and_count[1] or _only_fitting(arguments, tools)
    if name is None or not is_name(name):
        return None
    return Found(name, arguments, head.strip() if ":" in head else None)


def _only_fitting(arguments: str, tools: ToolBook) -> str | None:
    """The one tool that has all these arguments, for a call that says its number only."""
    keys = set(load_json(arguments))
    fitting = [name for name in tools.schemas if keys <= tools.keys(name)]
    return fitting[0] if len(fitting) == 1 else None


def _is_open(body: str) -> bool:
    return in_string(body.partition(ARGUMENTS)[2])


KIMI_K2 = TagSyntax(
    begins=(BEGIN,), ends=(END,), read=_read, is_open=_is_open,
    sections=(SECTION,), trailers=(SECTION_END,), in_reasoning=True,
)  # fmt: skip
