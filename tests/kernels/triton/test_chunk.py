"""Prompt chunks on a device's launches, interpreted, against the CPU engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk import plan
from moet_desk.engine.cuda import chunk_sizes, expert_stream
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.prefill import CudaPrefiller
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.handle import EngineOptions, GenerateRequest
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.kernels.triton.grouped import cut_batches
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import CONFIGS, random_model, save_source

IDS = [5, 9, 33, 2, 17, 40, 8, 8, 21, 60]  # a whole chunk and a part of one
OPTIONS: dict[str, Any] = {"kv_format": "f32", "context": 64, "ram_bytes": 10**9}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["v3_groups_yarn", "plain_rope"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunk")
    save_source(random_model(CONFIGS[request.param], 0.25), folder / "source")
    return pack_source(folder / "source", folder / "pack")


@contextmanager
def on_device(pack: Path, **options: Any) -> Iterator[CudaCore]:
    given = {**OPTIONS, "vram_bytes": 10**9, "max_running": 4, "prefill_chunk": 8, **options}
    core = load_cuda(pack, EngineOptions(save_heat=False, **given), device=CPU)
    try:
        yield core
    finally:
        core.close()


def read(core: CudaCore, ids: list[int], sequence: KvSequence, reading: Reading) -> Tensor:
    """Logits behind the last of `ids`, read in the core's chunks."""
    model = core.prefiller._model
    logits = torch.empty(0)
    for at in range(0, len(ids), core.plan.prefill_chunk):
        chunk = model.begin(ids[at : at + core.plan.prefill_chunk], sequence, reading)
        while chunk.next_layer < model.n_layers:
            model.layer(chunk)
        logits = model.logits(chunk).clone()
        sequence.length += chunk.rows.n
    return logits


def read_anew(core: CudaCore, reading: Reading) -> Tensor:
    sequence = core.kv.reserve(len(IDS))
    assert sequence is not None
    logits = read(core, IDS, sequence, reading)
    core.kv.release(sequence)
    return logits


class Roomy:
    """A core with place for every row. An interpreted prompt takes seconds: each is read once."""

    def __init__(self, core: CudaCore) -> None:
        self.core = core
        self._read: dict[Reading, Tensor] = {}

    def logits(self, reading: Reading) -> Tensor:
        if reading not in self._read:
            self._read[reading] = read_anew(self.core, reading)
        return self._read[reading]


@pytest.fixture(scope="module")
def roomy(pack: Path) -> Iterator[Roomy]:
    with on_device(pack) as core:
        yield Roomy(core)


@pytest.mark.slow
def test_chunks__tiny_model__near_the_cpu_engine(pack: Path, roomy: Roomy) -> None:
    with loaded(pack, **OPTIONS) as cpu:
        want = {plane: logits_of(cpu, IDS, plane=plane)[-1] for plane in Plane}
    # one int8 activation that rounds the other way is worth about 0.4 % here
    for reading, limit in ((Reading.FAST, 2e-2), (Reading.EXACT, 1e-3)):
        wanted = want[reading.planes[-1]]
        found = roomy.logits(reading)
        assert (found - wanted).abs().max() < limit * wanted.std(), reading
    assert roomy.core.residency.counters(step_s=0.0).evictions == 0


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["plain_rope"], indirect=True)
def test_chunks__small_tiers__same_bits(
    pack: Path, roomy: Roomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = {reading: roomy.logits(reading) for reading in Reading}
    # few places, so that they are taken again and again, and rows are brought ahead
    monkeypatch.setattr(chunk_sizes, "MOST_BATCHED", 2)
    monkeypatch.setattr(expert_stream, "AHEAD_PAIRS", 1)
    least = 8 * roomy.core.spec.moe_ffn.router.top_k
    with on_device(pack, pool_slots=least, fine_slots=least) as core:
        for reading in (Reading.FAST, Reading.EXACT, Reading.FAST):
            assert torch.equal(read_anew(core, reading), want[reading])
    monkeypatch.setattr(plan, "STEP_ROWS", 2)  # else RAM holds all rows of so few
    with on_device(pack, pool_slots=least, fine_slots=least, arena_rows=1) as core:
        assert torch.equal(read_anew(core, Reading.FAST_FP4), want[Reading.FAST_FP4])
        counters = core.residency.counters(step_s=0.0)
        assert counters.from_nvme > 0
        assert counters.bytes_nvme_to_ram > 0


@dataclass(frozen=True)
class Kept:
    """Scores in the place of the token that they would choose."""

    logits: Tensor
    token_id: int = -1


class PromptOnly:
    """What a prefiller needs of a request."""

    def __init__(self, core: CudaCore) -> None:
        sequence = core.kv.reserve(len(IDS) + 1)
        assert sequence is not None
        self.kv, self.prompt_ids, self.plane = sequence, IDS, Plane.BASE
        self.request = GenerateRequest()
        self.error: Exception | None = None
        self.logits = torch.empty(0)
        self.sampler = self
        self.tau: float | None = None
        self.rerun_tokens, self.rerun_s, self.reran, self.ended = 0, 0.0, False, False
        self.out_ids: list[int] = []

    def note_read(self) -> None:
        pass

    def draw(self, ahead: int = 0) -> None:
        """The host chooses."""

    def choose(self, logits: Tensor) -> Kept:
        return Kept(logits.clone())

    def accept(self, chosen: Kept) -> None:
        self.logits = chosen.logits

    def fail(self, error: Exception) -> None:
        self.error = error


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("pack", ["plain_rope"], indirect=True)
def test_prefiller__turns_end_at_layers__other_steps_between_change_nothing(pack: Path) -> None:
    with on_device(pack) as core:
        want = read_anew(core, Reading.FAST)
        other = core.kv.reserve(16)
        assert other is not None
        alone = core.model.run([StepRow(7, other)], Plane.BASE).clone()
        seconds = iter(range(1000))
        prefiller = CudaPrefiller(
            core.prefiller._model, core.decoder, chunk=8, fast=Reading.FAST,
            clock=lambda: float(next(seconds)),
        )  # fmt: skip
        request: Any = PromptOnly(core)
        turns = []
        while not len(request.logits):
            turns.append(prefiller.step(request))
            assert request.error is None
            if len(turns) % 4 == 1:
                between = core.model.run([StepRow(7, other)], Plane.BASE)
                assert torch.equal(between, alone)
        n = core.prefiller._model.n_layers
        assert turns == [*[0] * (n - 1), 8, *[0] * (n - 1), len(IDS) - 8]
        assert request.kv.length == len(IDS)
        assert torch.equal(request.logits, want)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("pack", ["plain_rope"], indirect=True)
def test_prefiller__balanced_and_unsure__last_token_and_its_kv_at_fp4(roomy: Roomy) -> None:
    core = roomy.core
    other = core.kv.reserve(len(IDS) + 1)
    assert other is not None
    read(core, IDS, other, core.prefiller._fast)
    as_read = core.model.run([StepRow(7, other)], Plane.BASE).clone()
    other.length -= 1
    want = core.model.run([StepRow(IDS[-1], other)], Plane.FINE)[0].clone()
    other.length += 1
    behind = core.model.run([StepRow(7, other)], Plane.BASE).clone()
    assert not torch.equal(behind, as_read)  # the KV really is another one

    request: Any = PromptOnly(core)
    request.tau = 1.0
    while not len(request.logits):
        core.prefiller.step(request)
        assert request.error is None
    assert torch.equal(request.logits, want)
    assert (request.kv.length, request.rerun_tokens) == (len(IDS), 1)
    assert torch.equal(core.model.run([StepRow(7, request.kv)], Plane.BASE), behind)


def test_cut_batches__any_counts__every_expert_once_and_within_the_limits() -> None:
    counts = [0, 5, 0, 7, 3, 3, 9, 0, 1]
    assert cut_batches(counts, experts=2, pairs=9) == [
        range(3), range(3, 4), range(4, 6), range(6, 8), range(8, 9),
    ]  # fmt: skip
    assert cut_batches(counts, experts=9, pairs=100) == [range(9)]
    assert cut_batches([0, 0], experts=2, pairs=9) == []
