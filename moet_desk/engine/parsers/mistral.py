"""Calls of Mistral: `[TOOL_CALLS]` and a list of JSON objects, or a name, `[ARGS]` and one object.

No tag ends them; a call is over where its JSON is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from moet_desk.engine.parsers.answers import Think
from moet_desk.engine.parsers.arguments import ToolBook, in_string, object_text
from moet_desk.engine.parsers.base import Found, Taken

BEGIN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
MISTRAL_THINK = Think("[THINK]", "[/THINK]")

_HEAD = re.compile(r"\s*([A-Za-z_][\w.\-/]*)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_JSON = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class MistralSyntax:
    """See `base.Syntax`."""

    opens: tuple[str, ...] = (BEGIN,)
    trailers: tuple[str, ...] = ()
    in_reasoning: bool = False

    def take(
        self, held: str, at: int, *, since: int, follows: bool, final: bool, tools: ToolBook
    ) -> Taken | None:
        """See `base.Syntax`."""
        start = at + len(BEGIN)
        if not final and not any(mark in held[max(start, since - len(BEGIN)) :] for mark in "}]"):
            return None
        taken = _read(held, start)
        if taken is not None:
            return taken
        search = start
        while (following := held.find(BEGIN, search)) >= 0:
            if not in_string(_json_part(held[start:following])):
                return Taken(following)
            search = following + 1
        return Taken(len(held)) if final else None


def _json_part(text: str) -> str:
    head = _HEAD.match(text)
    return text[head.end() :] if head is not None else text


def _read(held: str, start: int) -> Taken | None:
    """The calls behind an opening tag, once their JSON is whole."""
    head = _HEAD.match(held, start)
    json_at = head.end() if head is not None else len(held) - len(held[start:].lstrip())
    try:
        value, end = _JSON.raw_decode(held, json_at)
    except (ValueError, RecursionError):
        return None
    if head is not None:
        text = object_text(value)
        return None if text is None else Taken(end, (Found(head[1], text),))
    calls = [_found(entry) for entry in value] if isinstance(value, list) else []
    whole = [call for call in calls if call is not None]
    return Taken(end, whole if len(whole) == len(calls) else ())


def _found(entry: object) -> Found | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        return None
    text = object_text(entry.get("arguments"))
    return None if text is None else Found(entry["name"], text)


MISTRAL = MistralSyntax()
