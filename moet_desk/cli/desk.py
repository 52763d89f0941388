"""What the app's screens ask for, from the library, the jobs, the probes and the planner.

It makes the records of `ui.desk` out of what the rest of the program knows; the screens never see
more. Called from the UI thread, and from threads of its own for what may take long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moet_desk.cli.desk_jobs import AppJobs
from moet_desk.errors import MoetError, fail
from moet_desk.store.library import DEMO, InstalledPack, PackState, embedded_source, free_bytes
from moet_desk.store.state_file import read_record, write_record
from moet_desk.ui.desk import (
    DoctorView,
    Fit,
    JobState,
    JobView,
    LibraryView,
    MachineView,
    Offer,
    PackCondition,
    PackView,
    PlanView,
    PlanWishes,
)
from moet_desk.units import show_disk

if TYPE_CHECKING:
    from moet_desk.cli.context import Invocation
    from moet_desk.engine.handle import EngineHandle
    from moet_desk.settings import Settings

SETUP_FILE = "wizard.json"
APP_FILE = "app.json"

_CONDITIONS = {
    PackState.READY: PackCondition.READY,
    PackState.INCOMPLETE: PackCondition.INCOMPLETE,
    PackState.DAMAGED: PackCondition.DAMAGED,
    PackState.OTHER_FORMAT: PackCondition.OTHER_FORMAT,
}

OpenPack = Callable[[str, PlanWishes | None], "EngineHandle"]


class AppDesk:
    """`ui.desk.Desk` over this program. `open_pack` loads a pack by name with what was wished."""

    def __init__(self, invocation: Invocation, settings: Settings, open_pack: OpenPack) -> None:
        self._library = invocation.library
        self._data_dir = invocation.locations.data_dir
        self._settings = settings
        self._open_pack = open_pack
        self._jobs = AppJobs(self._data_dir)

    # -- models ----------------------------------------------------------------------------------

    def library(self) -> LibraryView:
        packs = self._library.packs()
        views = tuple(self._pack_view(pack) for pack in packs)
        used = sum(pack.bytes for pack in packs)
        return LibraryView(views, used, free_bytes(self._library.models_dir))

    def _pack_view(self, pack: InstalledPack) -> PackView:
        from moet_desk.engine.gate_file import read_gate

        gate = read_gate(pack.path) if pack.meta is not None else None
        condition, progress = _CONDITIONS[pack.state], ""
        if pack.state is PackState.INCOMPLETE:
            condition = self._condition_of_job(pack.name)
            progress = f"{pack.rows_done:,}/{pack.rows or '?':,}" if pack.rows else ""
        return PackView(
            name=pack.name,
            condition=condition,
            n_bytes=pack.bytes,
            family=pack.meta.model_type if pack.meta is not None else "",
            progress=progress,
            gate=gate.tau if gate is not None else None,
            details=pack_details(pack),
            error=pack.error if pack.state is not PackState.INCOMPLETE else None,
            again="It comes with the program and can be packed again." if pack.name == DEMO else "",
        )

    def _condition_of_job(self, name: str) -> PackCondition:
        states = {job.state for job in self.jobs() if job.model == name}
        if JobState.RUNNING in states:
            return PackCondition.PACKING
        return PackCondition.PAUSED if JobState.PAUSED in states else PackCondition.INCOMPLETE

    def remove(self, name: str) -> int:
        return self._library.remove(name)

    def opener(self, name: str, wishes: PlanWishes | None = None) -> Callable[[], EngineHandle]:
        def open_engine() -> EngineHandle:
            wanted = wishes if wishes is not None else self.wishes_for(name)
            handle = self._open_pack(name, wanted)
            self._remember(name, wanted)
            return handle

        return open_engine

    # -- what is remembered ----------------------------------------------------------------------

    def wishes_for(self, name: str) -> PlanWishes | None:
        """What was wished for a model when it was set up."""
        wishes = read_record(self._data_dir / APP_FILE).get("wishes", {})
        kept = wishes.get(name) if isinstance(wishes, dict) else None
        return wishes_from(kept) if isinstance(kept, dict) else None

    def last_model(self) -> str | None:
        """The pack that was loaded last, if it can be loaded now."""
        name = read_record(self._data_dir / APP_FILE).get("model")
        try:
            if isinstance(name, str):
                self._library.ready(name)
                return name
        except MoetError:
            pass  # removed or damaged since then: the start goes on without it
        return None

    def _remember(self, name: str, wishes: PlanWishes | None) -> None:
        path = self._data_dir / APP_FILE
        record = read_record(path)
        wanted = record.get("wishes")
        wanted = wanted if isinstance(wanted, dict) else {}
        if wishes is not None:
            wanted[name] = asdict(wishes)
        try:
            write_record(path, {"schema": 1, "model": name, "wishes": wanted})
        except MoetError:
            pass  # a full disk is no reason not to load a model

    def load_setup(self) -> Mapping[str, Any]:
        return read_record(self._data_dir / SETUP_FILE)

    def save_setup(self, kept: Mapping[str, Any]) -> None:
        write_record(self._data_dir / SETUP_FILE, kept)

    # -- setting up ------------------------------------------------------------------------------

    def machine(self) -> MachineView:
        raise NotImplementedError

    def offers(self) -> tuple[Offer, ...]:
        return (self._demo_offer(),)

    def _demo_offer(self) -> Offer:
        source = embedded_source()
        n_bytes = sum(file.stat().st_size for file in source.iterdir())
        return Offer(
            id=DEMO,
            title="Demo model",
            download_bytes=0,
            pack_bytes=n_bytes,
            fit=Fit.GOOD,
            about=("A small model that comes with the program. It needs no network.",),
            ready=not self._library.needs_packing(DEMO),
        )

    def look_up(self, text: str) -> Offer:
        raise fail("MD-SRC-01", path=text, missing="config.json")

    def plan(self, offer: Offer, wishes: PlanWishes) -> PlanView | None:
        return None

    def name_of(self, offer: Offer) -> str:
        return offer.id

    def start(self, offer: Offer, wishes: PlanWishes) -> str:
        if offer.id == DEMO:
            self._library.drop_other_format(DEMO)
        arguments = ["pack", str(embedded_source()), "--name", DEMO, "--wait"]
        return self._jobs.start("pack", self.name_of(offer), arguments)

    # -- jobs ------------------------------------------------------------------------------------

    def verify(self, name: str) -> str:
        return self._jobs.start("verify", name, ["verify", name])

    def jobs(self) -> tuple[JobView, ...]:
        return self._jobs.views()

    def pause(self, job_id: str) -> None:
        self._jobs.pause(job_id)

    def resume(self, job_id: str) -> None:
        self._jobs.resume(job_id)

    def cancel(self, job_id: str) -> None:
        self._jobs.cancel(job_id)

    # -- doctor ----------------------------------------------------------------------------------

    def doctor(self) -> DoctorView:
        raise NotImplementedError

    def save_report(self, view: DoctorView) -> Path:
        when = datetime.now().astimezone()
        path = self._data_dir / f"doctor-{when:%Y%m%d-%H%M%S}.json"
        write_record(path, view.document)
        return path


def pack_details(pack: InstalledPack) -> tuple[str, ...]:
    """What stands under the list about a pack."""
    meta = pack.meta
    if meta is None:
        return (str(pack.path),)
    shape = f"{len(meta.moe_layers)} MoE layers x {meta.n_experts} experts"
    return (
        f"{shape}, {meta.source_format} source, format {meta.format}, {show_disk(pack.bytes)}",
        str(pack.path),
    )


def wishes_from(kept: Mapping[str, Any]) -> PlanWishes:
    """Wishes of a file; a value of a wrong type is left to the planner."""
    context, keep_free = (
        value if isinstance(value, int) and value > 0 else None
        for value in (kept.get("context"), kept.get("keep_free"))
    )
    quality = str(kept.get("quality"))
    return PlanWishes(
        context, keep_free, quality if quality in ("fast", "balanced", "exact") else "fast"
    )
