"""The process itself: its log, its lock, its terminal and what it leaves behind when it crashes.

Owns the log file and its writer thread ("log"), the lock that keeps a data folder to one program,
the guard that keeps foreign output off the screen, and crash reports. Knows no engine and no
screens. Start and stop from the main thread; logging and crash reports work from any.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import io
import logging
import os
import platform
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path

from moet_desk import __version__
from moet_desk.errors import MoetError, fail
from moet_desk.errors.disk import unwritable
from moet_desk.locations import Locations

LOG_FILE = "moet-desk.log"
OUTPUT_FILE = "output.log"  # what libraries print to stdout and stderr while the app is open
FAULT_FILE = "fault.log"  # stacks of all threads if the process dies of a signal
LOCK_FILE = "lock"
CONNECTED_LOG, CONNECTED_LOCK = "connected.log", "connected.lock"  # of the app on another server

_LOG_BYTES, _LOG_FILES = 4 * 2**20, 3
_RECENT_LINES = 200  # what the log screen shows
_REPORT_TAIL_BYTES = 16 * 1024
# The decode thread waits for the interpreter lock up to this long beside a busy screen; 0.5 ms
# instead of Python's 5 ms halved the slow-down that was measured.
_SWITCH_INTERVAL_S = 0.0005

log = logging.getLogger(__name__)


# -- interpreter and threads -----------------------------------------------------------------


def tune_interpreter() -> None:
    """Let threads take turns faster than Python does by itself."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def name_thread(name: str) -> None:
    """Give the calling thread a name, in Python and in the tools of the system."""
    threading.current_thread().name = name
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    with suppress(OSError):  # only Linux has it
        comm.write_text(name[:15])  # the kernel keeps 15 bytes


# -- log -------------------------------------------------------------------------------------


class Log:
    """The running log; made by `start_logging`, closed once."""

    def __init__(self, file: RotatingFileHandler, level: str) -> None:
        records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._recent = _Recent()
        self._sender = QueueHandler(records)
        self._listener = _Listener(records, file, self._recent)
        self._file = file
        self._root_level = logging.getLogger().level
        logging.getLogger().addHandler(self._sender)
        logging.getLogger().setLevel(logging.WARNING)  # other people's libraries
        logging.getLogger("moet_desk").setLevel(level.upper())
        logging.captureWarnings(capture=True)
        self._listener.start()

    def recent(self) -> tuple[str, ...]:
        """Return the last lines, oldest first."""
        return tuple(self._recent.lines)

    def close(self) -> None:
        """Write what is waiting and end the writer thread. A second call does nothing."""
        root = logging.getLogger()
        if self._sender not in root.handlers:
            return
        root.removeHandler(self._sender)
        root.setLevel(self._root_level)
        logging.captureWarnings(capture=False)
        self._listener.stop()
        self._file.close()


class _Listener(QueueListener):
    """A listener whose thread has a name."""

    def start(self) -> None:
        super().start()
        thread: threading.Thread | None = getattr(self, "_thread", None)
        if thread is not None:
            thread.name = "log"


class _File(RotatingFileHandler):
    """The log file; a full disk must not take the program down or print on the screen."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the line."""

    def close(self) -> None:
        """Close the file; what it could not take is lost."""
        with suppress(OSError):
            super().close()


class _Recent(logging.Handler):
    """The last lines, for the log screen."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=_RECENT_LINES)
        self.setFormatter(_formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def start_logging(places: Locations, level: str, name: str = LOG_FILE) -> Log:
    """Write this process's log to a file, from its own thread.

    Also keeps stacks of crashes by signal, and writes a report for an exception that ends a thread.
    The log is closed at exit if nobody closes it earlier.

    Args:
        places: the log goes into `logs_dir`.
        level: "debug", "info", "warning" or "error".
        name: of the file; two processes must not rotate the same one.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03, the log cannot be written.
    """
    path = places.logs_dir / name
    try:
        places.logs_dir.mkdir(parents=True, exist_ok=True)
        file = _File(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8")
        faults = (places.logs_dir / FAULT_FILE).open("a", encoding="utf-8")
    except OSError as problem:
        raise unwritable(path, problem) from problem
    file.setFormatter(_formatter())
    faulthandler.enable(faults)
    threading.excepthook = _report_of_thread(places)
    running = Log(file, level)
    atexit.register(running.close)
    return running


def _formatter() -> logging.Formatter:
    layout = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(threadName)s %(name)s: %(message)s"
    formatter = logging.Formatter(layout, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


# -- one program per data folder -------------------------------------------------------------


@contextmanager
def instance_lock(places: Locations, name: str = LOCK_FILE) -> Iterator[None]:
    """Be the only program that runs on this data folder, or the only one that takes this lock.

    The lock belongs to the process, so a killed one leaves none behind; the file stays.

    Raises:
        MoetError: MD-ENG-01 with the process that has it; MD-DISK-03 no lock can be made.
    """
    path = places.run_dir / name
    try:
        places.run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise unwritable(path, problem) from problem
    try:
        _lock(fd, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError as problem:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace") or "?"
        raise fail("MD-ENG-01", pid=pid, path=str(path.parent.parent)) from problem
    except OSError as problem:
        raise unwritable(path, problem) from problem


# -- terminal --------------------------------------------------------------------------------


@contextmanager
def terminal_guard(places: Locations) -> Iterator[None]:
    """Keep everything but the app off the screen while the app is open.

    Libraries in C or Rust write to descriptors 1 and 2 and would ruin the display; these go to a
    file meanwhile. `sys.__stdout__` and `sys.__stderr__`, to which Textual draws and from which it
    learns the size, are the terminal itself under another number.

    Raises:
        MoetError: MD-DISK-03, the file cannot be written.
    """
    path = places.logs_dir / OUTPUT_FILE
    try:
        places.logs_dir.mkdir(parents=True, exist_ok=True)
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(output).st_size > _LOG_BYTES:
            os.truncate(output, 0)
    except OSError as problem:
        raise unwritable(path, problem) from problem
    saved = os.dup(1), os.dup(2)
    terminal = saved[1] if os.isatty(2) else saved[0]
    raw = os.fdopen(terminal, "wb", closefd=False)
    screen = _Screen(raw, encoding="utf-8", errors="replace")
    streams = sys.__stdout__, sys.__stderr__
    _flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.__stdout__ = sys.__stderr__ = screen  # type: ignore[misc]
    try:
        yield
    finally:
        screen.flush()
        _flush()
        sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for fd in saved:
            os.close(fd)


class _Screen(io.TextIOWrapper):
    """The terminal. That it is gone ends no thread that draws: the app has to come to where it
    keeps what was written.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def _flush() -> None:
    """Bring waiting output to where it was meant to go, that of C libraries too."""
    import ctypes  # only the app needs it

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    ctypes.CDLL(None).fflush(None)


# -- crashes ---------------------------------------------------------------------------------


def write_crash(places: Locations, error: BaseException) -> Path:
    """Write a report about an exception nobody expected; return where it is.

    It holds versions, the traceback and the end of the log, no chats. Never raises: if the log
    folder cannot be written, the report goes to the system's temporary folder.
    """
    now = datetime.now(UTC)
    name = f"crash-{now:%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    text = _report(places, error, now)
    for is_temporary in (False, True):
        with suppress(OSError):  # a full disk: there is no folder for temporary files either
            folder = Path(tempfile.gettempdir()) if is_temporary else places.logs_dir
            path = folder / name
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", "replace")
            return path
    return places.logs_dir / name


def _report(places: Locations, error: BaseException, now: datetime) -> str:
    trace = "".join(traceback.format_exception(error))
    code = f"{error.code}\n" if isinstance(error, MoetError) else ""
    return (
        f"moet-desk {__version__} crash report, {now:%Y-%m-%dT%H:%M:%SZ}\n"
        f"Python {platform.python_version()} on {platform.platform()}\n"
        f"thread {threading.current_thread().name}\n{code}\n{trace}\n"
        f"End of the log:\n{_tail(places.logs_dir / LOG_FILE)}"
    )


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _REPORT_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return "(none)\n"


def _report_of_thread(places: Locations) -> Callable[[threading.ExceptHookArgs], None]:
    def report(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            return
        name = args.thread.name if args.thread is not None else "?"
        path = write_crash(places, args.exc_value)
        log.error("thread %s ended: %r; report: %s", name, args.exc_value, path)

    return report
