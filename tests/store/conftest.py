"""A tiny source and its pack, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.store.pack_writer import write_pack
from tests.store.tiny import Tiny, plan_of, write_source

TINY = Tiny()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MXFP4 source; do not write into it."""
    folder = tmp_path_factory.mktemp("sources") / "tiny"
    write_source(folder, TINY)
    return folder


@pytest.fixture
def tiny_pack(tiny_source: Path, tmp_path: Path) -> Path:
    """A fresh pack of the tiny source."""
    write_pack(tiny_source, plan_of(TINY, tiny_source), tmp_path / "tiny")
    return tmp_path / "tiny"
