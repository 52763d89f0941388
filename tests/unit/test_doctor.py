"""The doctor: no false alarm about a healthy computer, a finding for each thing that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moet_desk.doctor import CHECKS, examine
from moet_desk.errors import Severity
from moet_desk.machine import (
    Certificates,
    Clock,
    Gpu,
    MachineFacts,
    PackFact,
    PcieLink,
    Terminal,
    from_json,
)
from moet_desk.units import GB, GIB
from tools import generate_plans

MACHINES = {
    path.stem: from_json(path.read_bytes()) for path in generate_plans.MACHINES.glob("*.json")
}
DESK = MACHINES["5090-96gb"]

EXPECTED = {
    "5090-64gb": set(),
    "5090-96gb": set(),
    "5090-128gb": set(),
    "5090-192gb": set(),
    "4090-64gb": set(),
    "3090-32gb": set(),
    "laptop-8gb": {"driver", "compiler", "swap"},
    "cpu-only": {"card", "drive"},
    "wsl-5090": {"wsl"},
    "container-48gb": {"link"},
}


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_examine__recorded_computers__warnings_where_something_is_wrong(name: str) -> None:
    found = examine(MACHINES[name])
    warned = {row.check for row in found.findings if row.severity is not Severity.INFO}
    assert warned == EXPECTED[name]
    assert found.has_warnings == bool(EXPECTED[name])
    checks = {row.check for row in found.findings}
    applying = {key for key, check in CHECKS.items() if check.applies(MACHINES[name])}
    assert checks | set(found.passed) == applying
    assert not checks & set(found.passed)


ABOUT_CARDS = {"several-cards", "torch-card", "driver", "compiler", "display", "vram", "link",
               "memlock"}  # fmt: skip


def test_examine__no_card__nothing_is_said_about_one() -> None:
    found = examine(replace(DESK, gpus=(), gpu_problem="no driver"))
    said = {*found.passed, *(row.check for row in found.findings)}
    assert not said & ABOUT_CARDS
    cpu = examine(MACHINES["cpu-only"])
    assert not {*cpu.passed, *(row.check for row in cpu.findings)} & ABOUT_CARDS
    assert {"swap", "torch", "disk-space"} <= set(cpu.passed)


def test_examine__nothing_known__nothing_said_of_it() -> None:
    bare = MachineFacts(memory=DESK.memory, cpu=DESK.cpu, gpus=DESK.gpus, tools=DESK.tools)
    found = examine(bare)
    said = {*found.passed, *(row.check for row in found.findings)}
    assert not said & {
        "driver", "drive", "drive-rate", "disk-space", "packs", "gates", "clock", "certificates",
        "terminal", "wsl", "container",
    }  # fmt: skip
    old = examine(replace(DESK, gpus=(replace(DESK.gpus[0], capability=(7, 5)),)))
    assert not {"vram", "link", "display", "several-cards"} & set(old.passed)


def card(**changes: Any) -> MachineFacts:
    return replace(DESK, gpus=(replace(DESK.gpus[0], **changes),))


def memory(**changes: Any) -> MachineFacts:
    return replace(DESK, memory=replace(DESK.memory, **changes))


def drive(**changes: Any) -> MachineFacts:
    return replace(DESK, drives=(replace(DESK.drives[0], **changes),))


def tools(**changes: Any) -> MachineFacts:
    return replace(DESK, tools=replace(DESK.tools, **changes))


def rates(**changes: Any) -> MachineFacts:
    assert DESK.rates is not None
    return replace(DESK, rates=replace(DESK.rates, **changes))


def dense_pack(stored: int, rounded: int) -> PackFact:
    return PackFact(
        name="m", state="ready", has_gate=True, dense_bytes=stored, dense_rounded_bytes=rounded
    )


def packs(*found: PackFact) -> MachineFacts:
    return replace(DESK, packs=found)


def link(**changes: Any) -> MachineFacts:
    return card(link=replace(DESK.gpus[0].link, **changes))


def terminal(**changes: Any) -> MachineFacts:
    return replace(NOW, terminal=replace(WINDOW, **changes))


CLOCK_S = 1.8e9  # in 2027
WINDOW = Terminal(name="xterm-256color", columns=80, rows=24, utf8=True, colours=256)
NOW = replace(
    DESK,
    clock=Clock(now_s=CLOCK_S, newest_file_s=CLOCK_S + 3600),
    certificates=Certificates(place="/etc/ssl", usable=True),
    terminal=WINDOW,
)
LOWER, INFO, STOPS = Severity.LOWER, Severity.INFO, Severity.STOPS
WRONG = [
    (replace(DESK, gpus=(), gpu_problem="no NVIDIA driver"), "card", LOWER, "No NVIDIA driver"),
    (card(capability=(7, 5)), "card", LOWER, "8.0"),
    (replace(DESK, gpus=(*DESK.gpus, replace(DESK.gpus[0], index=1, uuid="GPU-2", vram_free=1))),
     "several-cards", INFO, "GPU-0"),
    (tools(torch=None), "torch", STOPS, "computed"),
    (tools(torch_cuda=None), "torch-card", LOWER, "CPUs"),
    (replace(DESK, driver_cuda="12.8"), "driver", LOWER, "12.8"),
    (tools(triton=None), "compiler", LOWER, "kernels"),
    (tools(compiler=None, python_headers=False), "compiler", LOWER, "headers"),
    (card(vram_free=10 * GIB), "vram", LOWER, "GiB"),
    (link(width=4), "link", LOWER, "4 of 16"),
    (link(max_gen=3), "link", INFO, "PCIe 3"),
    (rates(pcie=6 * GB), "link", LOWER, "6.0 GB/s"),
    (memory(swap_used=3 * GIB), "swap", LOWER, "3.0 GiB"),
    (memory(container_limit=48 * GIB), "container", INFO, "48.0 GiB"),
    (memory(lockable=8 * 2**20), "memlock", INFO, "8.0 MiB"),
    (drive(is_network=True), "drive", LOWER, "network"),
    (drive(is_nvme=False), "drive", LOWER, "not NVMe"),
    (drive(is_nvme=False, is_rotational=True), "drive", LOWER, "spinning"),
    (drive(direct=False), "drive", INFO, "page cache"),
    (rates(drive_read=0.4 * GB), "drive-rate", LOWER, "400.0 MB/s"),
    (drive(free=5 * GB), "disk-space", LOWER, "5.0 GB"),
    (packs(PackFact(name="m", state="damaged", problem="Bad.")), "packs", LOWER, "m is damaged"),
    (packs(PackFact(name="m", state="ready", has_gate=False)), "gates", INFO, "0.6"),
    (packs(dense_pack(30 * GIB, 16 * GIB)), "dense", INFO, "30.0 GiB"),
    (packs(dense_pack(30 * GIB, 30 * GIB)), "dense", LOWER, "30.0 GiB"),
    (replace(DESK, rates=None), "measured", INFO, "data sheets"),
    (replace(NOW, clock=Clock(now_s=0.0)), "clock", LOWER, "1970-01-01"),
    (replace(NOW, clock=Clock(now_s=CLOCK_S, newest_file_s=CLOCK_S + 2e5)), "clock", LOWER,
     "2027-01-17"),
    (replace(NOW, certificates=Certificates(place="/none", usable=False)), "certificates", LOWER,
     "/none"),
    (terminal(columns=79), "terminal", LOWER, "79 x 24"),
    (terminal(rows=23), "terminal", LOWER, "80 x 23"),
    (terminal(utf8=False), "terminal", INFO, "ASCII"),
    (terminal(colours=16, name="linux"), "terminal", INFO, "linux"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "check", "severity", "word"), WRONG)
def test_examine__one_thing_wrong__one_finding_with_cause_and_fix(
    machine: MachineFacts, check: str, severity: Severity, word: str
) -> None:
    rows = [row for row in examine(machine).findings if row.check == check]
    assert len(rows) == 1
    assert rows[0].severity is severity
    assert word in rows[0].cause
    assert rows[0].fix
    healthy = replace(NOW, packs=(dense_pack(2 * GIB, 2 * GIB),))
    assert check in examine(healthy).passed or check == "container"


@pytest.mark.parametrize(
    "machine",
    [
        replace(DESK, driver_cuda="13.0", tools=replace(DESK.tools, torch_cuda="13.2")),
        link(gen=1),  # a card that idles
        link(gen=None, width=None, max_gen=None, max_width=None, card_gen=None),
        drive(is_nvme=None, is_rotational=None, direct=None),
        packs(PackFact(name="m", state="ready", has_gate=True)),
        memory(lockable=80 * GIB),
        card(has_display=None, vram_free=29 * GIB),
        NOW,
        terminal(colours=2**24),
    ],
    ids=["minor", "idle", "no-link", "no-drive", "pack", "lock", "desktop", "now", "truecolor"],
)
def test_examine__healthy_or_not_known__no_warning(machine: MachineFacts) -> None:
    assert not examine(machine).has_warnings


def test_examine__gravest_first() -> None:
    found = examine(replace(MACHINES["laptop-8gb"], rates=None))
    order = [row.severity for row in found.findings]
    assert order == sorted(order, key=[STOPS, LOWER, INFO].index)


def test_wsl_and_narrow_link__the_figures_are_in_the_words() -> None:
    narrow = Gpu(
        index=0, name="x", uuid="u", vram_total=GIB, vram_free=GIB,
        link=PcieLink(width=8, max_width=16),
    )  # fmt: skip
    (row,) = [r for r in examine(replace(DESK, gpus=(narrow,))).findings if r.check == "link"]
    assert "2 times more slowly" in row.cause
