"""Log, lock, terminal guard and crash reports."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moet_desk import runtime
from moet_desk.errors import MoetError
from moet_desk.locations import Locations, locate


@pytest.fixture
def places(tmp_path: Path) -> Locations:
    return locate({}, tmp_path / "data")


@pytest.fixture
def running(places: Locations) -> Iterator[runtime.Log]:
    hook = threading.excepthook
    running = runtime.start_logging(places, "info")
    yield running
    running.close()
    threading.excepthook = hook


def _log_text(places: Locations) -> str:
    return (places.logs_dir / runtime.LOG_FILE).read_text()


# -- log -------------------------------------------------------------------------------------


def test_log__levels__ours_from_info_and_others_from_warning(
    places: Locations, running: runtime.Log
) -> None:
    logging.getLogger("moet_desk.engine").info("loaded %s", "demo")
    logging.getLogger("moet_desk.engine").debug("hidden 1")
    logging.getLogger("httpx").info("hidden 2")
    logging.getLogger("httpx").warning("shown")
    running.close()
    text = _log_text(places)
    assert "INFO    MainThread moet_desk.engine: loaded demo" in text
    assert "shown" in text
    assert "hidden" not in text
    assert [line.rpartition(": ")[2] for line in running.recent()] == ["loaded demo", "shown"]


def test_log__exception__traceback_is_in_the_file(places: Locations, running: runtime.Log) -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("moet_desk").exception("it failed")
    running.close()
    running.close()
    assert "KeyError: 'gone'" in _log_text(places)


def test_log__many_lines__files_rotate(places: Locations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_LOG_BYTES", 2000)
    hook = threading.excepthook
    running = runtime.start_logging(places, "info")
    for i in range(400):
        logging.getLogger("moet_desk").info("line %d", i)
    running.close()
    threading.excepthook = hook
    files = sorted(places.logs_dir.glob("moet-desk.log*"))
    assert len(files) == 4
    assert all(file.stat().st_size <= 2000 for file in files)
    assert len(running.recent()) == 200


def test_log__folder_cannot_be_made__catalogue_error(places: Locations) -> None:
    places.data_dir.parent.mkdir(exist_ok=True)
    places.data_dir.write_text("a file")
    with pytest.raises(MoetError) as caught:
        runtime.start_logging(places, "info")
    assert caught.value.code == "MD-DISK-03"


def test_thread__ends_by_an_exception__report_and_log_line(
    places: Locations, running: runtime.Log
) -> None:
    def work() -> None:
        runtime.name_thread("engine")
        raise ZeroDivisionError("half way")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    running.close()
    (report,) = places.logs_dir.glob("crash-*.txt")
    assert "ZeroDivisionError: half way" in report.read_text()
    assert "thread engine" in report.read_text()
    assert str(report) in _log_text(places)


# -- lock ------------------------------------------------------------------------------------

_HOLDER = """
import sys, time
from pathlib import Path
from moet_desk import runtime
from moet_desk.locations import locate
with runtime.instance_lock(locate({}, Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_instance_lock__held_by_another_process__named_and_free_after_kill(
    places: Locations,
) -> None:
    command = [sys.executable, "-c", _HOLDER, str(places.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(MoetError) as caught, runtime.instance_lock(places):
            pass
        assert caught.value.code == "MD-ENG-01"
        assert caught.value.facts == {"pid": str(holder.pid), "path": str(places.data_dir)}
        holder.send_signal(signal.SIGKILL)
    with runtime.instance_lock(places):
        pass
    with runtime.instance_lock(places):
        assert (places.run_dir / "lock").read_text() == str(os.getpid())


def test_instance_lock__folder_cannot_be_made__catalogue_error(places: Locations) -> None:
    places.data_dir.parent.mkdir(exist_ok=True)
    places.data_dir.write_text("a file")
    with pytest.raises(MoetError) as caught, runtime.instance_lock(places):
        pass
    assert caught.value.code == "MD-DISK-03"


# -- terminal --------------------------------------------------------------------------------

_GUARDED = """
import ctypes, os, shutil, subprocess, sys
from pathlib import Path
from moet_desk import runtime
from moet_desk.locations import locate
libc = ctypes.CDLL(None)
print("before")
try:
    with runtime.terminal_guard(locate({}, Path(sys.argv[1]))):
        os.write(1, b"NOISE-fd1\\n")
        os.write(2, b"NOISE-fd2\\n")
        libc.printf(b"NOISE-printf\\n")
        libc.puts(b"NOISE-puts")
        print("NOISE-print", flush=True)
        print("NOISE-err", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo NOISE-child; echo NOISE-child2 >&2"])
        size = shutil.get_terminal_size()
        sys.__stderr__.write(f"drawn {size.columns}x{size.lines}\\n")
        sys.__stderr__.flush()
        if len(sys.argv) > 2:
            raise ValueError("boom")
except ValueError as error:
    print("caught", error, file=sys.stderr)
print("after")
libc.puts(b"after-c")
"""


def _run_in_terminal(arguments: list[str]) -> str:
    # readline, which pytest imports, puts a size into the environment behind Python's back
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    pid, fd = pty.fork()
    if pid == 0:  # in the child: nothing of pytest may run any more
        os.execve(sys.executable, [sys.executable, "-c", *arguments], environment)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    shown = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            data = os.read(fd, 4096)
        except OSError:  # the other side closed
            break
        if not data:
            break
        shown += data
    os.close(fd)
    assert os.waitpid(pid, 0)[1] == 0
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("crash", [False, True])
def test_terminal_guard__foreign_output__never_reaches_the_terminal(
    places: Locations, *, crash: bool
) -> None:
    shown = _run_in_terminal([_GUARDED, str(places.data_dir), *(["crash"] if crash else [])])
    middle = ["caught boom"] if crash else []
    assert shown.split("\n") == ["before", "drawn 101x33", *middle, "after", "after-c", ""]
    kept = (places.logs_dir / runtime.OUTPUT_FILE).read_text().split()
    names = "fd1 fd2 printf puts print err child child2".split()
    assert sorted(kept) == sorted(f"NOISE-{name}" for name in names)


def _n_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_terminal_guard__twice_in_one_process__no_descriptor_leaks(places: Locations) -> None:
    with runtime.terminal_guard(places):
        pass
    n_before = _n_open_files()
    for _ in range(5):
        with runtime.terminal_guard(places):
            os.write(2, b"x")
    assert _n_open_files() == n_before
    assert (places.logs_dir / runtime.OUTPUT_FILE).read_text().endswith("xxxxx")


def test_terminal_guard__terminal_gone__drawing_raises_nothing(places: Locations) -> None:
    master, terminal = pty.openpty()
    before = os.dup(1), os.dup(2)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    try:
        with runtime.terminal_guard(places):
            os.close(master)
            for _ in range(3):
                sys.__stderr__.write("x" * 10_000)
                sys.__stderr__.flush()
            with pytest.raises(OSError, match="Input/output error"):
                os.write(sys.__stderr__.fileno(), b"x")
    finally:
        os.dup2(before[0], 1)
        os.dup2(before[1], 2)
        for fd in (*before, terminal):
            os.close(fd)


# -- crashes ---------------------------------------------------------------------------------


def test_write_crash__report__has_trace_versions_and_the_end_of_the_log(
    places: Locations, running: runtime.Log
) -> None:
    logging.getLogger("moet_desk").info("the last thing")
    running.close()
    try:
        raise RuntimeError("what \ud800 happened")
    except RuntimeError as error:
        path = runtime.write_crash(places, error)
    text = path.read_text()
    assert path.parent == places.logs_dir
    for part in ("RuntimeError: what", "moet-desk 0.", "Python 3.", "the last thing"):
        assert part in text


def test_write_crash__log_folder_unwritable__temporary_folder(
    places: Locations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.data_dir.write_text("a file")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = runtime.write_crash(places, RuntimeError("x"))
    assert path.parent == tmp_path / "tmp"
    assert path.exists()


def test_name_thread__linux__the_system_sees_it() -> None:
    seen = []

    def work() -> None:
        runtime.name_thread("io-0")
        task = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        seen.append((threading.current_thread().name, task.read_text().strip()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("io-0", "io-0")]
