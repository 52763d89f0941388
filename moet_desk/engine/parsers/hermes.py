"""Calls in the Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The demo model's, Qwen3's, and what is tried with models that show no other.
"""

from __future__ import annotations

from moet_desk.engine.parsers.arguments import ToolBook, in_string, load_json, object_text
from moet_desk.engine.parsers.base import Found, TagSyntax

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def read_call(body: str, tools: ToolBook) -> Found | None:
    """A call from its JSON object; see `base.Read`."""
    try:
        block = load_json(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(block, dict):
        return None
    name, arguments = block.get("name"), block.get("arguments", block.get("parameters"))
    text = object_text(arguments)
    if text is None or not isinstance(name, str) or not name.isprintable() or not name:
        return None
    return Found(name, text)


HERMES = TagSyntax(begins=(OPEN,), ends=(CLOSE,), read=read_call, is_open=in_string)
