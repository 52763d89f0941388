"""Packing pieces of a model as their shards land, before the rest of it is there.

Owns the units of that work: expert rows, and tensors of the dense file, which grows at its final
offsets. Each unit is written, synced and journalled like the rows of `pack_writer`, so a shard may
be deleted when all its units are journalled. What comes out has the same bytes as a pack of the
whole folder. One packing thread, under the folder's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import blake3

from moet_desk.errors import fail
from moet_desk.store.durable import PARTIAL, sync_folder, write_at
from moet_desk.store.pack_folder import PackFolder
from moet_desk.store.pack_format import DENSE_FILE, DIGEST_BYTES, PackProgress, Phase
from moet_desk.store.pack_rows import (
    MadeRow,
    RowMaker,
    dense_bytes,
    dense_header,
    dense_tensors,
)
from moet_desk.store.pack_writer import Effort, make_rows
from moet_desk.store.quant_formats import check_finite
from moet_desk.store.sources import RawTensor

_READ_BYTES = 8 << 20


class StreamPacker:
    """Packs units of a `PackFolder` that is open.

    Units are numbered: row r is unit r, dense tensor i (in the plan's order) is unit n_rows + i.
    """

    def __init__(
        self,
        folder: PackFolder,
        maker: RowMaker,
        effort: Effort,
        *,
        progress: Callable[[PackProgress], None],
        stop: Callable[[], bool],
    ) -> None:
        self._folder, self._maker, self._effort = folder, maker, effort
        self._progress, self._stop = progress, stop
        self._raws = dense_tensors(maker.index, maker.plan)
        self._part_of = {raw.name: i for i, raw in enumerate(self._raws)}
        self._partial = folder.dest / f"{DENSE_FILE}{PARTIAL}"

    # -- what there is to do ------------------------------------------------------------------

    def needs(self) -> dict[int, tuple[str, ...]]:
        """The shards that each unit needs, for units that are not durable yet."""
        return {
            unit: shards
            for unit, shards in unit_shards(self._maker).items()
            if not self._is_done(unit)
        }

    def _is_done(self, unit: int) -> bool:
        n_rows = self._maker.plan.n_rows
        if unit < n_rows:
            return self._folder.has(unit)
        if self._folder.dense:
            return True
        return all(part in self._folder.dense_parts for part in self._parts(unit))

    def _parts(self, unit: int) -> list[int]:
        name = self._dense_names[unit - self._maker.plan.n_rows]
        return [self._part_of[raw.name] for raw in self._maker.index.info(name).raws]

    @cached_property
    def _dense_names(self) -> list[str]:
        return list(self._maker.plan.dense)

    # -- work ---------------------------------------------------------------------------------

    def pack(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Make units whose shards are attached; yields those that became durable, in batches.

        It ends early when it is asked to stop.

        Raises:
            MoetError: MD-SRC-06 NaN or infinite numbers.
            OSError: the disk refused; what was yielded is durable.
        """
        n_rows = self._maker.plan.n_rows
        rows = [unit for unit in units if unit < n_rows]
        for unit in units:
            if unit >= n_rows:
                if self._stop():
                    return
                self._write_dense(unit)
                yield [unit]
        batch: list[MadeRow] = []
        for made in make_rows(self._maker, self._until_stopped(rows), self._effort.threads):
            batch.append(made)
            if len(batch) == self._effort.batch_rows:
                yield self._commit(batch)
                batch = []
        yield self._commit(batch)

    def _until_stopped(self, rows: Iterable[int]) -> Iterator[int]:
        for row in rows:
            if self._stop():
                return
            yield row

    def _commit(self, batch: Sequence[MadeRow]) -> list[int]:
        self._folder.commit(batch)
        self.report()
        return [made.row for made in batch]

    def report(self) -> None:
        """Tell how many rows are durable."""
        done, total = self._folder.n_done, self._maker.plan.n_rows
        kept, dropped = self._folder.kept, self._folder.dropped
        self._progress(PackProgress(Phase.ROWS, done, total, "rows", kept, dropped))

    # -- the dense file -----------------------------------------------------------------------

    @cached_property
    def _offsets(self) -> list[int]:
        """Where each part begins in the dense file, and where the last one ends."""
        offsets = [len(dense_header(self._raws))]
        for raw in self._raws:
            offsets.append(offsets[-1] + raw.n_bytes)
        return offsets

    def _write_dense(self, unit: int) -> None:
        """Copy one logical dense tensor to its place and journal its parts."""
        name = self._dense_names[unit - self._maker.plan.n_rows]
        check_finite(self._maker.index, name)
        raws = self._maker.index.info(name).raws
        fd = self._open_dense()
        digests = {}
        try:
            for raw in raws:
                digests[self._part_of[raw.name]] = self._write_part(fd, raw)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self._folder.journal.add_parts(digests)
        self._folder.dense_parts |= digests

    def _open_dense(self) -> int:
        is_new = not self._partial.exists()
        fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, self._offsets[-1])  # sparse, like the row files
            if is_new:
                sync_folder(self._folder.dest)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _write_part(self, fd: int, raw: RawTensor) -> bytes:
        at, hasher = self._offsets[self._part_of[raw.name]], blake3.blake3()
        for chunk in raw.chunks(_READ_BYTES):
            write_at(fd, chunk, at)
            hasher.update(chunk)
            at += len(chunk)
        raw.forget()
        return hasher.digest(length=DIGEST_BYTES)

    def finish_dense(self) -> list[int]:
        """Put the dense file in its place after comparing all of it with the journal.

        Returns:
            Units that were not on disk as journalled and must be made again; none: it is in place.

        Raises:
            OSError: the disk refused.
        """
        if self._folder.dense:
            return []
        fd = self._open_dense()
        try:
            write_at(fd, dense_header(self._raws), 0)
            os.fsync(fd)
            whole, bad = self._read_through(fd)
        finally:
            os.close(fd)
        if bad:
            for part in bad:
                self._folder.dense_parts.pop(part, None)
            n_rows = self._maker.plan.n_rows
            units = range(n_rows, n_rows + len(self._dense_names))
            return [unit for unit in units if not self._is_done(unit)]
        self._partial.replace(self._folder.dest / DENSE_FILE)
        sync_folder(self._folder.dest)
        self._folder.dense = whole
        self._folder.journal.add_dense(whole)
        return []

    def _read_through(self, fd: int) -> tuple[str, list[int]]:
        """The blake3 of the dense file, and the parts that differ from the journal."""
        hasher = blake3.blake3(max_threads=self._effort.threads)
        hasher.update(os.pread(fd, self._offsets[0], 0))
        total = dense_bytes(self._maker.index, self._maker.plan)
        bad = []
        for part, raw in enumerate(self._raws):
            own = blake3.blake3()
            for at in range(0, raw.n_bytes, _READ_BYTES):
                size = min(_READ_BYTES, raw.n_bytes - at)
                data = os.pread(fd, size, self._offsets[part] + at)
                hasher.update(data)
                own.update(data)
            if own.digest(length=DIGEST_BYTES) != self._folder.dense_parts.get(part):
                bad.append(part)
            self._progress(PackProgress(Phase.DENSE, self._offsets[part + 1], total, "bytes"))
            if self._stop():
                raise self.stopped()
        return hasher.hexdigest(), bad

    def stopped(self) -> Exception:
        """MD-PACK-06 with how far it is."""
        dest, total = self._folder.dest, self._maker.plan.n_rows
        done = self._folder.n_done
        return fail("MD-PACK-06", path=str(dest), done=done, total=total, model=dest.name)


def unit_shards(maker: RowMaker) -> dict[int, tuple[str, ...]]:
    """The shards that each unit of a model needs."""
    plan, index = maker.plan, maker.index
    found: dict[int, tuple[str, ...]] = {}
    for row in range(plan.n_rows):
        layer, expert = divmod(row, plan.n_experts)
        number = plan.moe_layers[layer]
        names = (
            part.format(layer=number, expert=expert) for part in (plan.gate, plan.up, plan.down)
        )
        found[row] = _files(path.name for name in names for path in index.info(name).files)
    for i, name in enumerate(plan.dense):
        found[plan.n_rows + i] = _files(path.name for path in index.info(name).files)
    return found


def _files(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
