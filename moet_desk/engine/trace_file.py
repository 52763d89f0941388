"""Recordings of what the engine showed: the file's format, its writer and its reader.

A recording is a gzip file of messages, each a length (4 bytes, little-endian) and msgpack: first a
`Header`, then `Frame`s and the words of answers in order of time, last a `Closing`. Arrays over
experts hold only what changed since the frame before. Knows no engine and no screen. One thread
each.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from moet_desk.engine.handle import ModelInfo
from moet_desk.errors import fail
from moet_desk.telemetry import CacheView, EngineSnapshot, FinishReason, Usage

FORMAT, VERSION = "moet-desk-trace", 1
SUFFIX = ".mdtrace"
PERIOD_S = 0.25
"""Between two frames: what the screens draw in a second is four pictures."""

USES_EVERY_S = 1.0
"""Uses are half of the bytes of a recording with four frames a second that hold them all."""

UNKNOWN = 0xFFFF

MOST_BYTES = 16 << 20
"""Of a file: a quarter of an hour of a model with 11,000 experts."""

_MOST_PLAIN_BYTES = 512 << 20  # a file that unpacks to more was not made by this program
_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, where and when.

    Attributes:
        machine: for people: gpu, cpu, cores, ram_gib, os; nothing that names a person or a host.
        layers, n_experts: of the cache pictures.
        made_up: whether the weights were made up, so that the answers mean nothing.
        exact: see `Stories.exact`.
        note: what else has to be known to read the figures.
    """

    format: str = FORMAT
    version: int = VERSION
    program: str
    date: str
    machine: Mapping[str, str | int | float | None]
    model: ModelInfo
    layers: tuple[int, ...]
    n_experts: int
    made_up: bool = False
    exact: bool = True
    note: str = ""


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """Values of some rows: gaps between their numbers (see `_gap_type`), and a byte each."""

    gaps: bytes = b""
    values: bytes = b""


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """One picture. `snapshot.cache` is None; the cache is in the changes.

    `hits` is uint16 [L], thousandths of the look-ups that a slot answered, `UNKNOWN` before the
    first. `cells` are `tier | heat << 2`. `uses`, `fetches` and `evictions` count, 255 at most:
    uses since the frame that last had some, at least `USES_EVERY_S` ago; the other two since the
    frame before, and only where the engine counts them (`Header.exact`), for else they follow from
    the tiers.
    """

    t_s: float
    snapshot: EngineSnapshot
    hits: bytes
    cells: Changes = Changes()
    uses: Changes = Changes()
    fetches: Changes = Changes()
    evictions: Changes = Changes()


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A question was sent."""

    t_s: float
    text: str
    quality: str


class Said(msgspec.Struct, frozen=True, tag="said"):
    """Text of the answer to the newest question came."""

    t_s: float
    text: str
    n_tokens: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """That answer ended."""

    t_s: float
    reason: FinishReason
    usage: Usage


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    """The recording ended in order."""

    t_s: float
    full: bool = False  # because the file was as large as it may be


Message = Frame | Asked | Said | Ended | Closing


class TraceWriter:
    """Writes a recording beside its name and moves it there in the end.

    Raises (from every method):
        MoetError: MD-TRACE-05.
    """

    def __init__(self, path: Path, header: Header, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays one
        self._most = most_bytes
        self._part = self.path.with_name(self.path.name + ".part")
        self._n_rows = len(header.layers) * header.n_experts
        self._cells = np.zeros(self._n_rows, np.uint8)
        self._sums: dict[str, NDArray[np.float64]] = {
            name: np.zeros(self._n_rows) for name in ("uses", "fetches", "evictions")
        }
        self._last_s, self._uses_s = 0.0, -USES_EVERY_S
        self._exact = header.exact
        self.full = False
        if self.path.exists() and not self.path.is_file():
            # a device would be replaced, a folder only be noticed at the end
            raise fail("MD-TRACE-05", path=str(path), reason="it is a folder or a device")
        try:
            self._file: BinaryIO = self._part.open("wb")
        except OSError as error:
            raise self._problem(error) from error
        self._gzip = gzip.GzipFile("", "wb", compresslevel=9, fileobj=self._file, mtime=0)
        self._put(header)

    def add(self, t_s: float, snapshot: EngineSnapshot) -> None:
        """Add a picture; ignored when the file is full."""
        self._last_s = t_s
        plain, view = replace(snapshot, cache=None), snapshot.cache
        if view is None or self.full:
            return
        self._put(self._frame(t_s, plain, view))
        self.full = self._file.tell() >= self._most

    def say(self, message: Asked | Said | Ended) -> None:
        """Add words; ignored when the file is full."""
        if not self.full:
            self._put(message)

    def close(self) -> None:
        """Finish the file and give it its name."""
        self._put(Closing(self._last_s, full=self.full))
        try:
            self._gzip.close()
            self._file.close()
            self._part.replace(self.path)
        except OSError as error:
            raise self._problem(error) from error

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _frame(self, t_s: float, snapshot: EngineSnapshot, view: CacheView) -> Frame:
        tiers, heat = b"".join(view.tiers), b"".join(view.heat)
        cells = np.frombuffer(tiers, np.uint8) | np.left_shift(
            np.frombuffer(heat, np.uint8), np.uint8(2)
        )
        changed = np.flatnonzero(cells != self._cells)
        changes = _pack(changed, cells[changed], self._n_rows)
        self._cells = cells
        thousandths = [UNKNOWN if hit is None else round(1000 * hit) for hit in view.hit_share]
        hits, stories = np.array(thousandths, "<u2").tobytes(), view.stories
        if stories is None:
            return Frame(t_s, snapshot, hits, changes)
        uses = fetches = evictions = Changes()
        if t_s - self._uses_s >= USES_EVERY_S:
            self._uses_s = t_s
            uses = self._more("uses", np.frombuffer(stories.uses, np.float32))
        if self._exact:
            fetches = self._more("fetches", np.frombuffer(stories.fetches, np.uint32))
            evictions = self._more("evictions", np.frombuffer(stories.evictions, np.uint32))
        return Frame(t_s, snapshot, hits, changes, uses, fetches, evictions)

    def _more(self, name: str, now: NDArray[np.float32] | NDArray[np.uint32]) -> Changes:
        """What was added to a sum since the last frame, in whole numbers; the rest comes later."""
        told = self._sums[name]
        more = np.clip(np.rint(now - told), 0, 255)
        told += more
        changed = np.flatnonzero(more)
        return _pack(changed, more[changed].astype(np.uint8), self._n_rows)

    def _put(self, message: Header | Message) -> None:
        packed = msgspec.msgpack.encode(message)
        try:
            self._gzip.write(_LENGTH.pack(len(packed)) + packed)
        except OSError as error:
            raise self._problem(error) from error

    def _problem(self, error: OSError) -> Exception:
        return fail("MD-TRACE-05", path=str(self.path), reason=error.strerror or str(error))


def _gap_type(n_rows: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if n_rows <= 1 << 16 else "<u4")


def _pack(rows: NDArray[np.intp], values: NDArray[np.uint8], n_rows: int) -> Changes:
    gaps = np.diff(rows, prepend=0).astype(_gap_type(n_rows))
    return Changes(gaps.tobytes(), values.tobytes())


def unpack(changes: Changes, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Rows and their values.

    Raises:
        ValueError: they are not rows of this model.
    """
    gaps = np.frombuffer(changes.gaps, _gap_type(n_rows)).astype(np.int64)
    rows, values = gaps.cumsum(), np.frombuffer(changes.values, np.uint8)
    if rows.size != values.size or (rows.size and int(rows[-1]) >= n_rows):
        raise ValueError("experts that the model does not have")
    return rows, values


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole recording. `frames` is never empty; `words` are the other messages, by time."""

    header: Header
    frames: Sequence[Frame]
    words: Sequence[Asked | Said | Ended]

    @property
    def n_rows(self) -> int:
        """Experts of all layers."""
        return len(self.header.layers) * self.header.n_experts

    @property
    def length_s(self) -> float:
        """From the first picture to the last."""
        return self.frames[-1].t_s - self.frames[0].t_s


def read_trace(path: Path, *, names: Sequence[str] = ()) -> Trace:
    """Read a recording and check all of it.

    Args:
        path: the file.
        names: of recordings that can be had, for the error.

    Raises:
        MoetError: MD-TRACE-01 no file, MD-TRACE-02 damaged, MD-TRACE-03 another version.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        words = ", ".join(names) or "none"
        reason = error.strerror or str(error)
        raise fail("MD-TRACE-01", path=str(path), reason=reason, names=words) from error


def _read(path: Path, file: BinaryIO) -> Trace:
    try:
        messages = _messages(file)
        header = _header(path, next(messages))
        decoder = msgspec.msgpack.Decoder(Message)
        rest = [decoder.decode(packed) for packed in messages]
        return _checked(header, rest)
    except StopIteration:
        reason = "it is empty"
    except (EOFError, zlib.error, gzip.BadGzipFile, struct.error):
        reason = "it is cut off, or not a recording"
    except (msgspec.MsgspecError, ValueError) as error:
        reason = str(error)
    raise fail("MD-TRACE-02", path=str(path), reason=reason)


def _messages(file: BinaryIO) -> Iterator[bytes]:
    """The packed messages. Raises EOFError in the middle of one."""
    unpacked = io.BufferedReader(gzip.GzipFile(fileobj=file))
    n_bytes = 0
    while head := unpacked.read(_LENGTH.size):
        (size,) = _LENGTH.unpack(head)
        n_bytes += size
        if n_bytes > _MOST_PLAIN_BYTES:
            raise ValueError("it is too large")
        packed = unpacked.read(size)
        if len(packed) < size:
            raise EOFError
        yield packed


class _Kind(msgspec.Struct):
    format: str = ""
    version: int = 0
    program: str = ""


def _header(path: Path, packed: bytes) -> Header:
    kind = msgspec.msgpack.decode(packed, type=_Kind)
    if kind.format != FORMAT:
        raise ValueError("it is not a recording")
    if kind.version != VERSION:
        raise fail(
            "MD-TRACE-03", path=str(path), version=kind.version, known=VERSION,
            program=kind.program,
        )  # fmt: skip
    return msgspec.msgpack.decode(packed, type=Header)


def _checked(header: Header, messages: Sequence[Message]) -> Trace:
    if not messages or not isinstance(messages[-1], Closing):
        raise ValueError("its end is missing")
    frames = [message for message in messages if isinstance(message, Frame)]
    words = [message for message in messages if isinstance(message, Asked | Said | Ended)]
    n_rows = len(header.layers) * header.n_experts
    if not frames or not n_rows:
        raise ValueError("there is no picture in it")
    times = [message.t_s for message in (*frames, *words)]
    if times[: len(frames)] != sorted(times[: len(frames)]):
        raise ValueError("its pictures are out of order")
    for frame in frames:
        if len(frame.hits) != 2 * len(header.layers):
            raise ValueError("layers that the model does not have")
        for changes in (frame.cells, frame.uses, frame.fetches, frame.evictions):
            unpack(changes, n_rows)
    return Trace(header, frames, words)
