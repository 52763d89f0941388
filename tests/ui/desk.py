"""A `Desk` in memory: what the screens ask for is listed, what they show is set by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moet_desk.engine.handle import EngineHandle
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import CallState, EndpointCall, EndpointState, EndpointView, Tier
from moet_desk.ui.desk import (
    DoctorView,
    Fact,
    Finding,
    Fit,
    JobState,
    JobStep,
    JobView,
    LibraryView,
    MachineView,
    Mark,
    Offer,
    PackCondition,
    PackView,
    PlanView,
    PlanWishes,
    TierPart,
    TierRow,
)

GIB, GB = 2**30, 10**9

MACHINE = MachineView(
    facts=(
        Fact("GPU", "RTX 5090, 32.0 GiB, 30.9 free", Mark.OK, "copy to it 51.2 GiB/s"),
        Fact("RAM", "96.0 GiB, 81.4 free", Mark.OK),
        Fact("Disk", "412 GB free on /home (ext4)", Mark.WARN, "a slot of PCIe 3.0 slows it down"),
        Fact("Swap", "8.0 GiB in use", Mark.BAD),
    ),
    models_dir="/home/ada/.local/share/moet-desk/models",
    free_bytes=412 * GB,
)
DEMO = Offer(
    "demo", "Demo model", total="72M", active="19M", download_bytes=0, pack_bytes=50_000_000,
    peak_bytes=50_000_000, fit=Fit.GOOD, forecast="40 tok/s", licence="Apache-2.0",
    about=("A small model that comes with the program. It needs no network.",),
)  # fmt: skip
FLASH = Offer(
    "flash", "DeepSeek-V4-Flash", total="284B", active="13B", download_bytes=167 * GB,
    pack_bytes=86 * GB, peak_bytes=98 * GB, fit=Fit.BEST, forecast="28-34 tok/s", licence="MIT",
    revision="0731", reason="19 % of its experts fit on the GPU, 88 % in RAM.",
)  # fmt: skip
SMALL = Offer(
    "small", "Qwen3.6-35B-A3B", total="35B", active="3B", download_bytes=7 * GB,
    pack_bytes=13 * GB, fit=Fit.GOOD, forecast="140-170 tok/s",
)  # fmt: skip
HUGE = Offer(
    "huge", "DeepSeek-V4-Pro", total="1.6T", download_bytes=900 * GB, pack_bytes=463 * GB,
    fit=Fit.NO_ROOM, reason="It needs 463 GB of disk, 412 GB are free.",
)  # fmt: skip
READY = PackView(
    "demo", PackCondition.READY, 50_000_000, family="deepseek_v3", gate=0.62,
    details=("8 layers x 32 experts, top 4", "/home/ada/models/demo"),
    again="It can be made again without a network.",
)  # fmt: skip
PULLING = JobView(
    "job-1", "pull", "flash", JobState.RUNNING,
    steps=(
        JobStep("Check", finished=True, note="disk and licence"),
        JobStep("Download", 80 * GB, 167 * GB, rate=118e6, note="file 24 of 46"),
        JobStep("Pack", 4352, 11008, unit="experts", rate=6.0, note="layer 17 of 43"),
        JobStep("Verify", note="each row is checked as it is written"),
    ),
    words=("layer 16 packed", "file 23 verified"),
)  # fmt: skip
FINDINGS = (
    Finding(Mark.BAD, "Swap is in use", "MD-RAM-03", "lower", "8.1 GiB are swapped out.",
            "Close programs."),
    Finding(Mark.WARN, "The slot is slower than the drive", "MD-NVME-02", "info",
            "Reads come at 5.9 GB/s.", ""),
    Finding(Mark.OK, "GPU RTX 5090, compute 12.0, 32 GiB"),
)  # fmt: skip


class FakeDesk:
    """See the module's paragraph."""

    def __init__(self, open_engine: Callable[[], EngineHandle] | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.kept: Mapping[str, Any] = {}
        self.offered: tuple[Offer, ...] = (FLASH, DEMO, SMALL, HUGE)
        self.packs: tuple[PackView, ...] = (READY,)
        self.running: tuple[JobView, ...] = ()
        self.errors: dict[str, MoetError] = {}
        self.wishes: dict[str, PlanWishes] = {}
        self.has_desktop = False
        self.measuring = threading.Event()  # set: measuring may end
        self.tidied: tuple[str, ...] = ()
        self._open_engine = open_engine

    def _ask(self, *what: Any) -> None:
        self.asked.append(what)
        if what[0] in self.errors:
            raise self.errors[what[0]]

    def machine(self, *, again: bool = False) -> MachineView:
        self._ask("machine", again)
        return MACHINE

    def offers(self) -> tuple[Offer, ...]:
        self._ask("offers")
        return self.offered

    def look_up(self, text: str) -> Offer:
        self._ask("look_up", text)
        if text in self.errors:
            raise self.errors[text]
        if "/" not in text:
            raise fail("MD-SRC-01", path=text, missing="config.json")
        return replace(SMALL, id=text, title=text)

    def plan(self, offer: Offer, wishes: PlanWishes) -> PlanView | None:
        if offer.id not in ("flash", "huge") and not offer.id.startswith("pack:"):
            return None
        context, free = wishes.context or 32768, wishes.keep_free or 2 * GIB
        problem = fail("MD-GPU-05", need="40 GiB", have="32 GiB") if free > 8 * GIB else None
        gpu = (
            TierPart("fixed", 9 * GIB), TierPart("experts", 16 * GIB, Tier.BASE),
            TierPart("4-bit", GIB, Tier.FINE), TierPart("spare", free, spare=True),
        )  # fmt: skip
        ram = (TierPart("experts", 64 * GIB, Tier.RAM), TierPart("spare", 32 * GIB, spare=True))
        disk = (TierPart("all 11,008 experts", 72 * GIB, Tier.NVME),)
        return PlanView(
            rows=(
                TierRow("G", "GPU", 32 * GIB, gpu),
                TierRow("R", "RAM", 96 * GIB, ram),
                TierRow("N", "NVMe", 72 * GIB, disk),
            ),
            context=context, contexts=(8192, 16384, 32768, 65536, 131072),
            keep_free=free, keep_frees=(GIB, 2 * GIB, 4 * GIB, 16 * GIB),
            forecast=f"28-34 tok/s at {context} tokens", notes=("The 4-bit pool is small.",),
            problem=problem, document={"context_tokens": context, "keep_free_bytes": free},
            ram=wishes.ram or 64 * GIB,
            rams=(32 * GIB, 64 * GIB) if offer.id.startswith("pack:") else (),
        )  # fmt: skip

    def name_of(self, offer: Offer) -> str:
        return offer.id.replace("/", "-")

    def start(self, offer: Offer, wishes: PlanWishes, limit: int | None = None) -> str:
        self._ask("start", offer.id, wishes, *([] if limit is None else [limit]))
        steps = (JobStep("Pack", 0, 288, unit="experts"),)
        self.running = (JobView("job-1", "pack", self.name_of(offer), JobState.RUNNING, steps),)
        return "job-1"

    def library(self) -> LibraryView:
        self._ask("library")
        return LibraryView(self.packs, sum(p.n_bytes for p in self.packs), 412 * GB)

    def verify(self, name: str) -> str:
        self._ask("verify", name)
        return "job-2"

    def repair(self, name: str) -> str:
        self._ask("repair", name)
        return "job-3"

    def show_folder(self, name: str) -> tuple[Path, bool]:
        self._ask("show_folder", name)
        return Path("/home/ada/models") / name, self.has_desktop

    def pack_offer(self, name: str) -> tuple[Offer, PlanWishes]:
        self._ask("pack_offer", name)
        return Offer(f"pack:{name}", name, ready=True), self.wishes.get(name, PlanWishes())

    def save_wishes(self, name: str, wishes: PlanWishes) -> None:
        self._ask("save_wishes", name, wishes)
        self.wishes[name] = wishes

    @property
    def token_page(self) -> str:
        return "https://hub.example/settings/tokens"

    def sign_in(self, token: str) -> None:
        self._ask("sign_in", token)
        if token != "hf_right":
            raise fail("MD-HUB-05", host="hub", page="https://hub/settings/tokens")
        self.errors = {}

    def remove(self, name: str) -> int:
        self._ask("remove", name)
        gone = next(pack for pack in self.packs if pack.name == name)
        self.packs = tuple(pack for pack in self.packs if pack.name != name)
        return gone.n_bytes

    def jobs(self) -> tuple[JobView, ...]:
        return self.running

    def _set(self, job_id: str, state: JobState) -> None:
        self.running = tuple(
            replace(job, state=state) if job.id == job_id else job for job in self.running
        )

    def pause(self, job_id: str) -> None:
        self._ask("pause", job_id)
        self._set(job_id, JobState.PAUSED)

    def resume(self, job_id: str) -> None:
        self._ask("resume", job_id)
        self._set(job_id, JobState.RUNNING)

    def cancel(self, job_id: str) -> None:
        self._ask("cancel", job_id)
        self.running = tuple(job for job in self.running if job.id != job_id)

    def finish(self, job_id: str) -> None:
        """The job ends well."""
        self._set(job_id, JobState.DONE)

    def opener(self, name: str, wishes: PlanWishes | None = None) -> Callable[[], EngineHandle]:
        self._ask("opener", name, wishes)
        if self._open_engine is None:
            raise AssertionError("this desk opens no engine")
        return self._open_engine

    def doctor(self) -> DoctorView:
        self._ask("doctor")
        return DoctorView(FINDINGS, {"findings": [finding.code for finding in FINDINGS]})

    def measure(self, say: Callable[[str], None]) -> DoctorView:
        self._ask("measure")
        say("the drive")
        self.measuring.wait(10)
        rates = Finding(Mark.OK, "The computer was measured", cause="drive 5.9 GB/s")
        return DoctorView((*FINDINGS, rates), {})

    def put_in_order(self) -> tuple[str, ...]:
        self._ask("put_in_order")
        return self.tidied

    def save_report(self, view: DoctorView) -> Path:
        self._ask("save_report", view.document)
        return Path("/home/ada/doctor.json")

    def load_setup(self) -> Mapping[str, Any]:
        return self.kept

    def save_setup(self, kept: Mapping[str, Any]) -> None:
        if "save_setup" in self.errors:
            raise self.errors["save_setup"]
        self.kept = dict(kept)


CALLS = (
    EndpointCall(
        3, 1_795_953_602.0, "opencode", "chat, stream", "demo", CallState.WRITING,
        prompt_tokens=8112, prompt_done=8112, n_tokens=412, queue_s=2.1, first_s=17.9,
        total_s=31.2, tok_per_s=30.8, status=200,
    ),
    EndpointCall(
        2, 1_795_953_580.0, "OpenAI/Python", "messages", "demo", CallState.DONE,
        prompt_tokens=310, prompt_done=310, n_tokens=96, first_s=0.9, total_s=4.1, tok_per_s=29.9,
        status=200,
    ),
    EndpointCall(
        1, 1_795_953_475.0, "curl", "chat", state=CallState.FAILED, total_s=0.004, status=404,
        error="MD-API-02  This server offers demo, not gpt-4o.",
    ),
)  # fmt: skip


class FakeEndpoint:
    """An `EndpointControl` in memory; `asked` lists what was wanted of it."""

    def __init__(self) -> None:
        self.now = EndpointView(EndpointState.RUNNING, "http://127.0.0.1:4321", CALLS)
        self.asked: list[object] = []

    def view(self) -> EndpointView:
        return self.now

    def start(self) -> None:
        self.asked.append("start")
        self.now = replace(self.now, state=EndpointState.RUNNING)

    def stop(self) -> None:
        self.asked.append("stop")
        self.now = replace(self.now, state=EndpointState.OFF)

    def stop_call(self, number: int) -> bool:
        self.asked.append(number)
        stopped = replace(CALLS[0], state=CallState.STOPPED)
        self.now = replace(self.now, calls=(stopped, *CALLS[1:]))
        return True
