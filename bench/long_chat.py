"""What a chat of many messages costs the screens: opening it, scrolling, typing in it.

    python -m bench.long_chat [MESSAGES]

Prints a JSON document. The app runs without a terminal on the scripted engine, with the real store;
times are seconds of CPU, from the key to when the screen was drawn. The tests bound them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from moet_desk.engine.scripted import DEFAULT_ANSWER, Script
from moet_desk.store.chats import ChatStore
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage

REPEATS = 40


def fill(store: ChatStore, n_messages: int) -> int:
    """Store a chat of questions and answers in turn; returns its id."""
    chat_id = store.create_chat("long", settings={"quality": "fast"})
    rows = [
        (
            chat_id, i, "user" if i % 2 == 0 else "assistant",
            f"Question {i}?" if i % 2 == 0 else f"{DEFAULT_ANSWER}\n\nThis was answer {i}.",
            "done", i or None, 1e9 + i,
        )
        for i in range(n_messages)
    ]  # fmt: skip
    first = store.add_message(chat_id, "user", rows[0][3])
    connection = store._connection
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO messages (chat_id, position, role, content, status, parent, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(*row[:5], first + i - 1, row[6]) for i, row in enumerate(rows) if i],
    )
    connection.execute("UPDATE chats SET tip = NULL")
    connection.execute("COMMIT")
    return chat_id


async def measure(n_messages: int, *, repeats: int = REPEATS) -> dict[str, Any]:
    """Open such a chat, read up in it, jump to its ends, write in it, look for something."""
    with tempfile.TemporaryDirectory() as folder:
        store = ChatStore.open(Path(folder) / "chats.sqlite3")
        chat_id = fill(store, n_messages)
        stage = Stage(Script(context=10**7), chats=store)  # type: ignore[arg-type]
        async with stage.open(80, 24) as pilot:
            await stage.ready(pilot)
            costs = await _costs(stage, pilot, chat_id, repeats)
            n_widgets = len(stage.app.chat.query("*"))
    return {"messages": n_messages, "widgets": n_widgets, **costs}


async def _costs(stage: Stage, pilot: Pilot[int], chat_id: int, n: int) -> dict[str, Any]:
    chat = stage.app.chat

    async def key(*keys: str) -> None:
        await pilot.press(*keys)
        await stage.settle(pilot)

    started_s = time.process_time()
    stage.app.conversation.open(chat_id)
    read_s = time.process_time() - started_s
    opened_s = await _cost(chat._show_other_chat, stage, pilot)
    pages = [await _cost(lambda: key("pageup"), stage, pilot) for _ in range(n)]
    first_s = await _cost(lambda: key("ctrl+home"), stage, pilot)
    end_s = await _cost(lambda: key("ctrl+end"), stage, pilot)
    assert chat.query_one(Transcript).following
    chat.prompt.focus()
    keys = [await _cost(lambda: key("a"), stage, pilot) for _ in range(n)]
    await key("ctrl+f", "9")
    found_s = await _cost(lambda: key("9"), stage, pilot)
    await key("escape")
    return {
        "read_s": round(read_s, 3),
        "open_s": round(read_s + opened_s, 3),
        "page_s": _spread(pages),
        "to_first_s": round(first_s, 3),
        "to_end_s": round(end_s, 3),
        "key_s": _spread(keys),
        "find_s": round(found_s, 3),
    }


async def _cost(call: Callable[[], Any], stage: Stage, pilot: Pilot[int]) -> float:
    started_s = time.process_time()
    await call()
    await stage.settle(pilot)
    return time.process_time() - started_s


def _spread(costs: list[float]) -> dict[str, float]:
    costs = sorted(costs)
    return {
        "median": round(statistics.median(costs), 4),
        "p95": round(costs[len(costs) * 95 // 100], 4),
        "most": round(costs[-1], 4),
    }


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(json.dumps(asyncio.run(measure(wanted)), indent=1))
