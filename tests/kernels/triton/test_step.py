"""The whole decode step on a device's launches, interpreted, against the CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.promotion import Promotion
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import CONFIGS, random_model, save_source

IDS = [5, 9, 33]
OPTIONS: dict[str, Any] = {"kv_format": "f32", "context": 64, "ram_bytes": 10**9}


@pytest.mark.slow
@pytest.mark.parametrize("plane", list(Plane), ids=lambda plane: plane.name)
@pytest.mark.parametrize("config", ["v3_groups_yarn", "plain_rope"])
def test_step__tiny_model__equals_the_cpu_engine(config: str, plane: Plane, tmp_path: Path) -> None:
    save_source(random_model(CONFIGS[config], 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    options = EngineOptions(save_heat=False, max_running=4, vram_bytes=10**9, **OPTIONS)
    core = load_cuda(pack, options, device=torch.device("cpu"))
    with loaded(pack, **OPTIONS) as cpu:
        want = logits_of(cpu, IDS, plane=plane, sizes=[1] * len(IDS))
    sequence, other = core.kv.reserve(8), core.kv.reserve(8)
    assert sequence is not None
    assert other is not None
    rows = [StepRow(token, sequence, i) for i, token in enumerate(IDS)]
    together = core.model.run(rows, plane).clone()
    # an activation that rounds the other way is worth about 0.4 % here, one of 15 bits 0.02 %
    near = 2e-2 if plane is Plane.BASE else 1e-3
    assert (together - want).abs().max() < near * want.std()
    alone = core.model.run([StepRow(IDS[0], other)], plane)
    assert torch.equal(alone[0], together[0])
    assert core.residency.counters(step_s=0.0).lookups == 4 * 4 * 2
    core.close()


@pytest.mark.slow
def test_step__experts_promoted_between_steps__same_bits(tmp_path: Path) -> None:
    save_source(random_model(CONFIGS["plain_rope"], 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    options = EngineOptions(save_heat=False, max_running=4, vram_bytes=10**9, **OPTIONS)
    logits, hits = [], []
    for promoted in (False, True):
        core = load_cuda(pack, options, device=torch.device("cpu"))
        if promoted:
            core.residency.promote([Promotion(row) for row in range(core.residency.sizes().rows)])
        sequence = core.kv.reserve(8)
        assert sequence is not None
        logits.append(core.model.run([StepRow(IDS[0], sequence, 0)], Plane.FINE).clone())
        hits.append(core.residency.counters(step_s=0.0).hits_fine)
        core.close()
    assert torch.equal(*logits)
    assert hits[0] == 0
    assert hits[1] > 0


@pytest.mark.slow
def test_step__rows_brought_ahead_for_the_next_layer__same_bits(tmp_path: Path) -> None:
    config = {**CONFIGS["v3_groups_yarn"], "num_hidden_layers": 4}
    save_source(random_model(config, 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    logits: dict[bool, list[torch.Tensor]] = {}
    for lookahead in (False, True):
        options = EngineOptions(
            save_heat=False, max_running=4, vram_bytes=10**9, pool_slots=32, lookahead=lookahead,
            **OPTIONS,
        )  # fmt: skip
        core = load_cuda(pack, options, device=torch.device("cpu"))
        sequence = core.kv.reserve(8)
        assert sequence is not None
        found = logits[lookahead] = []
        for token in IDS[:2]:
            found.append(core.model.run([StepRow(token, sequence)], Plane.BASE).clone())
            sequence.length += 1
        brought, needed = core.pools[Plane.BASE].tables.ahead.sum(0).tolist()
        assert (brought > 0) == lookahead
        counters = core.residency.counters(step_s=0.0)
        assert counters.hits_base <= counters.lookups - needed
        core.close()
    assert all(torch.equal(a, b) for a, b in zip(*logits.values(), strict=True))
