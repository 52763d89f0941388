from __future__ import annotations

import json
from pathlib import Path

import pytest

from moet_desk.engine.scripted import Script
from tests.ui.support import Stage, dump


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
