"""The app in a window of tmux: sizes, signs of two cells, a large paste, pauses and sudden ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from moet_desk.errors import ExitCode
from tests.cli.conftest import environment
from tests.cli.tmux import Tmux

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

Open = Callable[..., Tmux]


@pytest.fixture
def open_app(tmp_path: Path) -> Iterator[Open]:
    """Opens the app on one data folder, in windows that are closed at the end."""
    windows: list[Tmux] = []

    def open_one(
        *,
        size: tuple[int, int] = (80, 24),
        speed: int = 400,
        n_words: int = 50,
        shell: bool = False,
    ) -> Tmux:
        folder = tmp_path / f"window{len(windows)}"
        folder.mkdir()
        app = f"{sys.executable} -m tests.cli.scripted_app {speed} {n_words}"
        variables = environment(tmp_path / "data") | {"MOET_DESK_ENDPOINT_PORT": "0"}
        window = Tmux(folder, "sh" if shell else app, variables, size=size)
        windows.append(window)
        if shell:
            window.type(f"PS1='ended with $?: '; {app}")
            window.press("Enter")
        window.wait_for("demo is ready")
        return window

    yield open_one
    for window in windows:
        window.end()


def ask(app: Tmux, text: str, *, until: str) -> None:
    app.type(text)
    app.press("Enter")
    app.wait_for(until)


def stored(tmp_path: Path) -> list[tuple[str, str]]:
    """Status and text of all messages."""
    [file] = (tmp_path / "data").rglob("chats.sqlite3")
    with sqlite3.connect(file) as chats:
        return chats.execute("SELECT status, content FROM messages ORDER BY id").fetchall()


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, f"{pid} goes on"
        time.sleep(0.05)


def test_resize__larger_too_small_and_back__drawn_each_time(open_app: Open) -> None:
    app = open_app()
    ask(app, "Count.", until="50 tokens")
    app.resize(200, 60)
    large = app.wait_for("Tiers, recent look-ups")
    assert "n0001" in large
    assert "F1 Help" in large.rstrip().splitlines()[-1]
    app.resize(60, 15)
    small = app.wait_for("needs 80 x 24, this is 60 x 15")
    assert "▇" not in small
    assert "n0001" not in small
    app.resize(80, 24)
    back = app.wait_for("n0001", gone="this is 60 x 15")
    assert "F1 Help" in back.rstrip().splitlines()[-1]
    assert all(cell_len(line) <= 80 for line in back.splitlines())


def test_wide_signs__rail_and_scroll_bar_stay_in_their_columns(open_app: Open) -> None:
    app = open_app(size=(120, 40))
    ask(app, "Count.", until="50 tokens")
    ask(app, "宽字 🙂", until="plain text end")
    rows = [row for row in app.text.splitlines() if re.search(r"\bend\b|宽字", row)]
    places = {cell_len(row[: row.index("│")]) for row in rows if "👩" not in row}
    assert len(places) == 1, rows
    assert len(rows) == 5
    [family] = [row for row in rows if "👩" in row]
    assert family.count("│") == 1


def test_suspended__shell_is_usable__and_the_screen_comes_back(open_app: Open) -> None:
    app = open_app(shell=True)
    ask(app, "Count.", until="50 tokens")
    os.kill(app.pids[-1], signal.SIGTSTP)
    app.wait_for("Stopped")
    ask(app, "echo still=here", until="\nstill=here")
    app.resize(100, 30)
    ask(app, "fg", until="F1 Help")
    assert "n0050" in app.wait_for("50 tokens")
    app.type("typed afterwards")
    app.wait_for("typed afterwards")
    app.press("C-q")
    app.wait_for("\nended with 0:\n")


def test_paste__one_megabyte__whole_and_soon(open_app: Open, tmp_path: Path) -> None:
    text = "".join(f"line {i:06} 日本 🙂 {'x' * 80}\n" for i in range(10_000)) + "the very end"
    assert len(text.encode()) > 1_000_000
    app = open_app()
    begun = time.monotonic()
    app.paste(text)
    app.type("!")
    # The prompt may fold what was pasted; what it says of it has to come soon in any case.
    while not re.search(r"very end!|pasted", app.text, re.IGNORECASE):
        assert time.monotonic() - begun < 20
        time.sleep(0.05)
    app.press("Enter")
    app.wait_for("50 tokens")
    [file] = (tmp_path / "data").rglob("chats.sqlite3")
    with sqlite3.connect(file) as chats:
        typed, files = chats.execute("SELECT content, files FROM messages ORDER BY id").fetchone()
    assert typed == "!"
    assert [one["text"] for one in json.loads(files)] == [text]


def test_window_closed_while_writing__nothing_that_was_shown_is_lost(
    open_app: Open, tmp_path: Path
) -> None:
    app = open_app(speed=60, n_words=5000)
    ask(app, "Count.", until="n0020")
    [pid] = app.pids
    shown = max(re.findall(r"n\d{4}", app.text))
    app.close_window()
    wait_for_end(pid)
    status, text = stored(tmp_path)[-1]
    assert status == "stopped"
    words = text.split()
    assert shown in words
    assert words[:-1] == [f"n{i:04}" for i in range(1, len(words))]

    again = open_app()
    again.press("C-l")
    again.wait_for("Count.")
    again.press("Enter")
    again.wait_for("   stopped")
    again.wait_for(words[-2])


def test_asked_to_end__text_is_kept_and_the_terminal_given_back(
    open_app: Open, tmp_path: Path
) -> None:
    app = open_app(speed=60, n_words=5000, shell=True)
    ask(app, "Count.", until="n0010")
    os.kill(app.pids[-1], signal.SIGTERM)
    app.wait_for(f"ended with {ExitCode.TERMINATED:d}:")
    assert stored(tmp_path)[-1][0] == "stopped"
    ask(app, "echo typed=seen", until="\ntyped=seen")
