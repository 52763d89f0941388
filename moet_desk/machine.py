"""What a computer has, as plain records that can be written to JSON and read back.

`probing` fills them in; planner and doctor only read them, so that both can be tried on computers
that nobody here owns. Sizes are bytes, rates bytes per second; None is "not known", never 0. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moet_desk.units import GB, show_memory

LEAST_CAPABILITY = (8, 0)
"""Older cards have no bfloat16 and no asynchronous copies, which the kernels are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """Generation and lanes of a card's link: now, at most here, and at most of the card itself.

    Cards lower the generation while they idle, so `gen` alone says nothing about the slot.
    """

    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None
    card_gen: int | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """What the link carries at most in one direction when it is awake, without overhead."""
        if self.max_gen is None or (self.width or self.max_width) is None:
            return None
        lanes = self.width or self.max_width or 0
        return _LANE.get(self.max_gen, _LANE[max(_LANE)]) * lanes


_LANE = {1: 0.25 * GB, 2: 0.5 * GB, 3: 0.985 * GB, 4: 1.969 * GB, 5: 3.938 * GB, 6: 7.563 * GB}
"""Bytes per second of a lane by generation, after line coding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card as its driver shows it."""

    index: int
    name: str
    uuid: str
    vram_total: int
    vram_free: int
    capability: tuple[int, int] | None = None
    has_display: bool | None = None
    memory_bits: int | None = None  # width of the bus to its memory
    memory_mhz: int | None = None  # top clock of that bus, half its data rate
    link: PcieLink = PcieLink()

    @property
    def vram_bytes_per_s(self) -> float | None:
        """What its memory carries by its data sheet."""
        if self.memory_bits is None or self.memory_mhz is None:
            return None
        return 2e6 * self.memory_mhz * self.memory_bits / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """RAM. `available` counts no swap and stays within what a container may take."""

    total: int
    available: int
    swap_total: int = 0
    swap_used: int = 0
    container_limit: int | None = None
    cgroup: int | None = None  # version of the control group that limits it
    lockable: int | None = None  # RLIMIT_MEMLOCK; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor. `usable` cores are those this process may run on."""

    name: str
    cores: int
    usable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """What is behind a folder."""

    folder: str
    use: str  # "models" or "data"
    filesystem: str
    device: str
    total: int
    free: int
    is_nvme: bool | None = None
    is_rotational: bool | None = None
    is_network: bool = False
    direct: bool | None = None  # whether reads past the page cache work; None: not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the kernels of a card need beside it."""

    torch: str | None = None
    torch_cuda: str | None = None  # CUDA version torch was built for; None: a build without
    triton: str | None = None
    compiler: str | None = None
    python_headers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured bytes per second, and when (ISO date and time, UTC)."""

    measured: str
    ram_copy: float | None = None
    drive_read: float | None = None
    drive_direct: bool | None = None  # whether the drive was read past the page cache
    pcie: float | None = None
    vram: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFact:
    """What the doctor has to know of an installed pack."""

    name: str
    state: str
    has_gate: bool | None = None
    problem: str = ""
    dense_bytes: int | None = None  # of all weights but the experts
    dense_rounded_bytes: int | None = None  # of them, rounded to 8 bits where that is less


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Seconds since 1970: what the clock says, and when our newest file was written by it."""

    now_s: float
    newest_file_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Where the certificates that a hub is trusted by are read from, and whether any are there."""

    place: str
    usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The window this runs in."""

    name: str  # TERM
    columns: int
    rows: int
    utf8: bool
    colours: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """A whole computer.

    Attributes:
        name: of a record; empty for the computer this runs on.
        gpus: in the driver's order.
        gpu_problem: why there is no card, in words; empty if there is one.
        driver: version of the driver, None without one.
        driver_cuda: newest CUDA version it can run.
        is_wsl: Linux inside Windows.
        container: kind of container, None outside of one.
        clock, certificates, terminal: of this moment; a record of another computer has none.
    """

    memory: Memory
    cpu: Cpu
    name: str = ""
    system: str = ""
    is_wsl: bool = False
    container: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    driver: str | None = None
    driver_cuda: str | None = None
    drives: tuple[Drive, ...] = ()
    tools: Tools = Tools()
    rates: Rates | None = None
    packs: tuple[PackFact, ...] = ()
    clock: Clock | None = None
    certificates: Certificates | None = None
    terminal: Terminal | None = None


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """The one card that is used, and why it and no other."""

    gpu: Gpu
    why: str


def choose_gpu(gpus: Sequence[Gpu]) -> GpuChoice | None:
    """The card with the most free memory among those that can compute; a display decides ties."""
    able = [gpu for gpu in gpus if gpu.capability is None or gpu.capability >= LEAST_CAPABILITY]
    if not able:
        return None
    best = max(able, key=lambda gpu: (gpu.vram_free, gpu.has_display is not True, -gpu.index))
    if len(gpus) == 1:
        return GpuChoice(best, "it is the only one")
    if len(able) == 1:
        return GpuChoice(best, "it is the only one that is new enough")
    rivals = [gpu for gpu in able if gpu is not best]
    if all(gpu.vram_free < best.vram_free for gpu in rivals):
        free = show_memory(best.vram_free)
        return GpuChoice(best, f"of {len(able)} cards it has the most free memory, {free}")
    if best.has_display is not True and any(gpu.has_display for gpu in rivals):
        return GpuChoice(best, "it has as much free memory as others and no display on it")
    return GpuChoice(best, "it is the first of those with as much free memory")


def without_names(facts: MachineFacts, home: str) -> MachineFacts:
    """The same computer for somebody else's eyes: no home folder, no card's id, no models, and
    nothing of this moment.
    """
    drives = tuple(
        replace(drive, folder="~" + drive.folder.removeprefix(home))
        if drive.folder.startswith(home)
        else drive
        for drive in facts.drives
    )
    gpus = tuple(replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in facts.gpus)
    kept = replace(facts, clock=None, certificates=None, terminal=None)
    return replace(kept, drives=drives, gpus=gpus, packs=())


def to_json(facts: MachineFacts) -> bytes:
    """The record as indented JSON; the same facts give the same bytes."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"


def from_json(data: bytes) -> MachineFacts:
    """Read a record.

    Raises:
        ValueError: it is not one.
    """
    import msgspec

    return msgspec.json.decode(data, type=MachineFacts)
