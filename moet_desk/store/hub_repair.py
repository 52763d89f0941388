"""Mending a pack from the hub it came from, when its source is not here any more.

Owns which bytes of the source the damaged parts are made from, and a stand-in for the source:
files of the right size that hold those bytes alone, as holes take no disk. Nobody has a checksum of
a part of a file; the digests of the pack say whether what is made from it is right. One thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from moet_desk.errors import MoetError, fail
from moet_desk.store.durable import check_space, disk_errors, pack_lock, write_at
from moet_desk.store.fetch import Line, fetch_span
from moet_desk.store.headers import LENGTH_BYTES
from moet_desk.store.hub import Listing, RemoteFile
from moet_desk.store.model_source import read_small
from moet_desk.store.pack_format import PackProgress, Phase
from moet_desk.store.pack_rows import RowMaker
from moet_desk.store.pack_verify import VerifyReport, mend, rows_to_make
from moet_desk.store.pull_prepare import MakePlan, SeenModel, look_at_model
from moet_desk.store.pull_state import FileRecord, read_origin
from moet_desk.store.sources import RawTensor, TensorInfo
from moet_desk.units import KIB

_GAP_BYTES = 64 * KIB
"""Parts that are nearer to each other come with one request."""

_NOT_AS_PACKED = ("MD-PACK-10", "MD-SRC-06")

Report = Callable[[PackProgress], None]
Spans = Mapping[str, tuple[range, ...]]
"""File -> places of its bytes, in order and apart."""


def repair_from_hub(
    path: Path,
    work: Path,
    report: VerifyReport,
    line: Line,
    make_plan: MakePlan,
    *,
    progress: Report = lambda _: None,
) -> int:
    """Make the damaged parts of a pack again from byte ranges of the files on the hub.

    Args:
        path: the pack's folder, with its origin.
        work: a folder for this alone; it is emptied before and gone afterwards.
        report: what `verify_pack` found.
        line: hub, limits and patience.
        make_plan: the family's plan.
        progress: told about bytes and rows.

    Returns:
        How many rows and files were written.

    Raises:
        MoetError: MD-PACK-11 it is from no hub; MD-HUB-.., MD-NET-.. the hub; MD-PACK-10 the bytes
            there stay others than were packed; MD-PACK-09; MD-DISK-01..03.
        Stopped: asked to stop; what is mended is mended.
    """
    origin = read_origin(path)
    if origin is None:
        raise fail("MD-PACK-11", model=path.name)
    listing = line.patiently(lambda: line.hub.listing(origin.repo, origin.commit))
    _check_origin(path, listing, origin.files)
    shutil.rmtree(work, ignore_errors=True)
    with disk_errors(work):
        work.mkdir(parents=True)
    try:
        seen = look_at_model(work, listing, line, make_plan)
        spans = spans_of(seen.maker, report)
        check_space(work, _size(spans), what=f"Repairing {path.name}")
        for left in range(line.patience.fetches, 0, -1):
            _fetch(work, listing, seen, spans, line, progress)
            try:
                with pack_lock(path):
                    return mend(path, read_small(work), seen.maker, report, progress=progress)
            except MoetError as error:
                if error.code not in _NOT_AS_PACKED or left == 1:
                    raise
            finally:
                for home in seen.homes.values():
                    home.detach()
        raise AssertionError("at least one fetch is allowed")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_origin(path: Path, listing: Listing, files: Iterable[FileRecord]) -> None:
    listed = {file.name: file for file in listing.files}
    for file in files:
        known = RemoteFile(file.name, file.size, file.sha256, file.git_sha1)
        if listed.get(file.name) != known:
            facts = {"repo": listing.repo, "want": listing.commit[:12], "model": path.name}
            raise fail("MD-HUB-03", got=f"another {file.name}", **facts)


# -- which bytes -------------------------------------------------------------------------------


def spans_of(maker: RowMaker, report: VerifyReport) -> Spans:
    """The bytes that the damaged rows and files of a pack are made from."""
    found: dict[str, list[range]] = {}
    for part in _parts(maker, report):
        name, span = part
        found.setdefault(name, []).append(span)
    return {name: _joined(spans) for name, spans in found.items()}


def _parts(maker: RowMaker, report: VerifyReport) -> Iterator[tuple[str, range]]:
    plan, index = maker.plan, maker.index
    for row in rows_to_make(report):
        layer, expert = divmod(row, plan.n_experts)
        for template in (plan.gate, plan.up, plan.down):
            name = template.format(layer=plan.moe_layers[layer], expert=expert)
            for raw in _stored(index.info(name)):
                yield raw.file.name, _span(raw, None if "{expert}" in template else expert)
    if not report.dense_ok:
        for name in plan.dense:
            for raw in _stored(index.info(name)):
                yield raw.file.name, _span(raw, None)


def _stored(info: TensorInfo) -> Iterator[RawTensor]:
    for raw in info.raws:
        yield from raw.stored


def _span(raw: RawTensor, expert: int | None) -> range:
    """Where a tensor lies, or the part of one expert in a tensor of all."""
    if expert is None:
        return range(raw.start, raw.start + raw.n_bytes)
    n_bytes = raw.n_bytes // raw.shape[0]
    return range(raw.start + expert * n_bytes, raw.start + (expert + 1) * n_bytes)


def _joined(spans: Iterable[range]) -> tuple[range, ...]:
    joined: list[range] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and span.start <= joined[-1].stop + _GAP_BYTES:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return tuple(joined)


def _size(spans: Spans) -> int:
    return sum(len(span) for parts in spans.values() for span in parts)


# -- the stand-in ------------------------------------------------------------------------------


def _fetch(
    work: Path, listing: Listing, seen: SeenModel, spans: Spans, line: Line, progress: Report
) -> None:
    """Bring these bytes to their places in files that are holes otherwise, and map those."""
    done, total = 0, _size(spans)

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(PackProgress(Phase.FETCH, min(done, total), total, "bytes"))

    for file in seen.shards:
        if file.name not in spans:
            continue
        path, header = work / file.name, seen.headers[file.name]
        with disk_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.truncate(fd, file.size)
                write_at(fd, len(header).to_bytes(LENGTH_BYTES, "little") + header, 0)
                for span in spans[file.name]:
                    fetch_span(line, listing, file, span, _writer(fd, count))
            finally:
                os.close(fd)
        seen.homes[file.name].attach()


def _writer(fd: int, count: Callable[[int], None]) -> Callable[[bytes, int], None]:
    def write(data: bytes, at: int) -> None:
        write_at(fd, data, at)
        count(len(data))

    return write
