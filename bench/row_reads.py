"""What reading rows from a drive takes, read as a whole and in parts; one JSON object.

    python -m bench.row_reads FOLDER [--record FILE]

Random bytes of the size of 2-bit rows of DeepSeek-V4-Flash and GLM-5.2, in a file of 2 GiB in FOLDER,
past the page cache if the file system can, each row checked. Milliseconds are medians over reads of
one row at a time; bytes per second are of eight readers side by side.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from moet_desk.cli.bench_record import machine
from moet_desk.store.pack_rows import row_digest
from moet_desk.store.row_parts import RowParts
from moet_desk.units import GIB

ROWS = {"deepseek-v4-flash": 7_077_888, "glm-5.2": 10_616_832}
FILE_BYTES = 2 * GIB
READS, READERS, READS_EACH = 60, 8, 20

Read = Callable[[int, memoryview], bytes]


def figures(read: Read, n_bytes: int, n_rows: int) -> dict[str, float]:
    """Of one reader, then of several."""
    choose = random.Random(1)
    out = memoryview(mmap.mmap(-1, READERS * n_bytes))
    out[:] = bytes(READERS * n_bytes)  # its pages are there then
    times = []
    for _ in range(READS):
        row, began = choose.randrange(n_rows), time.perf_counter()
        read(row, out[:n_bytes])
        times.append(1e3 * (time.perf_counter() - began))

    def some(reader: int) -> None:
        own = random.Random(reader)
        for _ in range(READS_EACH):
            read(own.randrange(n_rows), out[reader * n_bytes : (reader + 1) * n_bytes])

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(some, range(READERS)))
    took_s = time.perf_counter() - began
    marks = quantiles(times, n=20)
    return {
        "ms": round(median(times), 3), "ms_p05": round(marks[0], 3), "ms_p95": round(marks[-1], 3),
        "bytes_per_s_of_8": round(READERS * READS_EACH * n_bytes / took_s),
    }  # fmt: skip


def measure(folder: Path) -> dict[str, Any]:
    """Both ways in turns, twice, for each size."""
    found: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        piece = os.urandom(64 << 20)
        for _ in range(FILE_BYTES // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        try:
            fd, direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT), True
        except OSError:
            fd, direct = os.open(file.name, os.O_RDONLY), False
        parts = RowParts()

        def whole(row: int, out: memoryview) -> bytes:
            os.preadv(fd, [out], row * len(out))
            return row_digest(out)

        def in_parts(row: int, out: memoryview) -> bytes:
            def fill(part: memoryview, offset: int) -> None:
                os.preadv(fd, [part], row * len(out) + offset)

            return parts.read(fill, out)

        for name, n_bytes in ROWS.items():
            n_rows = FILE_BYTES // n_bytes
            found[name] = {"row_bytes": n_bytes, "whole": [], "in_parts": []}
            for _ in range(2):
                found[name]["whole"].append(figures(whole, n_bytes, n_rows))
                found[name]["in_parts"].append(figures(in_parts, n_bytes, n_rows))
        parts.close()
        os.close(fd)
    return {"direct": direct, "rows": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", type=Path, help="write the object there as well")
    given = parser.parse_args()
    what = "reads of one row from a drive, checked: as a whole, and in parts hashed while they come"
    record = {**machine(), "what": what, **measure(given.folder)}
    text = json.dumps(record, indent=1)
    print(text)
    if given.record is not None:
        given.record.write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
