"""Rows read in parts: the same bytes and digest, and nobody writes behind an error."""

from __future__ import annotations

import mmap
import shutil
import threading
import time
from pathlib import Path

import pytest

from moet_desk.errors import MoetError
from moet_desk.store import row_parts
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.pack_rows import row_digest
from moet_desk.store.row_parts import RowParts, part_bytes
from tests.store.tiny import flip_bit

PAGE = 4096


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_parts, "LEAST_PART_BYTES", PAGE)


def test_part_bytes__fewer_parts_the_more_rows__whole_pages() -> None:
    assert [part_bytes(32 * PAGE, rows) // PAGE for rows in (1, 2, 3, 4, 5, 100)] == [
        4, 8, 16, 16, 32, 32,
    ]  # fmt: skip
    assert part_bytes(33 * PAGE, 1) == 5 * PAGE  # the last one is shorter
    assert part_bytes(3 * PAGE, 1) == PAGE  # no part below the least
    assert part_bytes(100, 1) >= 100


@pytest.mark.parametrize("n_bytes", [100, PAGE, 3 * PAGE, 33 * PAGE, 64 * PAGE + 5])
def test_read__any_size__all_bytes_once_and_their_digest(n_bytes: int) -> None:
    source = bytes(i * 7 % 251 for i in range(n_bytes))
    row, seen = bytearray(n_bytes), list[tuple[int, int]]()

    def fill(part: memoryview, offset: int) -> None:
        seen.append((offset, len(part)))
        part[:] = source[offset : offset + len(part)]

    parts = RowParts()
    assert parts.read(fill, memoryview(row)) == row_digest(source)
    assert bytes(row) == source
    seen.sort()
    assert all(offset % PAGE == 0 for offset, _ in seen)
    assert [offset for offset, _ in seen] == [sum(n for _, n in seen[:i]) for i in range(len(seen))]
    assert len(seen) == (1 if n_bytes < 2 * PAGE else min(8, len(seen)))
    parts.close()


def test_read__a_part_fails__nobody_writes_any_more() -> None:
    writing, late = threading.Event(), list[int]()

    def fill(part: memoryview, offset: int) -> None:
        if offset == 0:
            writing.wait(5)
            raise OSError("the drive is gone")
        writing.set()
        time.sleep(0.05)
        late.append(offset)

    parts = RowParts()
    with pytest.raises(OSError, match="the drive is gone"):
        parts.read(fill, memoryview(bytearray(64 * PAGE)))
    ended = list(late)
    assert ended
    time.sleep(0.15)
    assert late == ended
    assert parts.read(lambda part, offset: None, memoryview(bytearray(PAGE)))  # goes on
    parts.close()


def test_read__many_rows_at_once__each_as_a_whole() -> None:
    all_here, sizes = threading.Barrier(8), list[int]()

    def fill(part: memoryview, offset: int) -> None:
        sizes.append(len(part))

    parts = RowParts()

    def read() -> None:
        with parts._reading():  # eight that do not end
            all_here.wait(5)
            parts.read(fill, memoryview(bytearray(16 * PAGE)))
            all_here.wait(5)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [16 * PAGE] * 8
    assert parts._rows == 0
    parts.close()


@pytest.mark.parametrize("direct", [False, True])
def test_reader__rows_in_parts__as_packed_and_checked(
    demo_pack: Path, tmp_path: Path, direct: bool
) -> None:
    pack = Path(shutil.copytree(demo_pack, tmp_path / "pack"))
    with PackReader.open(pack, direct=direct) as reader:
        for plane in Plane:
            stride = reader.meta.stride(plane)
            assert stride > 8 * PAGE
            file = pack / f"experts.{plane.value}"
            flip_bit(file, 6 * stride - 1, 3)  # in the last part
            out = mmap.mmap(-1, stride)  # on a page, as direct reads need it
            reader.read_row(plane, 2, out)
            with file.open("rb") as packed:
                packed.seek(2 * stride)
                assert out[:] == packed.read(stride)
            with pytest.raises(MoetError) as caught:
                reader.read_row(plane, 5, out)
            assert caught.value.code == "MD-PACK-04"
