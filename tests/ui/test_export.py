from __future__ import annotations

import json
from pathlib import Path

import pytest

from moet_desk.engine.scripted import Script
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.chat_records import Status, Turn
from moet_desk.ui.export import to_json, to_markdown
from tests.ui.support import NOON, Stage, dump


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.asyncio
async def test_export__both_kinds__whole_chat_and_nothing_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Stage(Script(answers=("An answer é.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "A question?")
        await stage.play(pilot, 3.0)
        await stage.ask(pilot, "/export")
        await stage.ask(pilot, "/export json")
        markdown = only(tmp_path, "*.md")
        other = only(tmp_path, "*.json")
        text = markdown.read_text("utf-8")
        assert text.index("## You") < text.index("A question?") < text.index("An answer é.")
        messages = json.loads(other.read_text("utf-8"))["messages"]
        assert [m["content"] for m in messages] == ["A question?", "An answer é."]
        markdown.write_text("mine")
        await stage.ask(pilot, "/export md")
        await stage.settle(pilot)
        assert markdown.read_text() == "mine"
        assert "MD-DISK-03" in dump(stage.app)


def test_export__files_and_reasoning__named_in_markdown_whole_in_json() -> None:
    files = (Attachment("a.md", "inside", 2),)
    turns = [
        Turn(1, "user", "q", Status.DONE, NOON, files=files),
        Turn(2, "assistant", "half", Status.STOPPED, NOON, parent=1, thought="I think."),
    ]
    text = to_markdown(turns, model="m", system="Be brief.")
    assert text == (
        "> Be brief.\n\n## You\n\nAttached: a.md, 6 B, 2 tokens\n\nq\n\n## m (stopped)\n\nhalf\n"
    )
    first, second = json.loads(to_json(turns, model="m", system=""))["messages"]
    assert first["files"] == [{"name": "a.md", "text": "inside"}]
    assert (second["reasoning"], second["files"], second["status"]) == ("I think.", [], "stopped")
