"""Fixtures that several suites share: the demo model's folder, and packs made from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples in every run; `bench.fuzz` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Test processes run side by side: more threads each would only wait for one another, spinning.
torch.set_num_threads(1)

# Triton decides once whether it interprets kernels, when the first module with kernels is imported;
# any suite may be the first to do so.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEMO = Path(__file__).resolve().parent.parent / "assets" / "demo"


@pytest.fixture(scope="session")
def demo_source() -> Path:
    """The folder of the shipped demo model."""
    return DEMO


@pytest.fixture(scope="session")
def demo_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model packed once per test process; do not write into it."""
    return pack_source(DEMO, tmp_path_factory.mktemp("packs") / "demo")


def pack_source(source: Path, dest: Path) -> Path:
    """Pack a source the way the command does."""
    from moet_desk.cli.packing import read_plan
    from moet_desk.store.pack_writer import write_pack

    write_pack(source, read_plan(source), dest, progress=lambda _: None, stop=lambda: False)
    return dest
