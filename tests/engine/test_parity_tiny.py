"""Tiny random models against transformers: full, chunked, token by token, rewound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine.families import plan_for
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.engine.conftest import TinyPack
from tests.engine.oracle import allowed, loaded, logits_of
from tests.engine.tiny_models import IDS, LENGTH, MODELS


@pytest.fixture(scope="module", params=[0.02, 0.25], ids=["cold", "hot"])
def init(request: pytest.FixtureRequest) -> float:
    return float(request.param)


SLOW = {"gpt_oss_clamped"}  # test_family_maths.py compares it too
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]


@pytest.fixture(scope="module", params=NAMES)
def case(
    request: pytest.FixtureRequest, init: float, tiny_pack: TinyPack
) -> tuple[Path, list[int], Tensor]:
    """A packed model, token ids, and transformers' logits for them."""
    pack, want = tiny_pack(request.param, init)
    return pack, IDS.tolist(), want


SPLITS = {
    "full": [LENGTH],
    "odd chunks": [7, 13, 1, 11, 8],
    "prefill then decode": [33] + [1] * 7,
    "token by token": [1] * LENGTH,
}


@pytest.mark.parametrize("split", list(SPLITS))
def test_logits__float_path__equal_transformers(
    case: tuple[Path, list[int], Tensor], split: str
) -> None:
    pack, ids, want = case
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids, plane=Plane.FINE, sizes=SPLITS[split])
    assert (got - want).abs().max() < allowed(core, want)


def test_rewind__after_undone_tokens__logits_as_if_they_never_were(
    case: tuple[Path, list[int], Tensor],
) -> None:
    pack, ids, want = case
    with loaded(pack, activations="float", kv_format="f32") as core, torch.inference_mode():
        sequence = core.kv.reserve(LENGTH + 8)
        assert sequence is not None
        experts = core.prefiller._experts[Plane.FINE]
        core.model.forward(torch.tensor(ids[:20]), core.kv, sequence, experts)
        core.model.forward(torch.tensor([9, 8, 7, 6, 5]), core.kv, sequence, experts)
        core.kv.rewind(sequence, 20)
        hidden = core.model.forward(torch.tensor(ids[20:]), core.kv, sequence, experts)
        got = core.model.logits(hidden)
    assert (got - want[20:]).abs().max() < allowed(core, want)


def test_logits__two_bit_plane__differ_from_fp4(case: tuple[Path, list[int], Tensor]) -> None:
    """The planes are really two: otherwise the comparison above could pass for the wrong one."""
    pack, ids, want = case
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids, plane=Plane.BASE)
    assert (got - want).abs().max() > 1e-2 * want.std()


def test_plan__names_of_saved_model__all_known(case: tuple[Path, list[int], Tensor]) -> None:
    pack, _, _ = case
    config = json.loads((pack / "config.json").read_text())
    plan = plan_for(config, path="config.json", names=[])
    reader = PackReader.open(pack)
    assert list(plan.moe_layers) == reader.meta.moe_layers
    assert plan.n_rows == reader.meta.n_rows
    assert set(plan.dense) == set(reader.dense.names())
    reader.close()
