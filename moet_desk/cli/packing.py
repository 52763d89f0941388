"""Packing from the command line: reports, stopping on signals, waiting for another packer.

Owns the run around `store.pack_writer`; used by `pack` and by every command that needs the model
that comes with the program. Runs in the main thread, because signals do. Imports torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moet_desk.cli.output import Format, Meter, print_event
from moet_desk.cli.signals import Interrupt, interruptible
from moet_desk.engine.families import plan_for
from moet_desk.errors import MoetError
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.store.library import Library, look_at
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import PackMeta, PackPlan, PackProgress, Phase
from moet_desk.store.pack_writer import write_pack
from moet_desk.units import GIB, show_disk, show_rate

DEFAULT_BUDGET_BYTES = 2 * GIB
_WAIT_POLL_S = 0.5

Report = Callable[[PackProgress], None]


def read_plan(source: Path) -> PackPlan:
    """What the family of a source says is in it.

    Raises:
        MoetError: MD-SRC-01 no model there, MD-SRC-02, 03, 07 unreadable files, MD-PACK-01 family,
            MD-GGUF-01..06.
    """
    opened = ModelSource.open(source)
    return plan_for(opened.config, path=opened.config_path, names=opened.index.names())


def plan_of_names(config: Mapping[str, Any], path: str, names: Collection[str]) -> PackPlan:
    """The family's plan for a model of which only config and tensor names are here.

    Raises:
        MoetError: MD-PACK-01, MD-SRC-07.
    """
    return plan_for(config, path=path, names=names)


def pack_source(
    source: Path,
    dest: Path,
    *,
    memory_budget: int = DEFAULT_BUDGET_BYTES,
    wait: bool = False,
    report: Report,
    interrupt: Interrupt,
) -> PackMeta:
    """Pack a source, or go on where an earlier run stopped.

    Args:
        source: folder of the model's files, or a GGUF file.
        dest: the pack's folder.
        memory_budget: bytes that rows in the making may take.
        wait: if somebody packs it already, wait for that and then go on.
        report: told about each step.
        interrupt: ends the run between two steps.

    Raises:
        MoetError: as `pack_writer.write_pack`; MD-PACK-06 when interrupted.
    """
    plan = read_plan(source)
    while True:
        try:
            return write_pack(
                source,
                plan,
                dest,
                memory_budget=memory_budget,
                threads=len(os.sched_getaffinity(0)),
                progress=report,
                stop=interrupt.asked,
            )
        except MoetError as error:
            if error.code != "MD-PACK-09" or not wait or interrupt.asked():
                raise
        found = look_at(dest)
        if found.rows:
            report(PackProgress(Phase.ROWS, found.rows_done, found.rows, "rows"))
        time.sleep(_WAIT_POLL_S)


def pack_at_first_use(source: Path, library: Library, name: str, *, quiet: bool) -> None:
    """Pack the model that comes with the program, with a meter on stderr.

    Raises:
        MoetError: as `pack_source`.
        KeyboardInterrupt: it was interrupted; what is finished stays.
    """
    dest = library.path_for(name)
    library.drop_other_format(name)
    report = PackReport(Format.HUMAN, row_bytes=row_bytes(read_plan(source)), quiet=quiet)
    with interruptible() as interrupt:
        try:
            pack_source(source, dest, wait=True, report=report, interrupt=interrupt)
        except MoetError as error:
            if interrupt.asked():
                raise KeyboardInterrupt from error
            raise
        finally:
            report.close()


class PackReport:
    """Shows a packer's or verifier's steps: a meter on stderr, or events on stdout.

    Events go on being made when their reader has gone: the work matters more than its report.
    """

    def __init__(self, wanted: Format, *, row_bytes: int, quiet: bool) -> None:
        self._wanted = wanted
        self._row_bytes = row_bytes
        self._meter = Meter(quiet=quiet or wanted is Format.NDJSON)
        self._phase: Phase | None = None
        self._start_s = self._start_bytes = 0.0

    def __call__(self, step: PackProgress) -> None:
        done, total = (
            n * (self._row_bytes if step.unit == "rows" else 1) for n in (step.done, step.total)
        )
        now_s = time.monotonic()
        if step.phase is not self._phase:
            self._phase, self._start_s, self._start_bytes = step.phase, now_s, done
        seconds = now_s - self._start_s
        rate = (done - self._start_bytes) / seconds if seconds > 0 else None
        if self._wanted is Format.NDJSON:
            with suppress(BrokenPipeError):
                print_event(**_event(step, done_bytes=done, total_bytes=total, rate=rate))
            return
        if step.phase is Phase.FINISH:
            return  # a moment, and nothing to count
        figures = f"{step.done}/{step.total} rows" if step.unit == "rows" else show_disk(done)
        shown = f"{figures}  {show_rate(rate)}" if rate else figures
        self._meter.show(step.phase.value, step.done, step.total, shown)

    def close(self) -> None:
        self._meter.close()


def row_bytes(plan: PackPlan | PackMeta) -> int:
    """Bytes of one expert on disk, base and fine row together."""
    layout = ExpertLayout(plan.hidden, plan.inter)
    return layout.base_stride + layout.fine_stride


def _event(
    step: PackProgress, *, done_bytes: int, total_bytes: int, rate: float | None
) -> Mapping[str, Any]:
    # "pack" counts rows; the other phases have events of their own names.
    name = "pack" if step.phase is Phase.ROWS else step.phase.name.lower()
    return {
        "event": name,
        "phase": step.phase.value,
        "done": step.done,
        "total": step.total,
        "unit": step.unit,
        "bytes": done_bytes,
        "total_bytes": total_bytes,
        "rate_bytes_per_s": rate,
        "kept": step.kept,
        "dropped": step.dropped,
    }
