"""A chat as a document: Markdown for people, JSON for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from moet_desk.ui.chat_records import Status, Turn


def to_markdown(turns: Sequence[Turn], *, model: str, system: str) -> str:
    """The branch that is shown, with a heading per message; answers that did not end say so."""
    parts = [f"> {line}" for line in system.splitlines()]
    for turn in turns:
        who = "You" if turn.role == "user" else model or "Model"
        ended = "" if turn.status is Status.DONE else f" ({turn.status.value})"
        files = [f"Attached: {file.words}" for file in turn.files]
        parts += [f"## {who}{ended}", *files, turn.text]
    return "\n\n".join(parts) + "\n"


def to_json(turns: Sequence[Turn], *, model: str, system: str) -> str:
    """The chat with times, states and figures of its messages."""
    messages = [
        {
            "role": turn.role,
            "content": turn.text,
            "reasoning": turn.thought,
            "files": [{"name": file.name, "text": file.text} for file in turn.files],
            "status": turn.status.value,
            "created": turn.created.isoformat(),
            "figures": turn.meta,
        }
        for turn in turns
    ]
    document = {"schema": 1, "model": model, "system": system, "messages": messages}
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"
