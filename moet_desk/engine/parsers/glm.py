"""Calls with keys and values in tags: GLM-4.5 and later, and LongCat, which also writes JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from moet_desk.engine.parsers.arguments import (
    ToolBook,
    in_string,
    is_name,
    object_text,
    read_object,
)
from moet_desk.engine.parsers.base import Found, Read, TagSyntax
from moet_desk.engine.parsers.hermes import read_call


def _pattern(prefix: str) -> re.Pattern[str]:
    key, value = rf"<{prefix}arg_key>(.*?)</{prefix}arg_key>", rf"<{prefix}arg_value>(.*?)"
    # A value whose closing tag was left out ends where the next pair begins.
    following = rf"(?=\s*<{prefix}arg_key>[^<]*</{prefix}arg_key>\s*<{prefix}arg_value>)"
    return re.compile(rf"{key}\s*{value}(?:</{prefix}arg_value>\s*|{following}\s*|\Z)", re.DOTALL)


def _read_pairs(
    body: str, tools: ToolBook, *, prefix: str, pattern: re.Pattern[str]
) -> Found | None:
    name, mark, _ = body.partition(f"<{prefix}arg_key>")
    at, name = len(name), name.strip()
    if not is_name(name) or not (mark or tools.knows(name)):
        return None
    arguments: dict[str, Any] = {}
    while (pair := pattern.match(body, at)) is not None:
        at = pair.end()
        key = pair[1].strip()
        arguments[key] = tools.typed(name, key, pair[2])
    text = object_text(arguments)
    return None if body[at:].strip() or text is None else Found(name, text)


def _is_open(body: str, *, prefix: str) -> bool:
    """Whether the last value has no end yet."""
    return body.rfind(f"<{prefix}arg_value>") > body.rfind(f"</{prefix}arg_value>")


def _reader(prefix: str) -> Read:
    return partial(_read_pairs, prefix=prefix, pattern=_pattern(prefix))


_read_longcat_pairs = _reader("longcat_")


def _read_longcat(body: str, tools: ToolBook) -> Found | None:
    if body.lstrip().startswith("{"):
        return read_call(body, tools)
    return _read_longcat_pairs(body, tools) or _read_one_object(body)


def _read_one_object(body: str) -> Found | None:
    """All arguments as one JSON object behind a single key's tag."""
    name, mark, rest = body.partition("<longcat_arg_key>")
    arguments = read_object(rest.strip().removesuffix("</longcat_arg_key>"))
    name = name.strip()
    return Found(name, arguments) if mark and arguments is not None and is_name(name) else None


def _longcat_is_open(body: str) -> bool:
    _, mark, rest = body.partition("<longcat_arg_key>")
    return in_string(rest if mark else body) or _is_open(body, prefix="longcat_")


_glm_is_open: Callable[[str], bool] = partial(_is_open, prefix="")

GLM = TagSyntax(
    begins=("<tool_call>",), ends=("</tool_call>",), read=_reader(""), is_open=_glm_is_open
)
LONGCAT = TagSyntax(
    begins=("<longcat_tool_call>",), ends=("</longcat_tool_call>",),
    read=_read_longcat, is_open=_longcat_is_open,
)  # fmt: skip
