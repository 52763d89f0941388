"""A window of tmux: a real terminal that can be resized, pasted into, suspended and closed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


class Tmux:
    """A server of its own with one window, in which `command` of a shell runs. Units: cells, s."""

    def __init__(
        self, folder: Path, command: str, environment: dict[str, str], *, size: tuple[int, int]
    ) -> None:
        self._socket = folder / "tmux"
        # pytest's workers set the size of a terminal, which would count more than the window's.
        others = ("TMUX", "COLUMNS", "LINES")
        variables = {name: value for name, value in environment.items() if name not in others}
        self._environment = variables | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        columns, rows = map(str, size)
        self._tmux("new-session", "-d", "-x", columns, "-y", rows, command)
        self._tmux("set-option", "-g", "window-size", "manual")
        self.resize(*size)

    def _tmux(self, *arguments: str, stdin: str | None = None) -> str:
        # A folder of a test may be too long for a socket's name, so it is named from inside.
        start = ["tmux", "-S", self._socket.name, "-f", os.devnull, "-u"]
        done = subprocess.run(
            [*start, *arguments], cwd=self._socket.parent, env=self._environment, input=stdin,
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def text(self) -> str:
        """What is on the screen, without blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._tmux("capture-pane", "-p").split("\n"))

    def wait_for(self, text: str, *, gone: str = "", timeout_s: float = 30) -> str:
        """The screen, once `text` is on it and `gone` is not."""
        end = time.monotonic() + timeout_s
        while text not in (seen := self.text) or (gone and gone in seen):
            assert time.monotonic() < end, f"no {text!r} on\n{seen}"
            time.sleep(0.05)
        return seen

    def type(self, text: str) -> None:
        """Type text as it stands."""
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, F4, C-l."""
        self._tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Paste as terminals do, between brackets if the program asked for them."""
        self._tmux("load-buffer", "-", stdin=text)
        self._tmux("paste-buffer", "-p", "-d")

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def pids(self) -> list[int]:
        """The shell of the window and what it has started, newest last."""
        shell = self._tmux("display-message", "-p", "#{pane_pid}").strip()
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        return [int(shell), *map(int, children)]

    def close_window(self) -> None:
        """The window goes, without a word to what runs in it."""
        self._tmux("kill-session")

    def end(self) -> None:
        """End the server, whatever is left of it."""
        subprocess.run(
            ["tmux", "-S", self._socket.name, "kill-server"], cwd=self._socket.parent,
            env=self._environment, capture_output=True, check=False,
        )  # fmt: skip
