"""Measured rates of this computer, and the file they are kept in.

RAM copies and drive reads are measured here; PCIe and VRAM by the engine, which has the card.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moet_desk.machine import Rates
from moet_desk.units import MIB

RATES_FILE = "rates.json"

_RAM_BLOCK = 256 * MIB  # more than any cache
_RAM_S = 0.4
_COPIERS = 4
_READ_BLOCK = 7 * MIB  # about a row of a large model
_READ_FILE = 256 * MIB
_READERS = 8
_READ_S = 1.5


def read_rates(data_dir: Path) -> Rates | None:
    """What was measured last; None if nothing was or the file is of no use."""
    import msgspec

    try:
        return msgspec.json.decode((data_dir / RATES_FILE).read_bytes(), type=Rates)
    except (OSError, ValueError):
        return None


def save_rates(data_dir: Path, rates: Rates) -> None:
    """Keep rates for plans; what is None keeps its old value.

    Raises:
        OSError: the folder cannot be written.
    """
    import msgspec

    old = read_rates(data_dir)
    if old is not None:
        known = {name: getattr(rates, name) for name in _VALUES}
        kept = {name: getattr(old, name) if known[name] is None else known[name] for name in known}
        rates = replace(rates, **kept)
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / RATES_FILE
    partial = path.with_name(path.name + ".partial")
    partial.touch(0o600)
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(rates), indent=1) + b"\n")
    partial.replace(path)


_VALUES = ("ram_copy", "drive_read", "drive_direct", "pcie", "vram")


def measure(folder: Path, say: Callable[[str], None] = lambda what: None) -> Rates:
    """Measure RAM and the drive behind `folder`; about two seconds and 256 MiB of writing.

    `say` is told what is measured next. A drive that cannot be written or is too full gives None.
    """
    say("RAM")
    ram = _ram_copy()
    say("the drive")
    drive, direct = _drive_read(folder)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Rates(measured=now, ram_copy=ram, drive_read=drive, drive_direct=direct)


def _ram_copy() -> float:
    """Bytes per second that are copied by several threads; each is read once and written once."""
    size = _RAM_BLOCK // _COPIERS
    blocks = [(bytearray(b"\x01") * size, bytearray(b"\x02") * size) for _ in range(_COPIERS)]
    places = [tuple((ctypes.c_char * size).from_buffer(part) for part in pair) for pair in blocks]

    def copy(pair: tuple[Any, ...]) -> None:
        ctypes.memmove(pair[0], pair[1], size)  # lets the other threads run meanwhile

    best, until = 0.0, time.perf_counter() + _RAM_S
    with ThreadPoolExecutor(_COPIERS) as pool:
        while time.perf_counter() < until:
            start = time.perf_counter()
            list(pool.map(copy, places))
            best = max(best, _RAM_BLOCK / (time.perf_counter() - start))
    return best


def _drive_read(folder: Path) -> tuple[float | None, bool | None]:
    """Bytes per second of reads of row size from several threads, past the page cache."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        fd, name = tempfile.mkstemp(prefix=".moet-desk-rate-", dir=place)
    except OSError:
        return None, None
    try:
        with os.fdopen(fd, "wb") as file:
            block = os.urandom(8 * MIB)  # some drives shrink what repeats
            for _ in range(_READ_FILE // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _read_all(name)
    except OSError:
        return None, None
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _read_all(name: str) -> tuple[float, bool]:
    fd, direct = _open(name)
    try:
        offsets = range(0, _READ_FILE - _READ_BLOCK + 1, _READ_BLOCK)
        done, start = 0, time.perf_counter()
        with ThreadPoolExecutor(_READERS) as pool:
            while time.perf_counter() - start < _READ_S:
                done += sum(pool.map(lambda offset: _read_block(fd, offset), offsets))
                if not direct:
                    _forget(fd)
        return done / (time.perf_counter() - start), direct
    finally:
        os.close(fd)


def _open(name: str) -> tuple[int, bool]:
    with contextlib.suppress(OSError):
        return os.open(name, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
    fd = os.open(name, os.O_RDONLY)
    _forget(fd)
    return fd, False


def _forget(fd: int) -> None:
    """Ask the kernel to drop the file from the page cache, so that the drive is read."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_block(fd: int, offset: int) -> int:
    with mmap.mmap(-1, _READ_BLOCK) as place:  # page-aligned, as direct reads want it
        return os.preadv(fd, [place], offset)
