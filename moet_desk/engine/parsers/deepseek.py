"""Calls of DeepSeek V3 and R1 (arguments in a code fence) and of V3.1 (bare arguments)."""

from __future__ import annotations

import re

from moet_desk.engine.parsers.arguments import ToolBook, in_string, is_name, read_object
from moet_desk.engine.parsers.base import Found, TagSyntax

SECTION = "<｜tool▁calls▁begin｜>"
SECTION_END = "<｜tool▁calls▁end｜>"
BEGIN = "<｜tool▁call▁begin｜>"
END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_FENCED = re.compile(r"\s*([^\n]*)\n\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?", re.DOTALL)


def _read(body: str, tools: ToolBook) -> Found | None:
    """Both ways to write a call: models of either are seen to use the other's."""
    head, separator, rest = body.partition(SEPARATOR)
    if not separator:
        return None
    if head.strip() == "function":
        fenced = _FENCED.fullmatch(rest)
        if fenced is None:
            return None
        head, rest = fenced[1], fenced[2]
    name, arguments = head.strip(), read_object(rest)
    return None if arguments is None or not is_name(name) else Found(name, arguments)


def _is_open(body: str) -> bool:
    _, _, rest = body.partition(SEPARATOR)
    return in_string(rest[max(0, rest.find("{")) :])


DEEPSEEK = TagSyntax(
    begins=(BEGIN,), ends=(END,), read=_read, is_open=_is_open,
    sections=(SECTION,), trailers=(SECTION_END,), in_reasoning=True,
)  # fmt: skip
