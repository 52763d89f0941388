"""Reading files that stay open for hours, on drives that may go and come back. Any thread."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def fill(fd: int, view: memoryview, at: int) -> None:
    """Fill a buffer from a place of a file on; short reads are continued.

    Raises:
        OSError: the drive fails, or the file ends before that.
    """
    done = 0
    while done < len(view):
        n_read = os.preadv(fd, [view[done:]], at + done)
        if n_read == 0:
            raise OSError(errno.EIO, "the file ends too early")
        done += n_read


def open_again(path: Path, fd: int, flags: int = 0) -> None:
    """Let a descriptor lead to its file anew. A drive that was unplugged, or went away while the
    computer slept, comes back as another device; what was open stays dead.

    Raises:
        OSError: the file cannot be opened, or has another size now.
    """
    new = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        if os.fstat(new).st_size != os.fstat(fd).st_size:
            raise OSError(errno.ESTALE, "another file has its name now")
        os.dup2(new, fd, inheritable=False)  # in one step: other threads may be reading
    finally:
        os.close(new)
