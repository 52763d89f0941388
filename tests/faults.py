"""Errors of the operating system, from the kernel itself: a thread whose system calls it refuses.

A seccomp filter answers some calls of one thread (and of those it starts) with an error number, for
Python as for SQLite or any library in C. The filter ends with the thread; others never see it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# asm/unistd.h; a machine without a call has newer ones in its place
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20,
        "mmap": 9, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "rename": 82, "renameat": 264,
        "renameat2": 316, "openat": 257, "preadv": 295, "pwritev": 296, "preadv2": 327,
        "pwritev2": 328, "mkdir": 83, "mkdirat": 258, "socket": 41, "connect": 42,
        "sendto": 44, "recvfrom": 45,
    },
    "aarch64": {
        "read": 63, "write": 64, "pread64": 67, "pwrite64": 68, "readv": 65, "writev": 66,
        "mmap": 222, "fsync": 82, "fdatasync": 83, "ftruncate": 46, "renameat": 38,
        "renameat2": 276, "openat": 56, "preadv": 69, "pwritev": 70, "preadv2": 286,
        "pwritev2": 287, "mkdirat": 34, "socket": 198, "connect": 203,
        "sendto": 206, "recvfrom": 207,
    },
}  # fmt: skip

READS = ("read", "readv", "pread64", "preadv", "preadv2")
ROW_READS = ("pread64", "preadv", "preadv2")
WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2")
SYNCS = ("fsync", "fdatasync")
RENAMES = ("rename", "renameat", "renameat2")
FOLDERS = ("mkdir", "mkdirat")
MAPS = ("mmap",)

_NR, _FLAGS_OF_OPENAT = 0, 32  # offsets in struct seccomp_data
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


@dataclass(frozen=True)
class Refusal:
    """Which calls fail, and how.

    Attributes:
        calls: names of system calls, as in `WRITES`; "openat" means opening to write if
            `to_write` is set.
        number: the errno.
    """

    calls: Sequence[str]
    number: int
    to_write: bool = False

    def __str__(self) -> str:
        what = "open to write" if self.to_write else self.calls[0]
        return f"{what} {os.strerror(self.number)}"


def opens(number: int) -> Refusal:
    """Opening a file fails."""
    return Refusal(("openat",), number)


def opens_to_write(number: int) -> Refusal:
    """Opening a file to write fails."""
    return Refusal(("openat",), number, to_write=True)


def refused(refusal: Refusal, work: Callable[[], T]) -> T:
    """Do something in a thread of which the kernel refuses these calls; gives or raises what it
    does. Everything it imports has to be there already.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            refuse_here(refusal)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="refused")
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"it hangs when the kernel says: {refusal}"
    if errors:
        raise errors[0]
    return results[0]


def n_open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def refuse_here(refusal: Refusal) -> None:
    """From now on the kernel refuses these calls of the calling thread, for as long as it lives."""
    numbers = _NUMBERS[platform.machine()]
    refuse = (_RETURN, 0, 0, _ERRNO | refusal.number)
    program = [(_LOAD, 0, 0, _NR)]
    for name in refusal.calls:
        if name not in numbers:
            continue
        if refusal.to_write:
            # the flags' lowest two bits: read only is 0
            program += [
                (_EQUAL, 0, 4, numbers[name]),
                (_LOAD, 0, 0, _FLAGS_OF_OPENAT),
                (_ANY_BIT, 0, 1, os.O_WRONLY | os.O_RDWR),
                refuse,
                (_LOAD, 0, 0, _NR),
            ]
        else:
            program += [(_EQUAL, 0, 1, numbers[name]), refuse]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    made = Program(len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(made), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "this kernel takes no filter of system calls")
