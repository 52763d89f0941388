"""Make the pictures of the README from the app itself, on the demo model.

    python tools/take_pictures.py        writes docs/pictures/*-{80x24,120x40}.svg

The 2-bit pool is made small (96 of 256 experts), so that the cache screen has something to show.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from moet_desk.cli.context import Invocation
from moet_desk.cli.desk import AppDesk
from moet_desk.engine.handle import EngineHandle, EngineOptions, start_engine
from moet_desk.settings import Settings
from moet_desk.ui.desk import PlanWishes
from moet_desk.ui.screenshot import save_screenshots

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
QUESTIONS = (
    "What is 21 + 34?",
    "Write a very short story for young children about a fox and a kite.",
)


def open_pack(name: str, wishes: PlanWishes | None) -> EngineHandle:
    """The pictures load no second model."""
    raise AssertionError(name)


def main() -> None:
    """Pack the demo model if need be, ask it two things, and save what the screens show."""
    with tempfile.TemporaryDirectory() as folder:
        invocation = Invocation()
        invocation.data_dir = Path(folder)
        pack = invocation.model_path("demo")
        handle = start_engine(pack, EngineOptions(pool_slots=96, save_heat=False))
        desk = AppDesk(invocation, Settings(), open_pack)
        for path in save_screenshots(PICTURES, handle, desk, questions=QUESTIONS):
            print(path)


if __name__ == "__main__":
    main()
