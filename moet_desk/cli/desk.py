"""What the app's screens ask for, from the library, the jobs, the probes and the planner.

It makes the records of `ui.desk` out of what the rest of the program knows; the screens never see
more. Called from the UI thread, and from threads of its own for what may take long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moet_desk import config
from moet_desk.cli.context import engine_options
from moet_desk.cli.desk_jobs import AppJobs
from moet_desk.errors import MoetError
from moet_desk.store.durable import free_bytes
from moet_desk.store.library import DEMO, InstalledPack, PackState, embedded_source
from moet_desk.store.state_file import change_record, read_record, write_record
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
    from moet_desk.cli.desk_sources import Known
    from moet_desk.engine.handle import EngineHandle
    from moet_desk.machine import MachineFacts, Rates
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
        self._invocation = invocation
        self._library = invocation.library
        self._data_dir = invocation.locations.data_dir
        self._settings = settings
        self._open_pack = open_pack
        self._jobs = AppJobs(invocation.locations.jobs_dir)
        self._last_facts: MachineFacts | None = None
        self._known: dict[str, Known] = {}  # by offer, as far as it was asked for

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

    def show_folder(self, name: str) -> tuple[Path, bool]:
        from moet_desk.cli.desk_machine import show_folder

        path = self._library.find(name).path
        return path, show_folder(path)

    def opener(self, name: str, wishes: PlanWishes | None = None) -> Callable[[], EngineHandle]:
        def open_engine() -> EngineHandle:
            wanted = wishes if wishes is not None else self.wishes_for(name)
            handle = self._open_pack(name, wanted)
            self._remember(name, wanted)
            return handle

        return open_engine

    def pack_offer(self, name: str) -> tuple[Offer, PlanWishes]:
        from moet_desk.cli.desk_sources import Known
        from moet_desk.engine.planned_model import from_pack

        model = from_pack(self._library.ready(name))
        offer = Offer(f"pack:{name}", name, download_bytes=0, ready=True)
        self._known[offer.id] = Known(offer, name, model, "", ())
        self._last_facts = self._facts()
        quality = self._settings.answers.quality
        return offer, self.wishes_for(name) or PlanWishes(quality=quality)

    def save_wishes(self, name: str, wishes: PlanWishes) -> None:
        change_record(self._data_dir / APP_FILE, lambda kept: _with_wishes(kept, name, wishes))

    # -- what is remembered ----------------------------------------------------------------------

    def wishes_for(self, name: str) -> PlanWishes | None:
        """What was wished for a model when it was set up."""
        wishes = read_record(self._data_dir / APP_FILE).get("wishes", {})
        kept = wishes.get(name) if isinstance(wishes, dict) else None
        return wishes_from(kept) if isinstance(kept, dict) else None

    def last_model(self) -> str | None:
        """The pack that was loaded last, if it can be loaded now."""
        name = read_record(self._data_dir / APP_FILE).get("model")
        with suppress(MoetError):  # removed or damaged since then: the start goes on without it
            if isinstance(name, str):
                self._library.ready(name)
                return name
        return None

    def _remember(self, name: str, wishes: PlanWishes | None) -> None:
        with suppress(MoetError):  # a full disk is no reason not to load a model
            change_record(
                self._data_dir / APP_FILE,
                lambda kept: {**_with_wishes(kept, name, wishes), "model": name},
            )

    def load_setup(self) -> Mapping[str, Any]:
        return read_record(self._data_dir / SETUP_FILE)

    def save_setup(self, kept: Mapping[str, Any]) -> None:
        write_record(self._data_dir / SETUP_FILE, kept)

    # -- setting up ------------------------------------------------------------------------------

    def machine(self, *, again: bool = False) -> MachineView:
        from moet_desk.cli.desk_machine import machine_view
        from moet_desk.doctor import examine

        facts = self._facts(measure=True, again=again)
        folder = self._library.models_dir
        return machine_view(
            facts, examine(facts), models_dir=str(folder), free_bytes=free_bytes(folder)
        )

    def _facts(self, *, measure: bool = False, again: bool = False) -> MachineFacts:
        """What is known of this computer; rates are measured if they are not there yet."""
        from moet_desk.cli.machine import machine_facts
        from moet_desk.probing import rates

        if measure and (again or rates.read_rates(self._data_dir) is None):
            found = rates.measure(self._library.models_dir)
            with suppress(OSError):  # the next plan then measures again
                rates.save_rates(self._data_dir, found)
        facts = machine_facts(self._invocation, None, with_packs=True)
        self._last_facts = facts
        return facts

    def offers(self) -> tuple[Offer, ...]:
        from moet_desk.cli.available import fit_answers
        from moet_desk.cli.desk_plans import catalogue_offer, ranked
        from moet_desk.cli.desk_sources import Known, pull_arguments
        from moet_desk.engine.families import runs
        from moet_desk.engine.planned_model import from_catalogue

        facts, here = self._facts(), self._ready_names()
        rows = []
        for entry, answer in fit_answers(facts, engine_options(self._settings)):
            if not runs(entry.family) or entry.not_yet:
                continue
            offer = catalogue_offer(entry, answer, ready=entry.name in here)
            # which files are deleted on the way is known only when their sizes are
            arguments = pull_arguments(entry.repo, entry.name, reclaim=True)
            model = from_catalogue(entry)
            self._known[offer.id] = Known(offer, entry.name, model, "pull", arguments)
            rows.append((offer, entry.params_b))
        demo = self._demo()
        self._known[DEMO] = demo
        return (*ranked(rows), demo.offer)

    def _ready_names(self) -> set[str]:
        packs = self._library.packs()
        return {pack.name for pack in packs if pack.state is PackState.READY}

    def _demo(self) -> Known:
        from moet_desk.cli.desk_sources import known_local

        words = "A small model that comes with the program. It needs no network."
        return known_local(
            embedded_source(),
            DEMO,
            id=DEMO,
            title="Demo model",
            total="72M",
            active="19M",
            fit=Fit.GOOD,
            licence="Apache-2.0",
            about=(words,),
            ready=DEMO in self._ready_names(),
        )

    def look_up(self, text: str) -> Offer:
        from moet_desk.catalogue import find_entry
        from moet_desk.cli import desk_sources
        from moet_desk.store.hub import is_repo
        from moet_desk.store.source_paths import is_local, source_name

        if is_local(text):
            path = Path(text).expanduser().absolute()
            name = source_name(path)
            self._library.path_for(name)  # says what is wrong with a name
            known = desk_sources.known_local(path, name)
        else:
            repo = desk_sources.repository_in(text)
            entry = find_entry(repo)
            repo = repo if entry is None else entry.repo
            if not is_repo(repo):
                raise desk_sources.nothing_there(text)
            known = desk_sources.known_repository(self._invocation, repo)
        ready = known.name in self._ready_names()
        known = replace(known, offer=replace(known.offer, ready=ready))
        self._known[known.offer.id] = known
        return self._judged(known).offer

    def _judged(self, known: Known) -> Known:
        """With how it fits, which the planner says."""
        from moet_desk.cli.desk_plans import judged

        facts = self._last_facts or self._facts()
        if known.model is None:
            return known
        offer = judged(known.offer, facts, known.model, engine_options(self._settings))
        self._known[offer.id] = replace(known, offer=offer)
        return self._known[offer.id]

    @property
    def token_page(self) -> str:
        return f"{config.hub_endpoint()}/settings/tokens"

    def sign_in(self, token: str) -> None:
        from moet_desk.store.hub import Hub

        Hub().sign_in(token)

    def plan(self, offer: Offer, wishes: PlanWishes) -> PlanView | None:
        from moet_desk.cli.desk_plans import plan_view

        known, facts = self._known.get(offer.id), self._last_facts
        if known is None or known.model is None or facts is None:
            return None
        return plan_view(facts, known.model, engine_options(self._settings), wishes)

    def name_of(self, offer: Offer) -> str:
        known = self._known.get(offer.id)
        return offer.id if known is None else known.name

    def start(self, offer: Offer, wishes: PlanWishes, limit: int | None = None) -> str:
        known = self._known[offer.id]
        if known.name == DEMO:
            self._library.drop_other_format(DEMO)
        command = ["--data-dir", str(self._data_dir), *known.arguments]
        if limit is not None and known.kind == "pull":
            command += ["--limit-rate", str(limit)]
        return self._jobs.start(known.kind, known.name, command)

    # -- jobs ------------------------------------------------------------------------------------

    def verify(self, name: str) -> str:
        command = ["--data-dir", str(self._data_dir), "verify", name]
        return self._jobs.start("verify", name, command)

    def repair(self, name: str) -> str:
        command = ["--data-dir", str(self._data_dir), "verify", name, "--repair"]
        return self._jobs.start("repair", name, command)

    def jobs(self) -> tuple[JobView, ...]:
        return self._jobs.views()

    def pause(self, job_id: str) -> None:
        self._jobs.pause(job_id)

    def resume(self, job_id: str) -> None:
        self._jobs.resume(job_id)

    def cancel(self, job_id: str) -> None:
        self._jobs.cancel(job_id)

    def forget_done(self) -> None:
        """Drop jobs that ended well before the app was opened, but for the wizard's own."""
        job = self.load_setup().get("job")
        self._jobs.forget_done(but=job if isinstance(job, str) else None)

    # -- doctor ----------------------------------------------------------------------------------

    def doctor(self) -> DoctorView:
        return self._examined(None)

    def _examined(self, before: Rates | None) -> DoctorView:
        """All findings; measured rates are compared with those `before`."""
        from moet_desk.cli.desk_machine import doctor_view
        from moet_desk.cli.doctor import as_document, rates_words
        from moet_desk.cli.output import SCHEMA
        from moet_desk.doctor import examine

        facts = self._facts()
        found = examine(facts)
        document = {"schema": SCHEMA, **as_document(facts, found)}
        return doctor_view(found, document, rates=rates_words(facts.rates, before))

    def measure(self, say: Callable[[str], None]) -> DoctorView:
        from moet_desk.cli.desk_machine import measure_in_child
        from moet_desk.probing.rates import read_rates

        before = read_rates(self._data_dir)
        measure_in_child(self._data_dir, say)
        return self._examined(before)

    def put_in_order(self) -> tuple[str, ...]:
        from moet_desk.store.tidy import tidy

        tidied = tidy(self._invocation.locations)
        return (*tidied.done, *tidied.failed)

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


def _with_wishes(record: Mapping[str, Any], name: str, wishes: PlanWishes | None) -> dict[str, Any]:
    """The app's record with what is wished for a model; None leaves that as it is."""
    kept = record.get("wishes")
    kept = dict(kept) if isinstance(kept, dict) else {}
    if wishes is not None:
        kept[name] = asdict(wishes)
    return {"schema": 1, "model": record.get("model"), "wishes": kept}


def wishes_from(kept: Mapping[str, Any]) -> PlanWishes:
    """Wishes of a file; a value of a wrong type is left to the planner."""
    context, keep_free, ram = (
        value if isinstance(value, int) and value > 0 else None
        for value in (kept.get("context"), kept.get("keep_free"), kept.get("ram"))
    )
    quality = str(kept.get("quality"))
    quality = quality if quality in ("fast", "balanced", "exact") else "fast"
    return PlanWishes(context, keep_free, quality, ram)
