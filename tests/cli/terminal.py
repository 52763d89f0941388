"""The app on a terminal of 80 x 24: what is typed, and what is on the screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pexpect
import pyte

from tests.cli.conftest import environment

ENTER, ESCAPE, UP, DOWN, RIGHT = "\r", "\x1b", "\x1b[A", "\x1b[B", "\x1b[C"
HOME, END = "\x1b[H", "\x1b[F"
F2, F3, F4, F7 = "\x1bOQ", "\x1bOR", "\x1bOS", "\x1b[18~"


class Terminal:
    """See the module's paragraph."""

    def __init__(
        self,
        data_dir: Path,
        port: int,
        more: Mapping[str, str] | None = None,
        *,
        arguments: Sequence[str] = (),
    ) -> None:
        variables = environment(data_dir) | {
            "LANG": "C.UTF-8",
            "MOET_DESK_ENDPOINT_PORT": str(port),
            **(more or {}),
        }
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "moet_desk", *arguments],
            env=variables,  # type: ignore[arg-type]
            dimensions=(24, 80),
            encoding="utf-8",
        )
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.Stream(self._screen)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Draw what comes until `text` is on the screen."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < end, f"no {text!r} on\n{self.text}"
            self._draw()

    def _draw(self) -> None:
        try:
            self._stream.feed(self.child.read_nonblocking(65536, 0.1))
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF as end:
            raise AssertionError(f"it ended after\n{self.text}") from end

    def press(self, *keys: str, until: str) -> None:
        """Press keys and wait for a text."""
        for key in keys:
            self.child.send(key)
            self._draw()
        self.wait_for(until)

    def quit(self) -> int:
        """Close the app and return its exit code."""
        self.child.sendcontrol("q")
        self.child.expect(pexpect.EOF, timeout=30)
        self.child.close()
        return int(self.child.exitstatus)

    def ended(self) -> int:
        """Wait for an end by itself, and return its exit code."""
        self.child.expect(pexpect.EOF, timeout=30)
        self._stream.feed(self.child.before)
        self.child.close()
        return int(self.child.exitstatus)

    def kill(self) -> None:
        """Close the window without a word, as a terminal that crashes."""
        self.child.close(force=True)
