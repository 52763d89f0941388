"""What the app costs beside an engine, and how soon it answers a key: the budgets of the screens.

    python -m bench.ui [--seconds 12] [--json]

Runs the app in a terminal of its own (a pty of 120 x 40) on the scripted engine, which writes 100
tokens a second in a thread. Other programs may be running: the costs are CPU time of the UI thread
alone, which they do not change much. Of times on the clock, those in which the program's main thread
or the measuring one waited for a core (schedstat) are given apart.

    share of a core   CPU time of the main thread while it streams, over the time that passed, for
                      the chat, the cache screen on the demo's shape and on a model of 43 x 256;
                      and how often a second new words were drawn
    key to screen     from a key in the terminal until the changed screen has come back, while it streams
    first frame       from the start of the program until the first whole screen; CPU time and clock
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

COLUMNS, ROWS = 120, 40
BUDGETS = {"share": 0.03, "key_ms": 50.0, "first_frame_s": 1.0}
ROOT = Path(__file__).resolve().parent.parent


# -- the app under measurement ---------------------------------------------------------------


def app(shape: str, mode: str, report: str, seconds: float) -> None:
    """Run the app on a scripted engine and write the main thread's CPU time into a file."""
    from moet_desk.engine.scripted import DEFAULT_ANSWER, Script, ScriptedEngine
    from moet_desk.ui.app import MoetDeskApp
    from moet_desk.ui.look import Look
    from tests.ui.desk import FakeDesk
    from tests.ui.support import FakeChats

    big = shape == "big"
    script = Script(
        answers=("\n\n".join([DEFAULT_ANSWER] * 60),), tokens_per_s=100.0, prompt_tok_per_s=1e5,
        n_layers=43 if big else 8, n_experts=256 if big else 32, top_k=6 if big else 4,
    )  # fmt: skip
    engine = ScriptedEngine(script)

    class Measured(MoetDeskApp):
        CSS_PATH = str(ROOT / "moet_desk" / "ui" / "app.tcss")

        async def on_ready(self) -> None:
            self.set_timer(2.0, self.begin)

        async def begin(self) -> None:
            await self.chat.ask("Write.")
            await self.action_go(mode)
            self.set_timer(3.0, self.measure)

        def measure(self) -> None:
            began, cpu = time.monotonic(), time.thread_time()
            flushes = self.chat.pace.n_flushes

            def done() -> None:
                took, used = time.monotonic() - began, time.thread_time() - cpu
                said = {
                    "share": used / took,
                    "seconds": took,
                    "tokens_per_s": engine.snapshot().tokens / max(1e-9, took + 3.0),
                    "text_per_s": (self.chat.pace.n_flushes - flushes) / took,
                    "slow": self.chat.pace.slow,
                }
                Path(report).write_text(json.dumps(said))

            self.set_timer(seconds, done)

    look = Look(glyphs="unicode", terminal="xterm-256color")
    Measured(engine.start, FakeChats(), FakeDesk(lambda: engine), model="m", look=look).run()


# -- a terminal ------------------------------------------------------------------------------


class Terminal:
    """A program on a pty, its output read all the time."""

    def __init__(self, arguments: list[str], more: dict[str, str] | None = None) -> None:
        import fcntl
        import struct
        import termios

        self.began = time.monotonic()
        main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        variables = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor",
                     "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), **(more or {})}  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=other, stdout=other, stderr=other, env=variables,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self._fd = main
        self.seen = b""

    def read(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return b""
        try:
            new = os.read(self._fd, 1 << 16)
        except OSError:
            return b""
        self.seen = (self.seen + new)[-(1 << 20) :]
        return new

    def until(self, holds: Callable[[], bool], limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(self.seen[-2000:].decode("utf-8", "replace"))
            self.read(0.002)

    def send(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def cpu_s(self) -> float:
        """CPU time of the whole process so far."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float:
        """How long the program's main thread and this one have waited for a core so far."""
        found = 0.0
        for path in (f"/proc/{self.process.pid}/schedstat", "/proc/self/schedstat"):
            found += int(Path(path).read_text().split()[1]) / 1e9
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._fd)


def streaming(shape: str, mode: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Share of a core of the UI thread."""
    report = folder / f"{shape}-{mode}.json"
    report.unlink(missing_ok=True)
    terminal = Terminal(["-m", "bench.ui", "--app", shape, mode, str(report), str(seconds)])
    try:
        terminal.until(report.exists, 30 + seconds)
        time.sleep(0.1)
        found: dict[str, Any] = json.loads(report.read_text())
        return found
    finally:
        terminal.close()


def keys(folder: Path, *, presses: int = 40) -> dict[str, Any]:
    """Milliseconds from a typed letter to its echo in the prompt while an answer streams."""
    report = folder / "never.json"
    terminal = Terminal(["-m", "bench.ui", "--app", "demo", "chat", str(report), "1000"])
    try:
        terminal.until(lambda: b"writing" in terminal.seen)
        times, quiet = [], []
        for i in range(presses):
            pause_until = time.monotonic() + 0.23
            while time.monotonic() < pause_until:
                terminal.read(0.01)
            echo, seen = bytes([0x41 + i % 26]), b""
            began, waited = time.monotonic(), terminal.waited_s()
            terminal.send(echo)
            while echo not in seen and time.monotonic() - began < 2.0:
                seen += _without_words(terminal.read(0.001))
            took = time.monotonic() - began
            times.append(1e3 * took)
            quiet.append(1e3 * max(0.0, took - (terminal.waited_s() - waited)))
            terminal.send(b"\x7f")  # takes it away again
        return {
            "clock_ms": {"median": median(times), "p95": quantiles(times, n=20)[-1]},
            "less_waiting_ms": {"median": median(quiet), "p95": quantiles(quiet, n=20)[-1]},
            "presses": presses,
        }
    finally:
        terminal.close()


def _without_words(output: bytes) -> bytes:
    """What is drawn alone in a cell run: the echo of a letter; the answer's words are longer."""
    import re

    texts = re.split(rb"\x1b\[[0-9;?]*[A-Za-z]", output)
    return b" ".join(text.strip() for text in texts if len(text.strip()) == 1)


def first_frame(repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds from the start of `moet-desk` until the tabs and the footer are there."""
    clock, cpu, quiet = [], [], []
    for _ in range(repeats):
        waited = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        terminal = Terminal(
            ["-m", "moet_desk", "--demo-trace", "demo"],
            {"MOET_DESK_DATA_DIR": str(folder / "data")},
        )
        try:
            terminal.until(lambda t=terminal: b"F8 Log" in t.seen and b"Help" in t.seen)
            clock.append(time.monotonic() - terminal.began)
            quiet.append(clock[-1] - (terminal.waited_s() - waited))
            cpu.append(terminal.cpu_s())
        finally:
            terminal.close()
    return {
        "clock_s": min(clock),
        "less_waiting_s": min(quiet),
        "median_clock_s": median(clock),
        "cpu_s": min(cpu),
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--app", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.app:
        shape, mode, report, seconds = given.app
        app(shape, mode, report, float(seconds))
        return
    import tempfile

    from moet_desk.cli.bench_record import machine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record: dict[str, Any] = {
            **{k: v for k, v in machine().items() if k in ("cpu", "cores", "commit", "date")},
            "command": "python -m bench.ui", "terminal": f"{COLUMNS}x{ROWS}",
            "load": os.getloadavg()[0], "budgets": BUDGETS,
            "streaming": {
                f"{shape} {mode}": streaming(shape, mode, given.seconds, folder)
                for shape, mode in (("demo", "chat"), ("demo", "cache"), ("big", "cache"))
            },
            "key": keys(folder),
            "first_frame": first_frame(5, folder),
        }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
