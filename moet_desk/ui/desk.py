"""What the wizard, the models and the doctor screen show, and what they may ask for.

Frozen records and one `Protocol`; the command line implements it over the library, the jobs, the
hub and the probes, the screens know nothing else of them. What may take long says so and is called
in a thread (`ui.background`). Texts of hubs and files are cleaned where they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from moet_desk.engine.handle import EngineHandle
from moet_desk.errors import MoetError
from moet_desk.telemetry import EndpointView, Tier

ASK_BYTES = 10_000_000_000
"""A download above this is named with its size and asked for; Enter alone never starts it."""


class Mark(Enum):
    """How good a thing is; drawn as a glyph, a word and a colour."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    NOTE = "note"
    UNKNOWN = "unknown"


# -- machine and doctor ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of what this computer has: "GPU", "RTX 5090, 32.0 GiB, 30.9 free"."""

    name: str
    text: str
    mark: Mark = Mark.OK
    detail: str = ""  # a second line: a measured rate, or why the mark is not OK


@dataclass(frozen=True, slots=True)
class MachineView:
    """What was found and measured, and where models are kept."""

    facts: tuple[Fact, ...]
    models_dir: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of the doctor. `code`, `cause` and `fix` are empty for what is in order."""

    mark: Mark
    title: str
    code: str = ""
    effect: str = ""  # stops | lower | info
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class DoctorView:
    """All findings, worst first, and the document that `moet-desk doctor --json` prints."""

    findings: tuple[Finding, ...]
    document: Mapping[str, Any]


# -- models ----------------------------------------------------------------------------------


class Fit(Enum):
    """How a model fits this computer; the values are shown to people."""

    BEST = "best"
    GOOD = "good"
    SLOW = "slow"
    NO_ROOM = "no room"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that can be added. Sizes are None when they are not known."""

    id: str
    title: str
    total: str = "?"  # parameters: "284B"
    active: str = "?"
    download_bytes: int | None = None  # 0: nothing has to be fetched
    pack_bytes: int | None = None
    peak_bytes: int | None = None  # most disk space while it is made
    fit: Fit = Fit.UNKNOWN
    reason: str = ""  # why it fits so, in words
    forecast: str = ""  # "28-34 tok/s"
    licence: str = ""
    revision: str = ""
    about: tuple[str, ...] = ()
    ready: bool = False  # a complete pack is on this computer


@dataclass(frozen=True, slots=True)
class PlanWishes:
    """What a person may change of a plan; None leaves it to the planner."""

    context: int | None = None
    keep_free: int | None = None  # bytes of GPU memory, or of RAM without a GPU
    quality: str = "fast"
    ram: int | None = None  # bytes of RAM for experts beside a GPU


@dataclass(frozen=True, slots=True)
class TierPart:
    """A stretch of a tier's bar. `tier` None: fixed things; `spare`: nothing lives there."""

    label: str
    n_bytes: int
    tier: Tier | None = None
    spare: bool = False


@dataclass(frozen=True, slots=True)
class TierRow:
    """One memory of the plan: its letter, name, size and what lives in it."""

    letter: str
    name: str
    total_bytes: int
    parts: tuple[TierPart, ...]


@dataclass(frozen=True, slots=True)
class PlanView:
    """How a model will live on this computer. The choices stand in rising order; none: it cannot
    be chosen here.
    """

    rows: tuple[TierRow, ...]
    context: int
    contexts: tuple[int, ...]
    keep_free: int
    keep_frees: tuple[int, ...]
    forecast: str = ""
    notes: tuple[str, ...] = ()
    problem: MoetError | None = None  # it does not fit so
    ram: int = 0
    rams: tuple[int, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


class PackCondition(Enum):
    """State of an installed pack; the values are shown to people."""

    READY = "ready"
    PACKING = "packing"
    PAUSED = "paused"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    OTHER_FORMAT = "other format"


@dataclass(frozen=True, slots=True)
class PackView:
    """One model on this computer. `details` are the lines under the list."""

    name: str
    condition: PackCondition
    n_bytes: int
    family: str = ""
    progress: str = ""  # "103 of 224 rows"
    gate: float | None = None  # calibrated confidence of balanced answers
    details: tuple[str, ...] = ()
    error: MoetError | None = None
    again: str = ""  # how to get it back once it is removed


@dataclass(frozen=True, slots=True)
class LibraryView:
    """The models folder: what is there, what it takes, and what is free."""

    packs: tuple[PackView, ...]
    used_bytes: int
    free_bytes: int


# -- jobs ------------------------------------------------------------------------------------


class JobState(Enum):
    """What a job is doing; the values are shown to people."""

    RUNNING = "running"
    PAUSED = "paused"
    STALLED = "stalled"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class JobStep:
    """One phase of a job: its bar and figures. `total` 0: not begun, or nothing to count."""

    name: str
    done: int = 0
    total: int = 0
    unit: str = "bytes"
    rate: float | None = None  # units per second
    finished: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    """Long work in a process of its own. `kind` is its verb: "pull", "pack", "verify"."""

    id: str
    kind: str
    model: str
    state: JobState
    steps: tuple[JobStep, ...] = ()
    error: MoetError | None = None
    words: tuple[str, ...] = ()  # last events, newest first

    @property
    def step(self) -> JobStep | None:
        """The phase it is in: the first that is begun and not finished, else the last begun."""
        begun = [step for step in self.steps if step.total or step.finished]
        return next((step for step in begun if not step.finished), begun[-1] if begun else None)


class Desk(Protocol):
    """Everything these screens can ask for.

    `machine`, `offers`, `look_up`, `sign_in`, `doctor`, `measure`, `put_in_order`, `library`,
    `pack_offer` and `remove` may take long and run in a thread; the others are quick. All raise
    catalogue errors.
    """

    def machine(self, *, again: bool = False) -> MachineView:
        """Look at this computer; measure it if that was never done, or `again`."""
        ...

    def offers(self) -> tuple[Offer, ...]:
        """Models that can be added, the recommended one first."""
        ...

    def look_up(self, text: str) -> Offer:
        """The offer for a repository's name or a folder. Reads headers only, no weights."""
        ...

    @property
    def token_page(self) -> str:
        """Where the hub lets people make tokens."""
        ...

    def sign_in(self, token: str) -> None:
        """Ask the hub whether it knows a token, and keep it."""
        ...

    def plan(self, offer: Offer, wishes: PlanWishes) -> PlanView | None:
        """How it would live here; None while its shape is not known. Pure and quick."""
        ...

    def start(self, offer: Offer, wishes: PlanWishes, limit: int | None = None) -> str:
        """Begin (or take up) getting and packing, with so many bytes per second of the line at
        most; returns the job's id.
        """
        ...

    def name_of(self, offer: Offer) -> str:
        """Name of the pack that an offer becomes."""
        ...

    def library(self) -> LibraryView:
        """The packs on this computer."""
        ...

    def verify(self, name: str) -> str:
        """Compare a pack with its checksums, in the background; returns the job's id."""
        ...

    def repair(self, name: str) -> str:
        """Look for damage in a pack and mend it, in the background; returns the job's id."""
        ...

    def show_folder(self, name: str) -> tuple[Path, bool]:
        """The folder of a pack, and whether the desktop shows it now; without one it cannot."""
        ...

    def pack_offer(self, name: str) -> tuple[Offer, PlanWishes]:
        """A pack as something that can be planned, and what is wished for it now."""
        ...

    def save_wishes(self, name: str, wishes: PlanWishes) -> None:
        """Keep how a pack is to be planned when it is loaded next."""
        ...

    def remove(self, name: str) -> int:
        """Delete a pack; returns the bytes that became free."""
        ...

    def jobs(self) -> tuple[JobView, ...]:
        """Jobs that run, wait, or ended since they were last dismissed."""
        ...

    def pause(self, job_id: str) -> None:
        """Stop it; what is done is kept."""
        ...

    def resume(self, job_id: str) -> None:
        """Go on where it stopped."""
        ...

    def cancel(self, job_id: str) -> None:
        """Stop it and forget the job; finished parts of the model stay on disk."""
        ...

    def opener(self, name: str, wishes: PlanWishes | None = None) -> Callable[[], EngineHandle]:
        """What loads a pack; remembers its name and wishes for the next start once it is open."""
        ...

    def doctor(self) -> DoctorView:
        """Check this computer."""
        ...

    def measure(self, say: Callable[[str], None]) -> DoctorView:
        """Measure this computer, then check it; `say` is told in this thread what is measured."""
        ...

    def put_in_order(self) -> tuple[str, ...]:
        """Do what needs no question: folders, who may read files, leftovers. What was done."""
        ...

    def save_report(self, view: DoctorView) -> Path:
        """Write the doctor's document to a file."""
        ...

    def load_setup(self) -> Mapping[str, Any]:
        """What the wizard kept; empty if nothing."""
        ...

    def save_setup(self, kept: Mapping[str, Any]) -> None:
        """Keep what the wizard needs to go on after the window is closed."""
        ...


class EndpointControl(Protocol):
    """What the endpoint screen shows and does. `start` and `stop` run in a thread, the others are
    quick.
    """

    def view(self) -> EndpointView:
        """As it is now, the newest call first."""
        ...

    def start(self) -> None:
        """Let programs connect, now or once a model is loaded."""
        ...

    def stop(self) -> None:
        """Let nobody connect; answers that are being written end."""
        ...

    def stop_call(self, number: int) -> bool:
        """Stop the answer of one call; False if it has ended."""
        ...


class NoEndpoint:
    """An `EndpointControl` where there is none."""

    def view(self) -> EndpointView:
        return EndpointView()

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def stop_call(self, number: int) -> bool:
        return False
