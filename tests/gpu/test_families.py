"""Tiny random models of families on a GPU: near the CPU engine, and the same bits whatever runs
beside and whatever is where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine import model_shape
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.handle import EngineOptions
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.test_longcat import save_longcat_head
from tests.engine.test_mtp_parity import packed_with_head
from tests.engine.test_v4_head import with_head
from tests.engine.tiny_models import (
    CONFIGS,
    DELTA_CONFIGS,
    GQA_CONFIGS,
    random_model,
    save_source,
)
from tests.engine.tiny_v4 import ON_CARD, random_v4, save_v4
from tests.gpu.test_engine import forced, read_anew
from tests.kernels.triton.test_chunk import read
from tests.kernels.triton.test_head import answered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TINY = {**GQA_CONFIGS, "longcat": {**CONFIGS["longcat"], "kv_lora_rank": 32}}
IDS = torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(2)).tolist()
ALL = {**CONFIGS, **DELTA_CONFIGS, **TINY}
V4 = "deepseek_v4"
NEAR = 2e-3
"""Of the FP4 experts' logits, over their spread; a wrong part of attention gives 0.1 or more."""


@dataclass(frozen=True)
class Case:
    core: CudaCore
    want: Tensor  # [T, V], of the CPU engine, FP4 experts


def on_gpu(pack: Path, **given: object) -> CudaCore:
    options = EngineOptions(save_heat=False, max_running=4, **{"context": 64, **given})  # type: ignore[arg-type]
    return load_cuda(pack, options, device=torch.device("cuda"), widths=(1, 3))


@pytest.fixture(
    scope="module",
    params=[
        *((name, form) for name in (*TINY, V4) for form in ("f32", "bf16", "fp8", "nvfp4")),
        *((name, form) for name in DELTA_CONFIGS for form in ("f32", "bf16")),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    name, form = request.param
    folder = tmp_path_factory.mktemp("family")
    pack = packed(name, folder)
    with loaded(pack, kv_format=form) as cpu:
        want = logits_of(cpu, IDS, plane=Plane.FINE, sizes=[1] * len(IDS))
    core = on_gpu(pack, kv_format=form, prefill_chunk=16)
    yield Case(core, want)
    core.close()


def packed(name: str, folder: Path) -> Path:
    if name == V4:
        save_v4(random_v4(ON_CARD, 0.25), ON_CARD, folder / "source")
    else:
        save_source(random_model(ALL[name], 0.25), folder / "source")
    return pack_source(folder / "source", folder / "pack")


def off(got: Tensor, want: Tensor) -> float:
    """By the median: where two experts score nearly the same, one token may choose another one."""
    return float((got - want).abs().median() / want.std())


@pytest.mark.parametrize("rows", [1, 3])
def test_step__teacher_forced__near_the_cpu_engine(case: Case, rows: int) -> None:
    got = forced(case.core, IDS, Plane.FINE, rows=rows)
    assert off(got, case.want) < NEAR * (1 if case.core.kv.form.value in ("f32", "bf16") else 10)


def test_step__any_number_of_rows__same_bits(case: Case) -> None:
    for plane in Plane:
        want = forced(case.core, IDS, plane, rows=1)
        most = case.core.model.most_rows  # and a look-up's pairs must fit the slots
        slots = min(case.core.plan.base_slots, case.core.plan.fine_slots)
        most = min(most, slots // case.core.spec.moe_ffn.router.top_k)
        for rows in {2, 3, min(8, most)}:
            assert torch.equal(forced(case.core, IDS, plane, rows=rows), want), (plane, rows)


def test_chunks__prompts__near_the_cpu_engine(case: Case) -> None:
    ends = (1, 7, 16, 31, 40)
    got = torch.stack([read_anew(case.core, IDS[:n], Plane.FINE) for n in ends])
    want = case.want[[n - 1 for n in ends]]
    assert off(got, want) < NEAR * (2 if case.core.kv.form.value in ("f32", "bf16") else 20)


def test_answers__glm_with_its_head__equal_those_without(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pack = packed_with_head(0.25, tmp_path_factory.mktemp("head"), "glm")[2]
    core = on_gpu(pack, kv_format="bf16")
    want = {plane: answered(core, plane).out_ids for plane in Plane}
    core.close()
    core = on_gpu(pack, kv_format="bf16", drafts="mtp", draft_depth=2)
    assert {plane: answered(core, plane).out_ids for plane in Plane} == want
    core.close()


def test_answers__longcat_with_its_dense_head__equal_those_without(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("longcat_head")
    save_source(random_model(TINY["longcat"], 0.25), folder / "source")
    save_longcat_head(folder / "source")
    pack = pack_source(folder / "source", folder / "pack")
    core = on_gpu(pack, kv_format="bf16")
    want = {plane: answered(core, plane).out_ids for plane in Plane}
    core.close()
    core = on_gpu(pack, kv_format="bf16", drafts="mtp", draft_depth=2)
    assert {plane: answered(core, plane).out_ids for plane in Plane} == want
    assert core.decoder.drafting.acceptance.counters().guessed[0] > 0
    core.close()


@pytest.mark.parametrize("name", ["longcat", V4])
def test_tiers_and_branches__of_both__same_bits(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pack, found = packed(name, tmp_path_factory.mktemp("tiers")), []
    for tiers in ({}, {"pool_slots": 24, "fine_slots": 24, "arena_rows": 1}):
        core = on_gpu(pack, kv_format="bf16", prefill_chunk=16, **tiers)
        steps = [forced(core, IDS, plane, rows=rows) for plane in Plane for rows in (1, 3)]
        prompts = [read_anew(core, IDS, plane)[None] for plane in Plane]
        found.append(torch.cat([*steps, *prompts]))
        core.close()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["glm_dsa", "longcat", "glm"])
def test_dense_weights__rounded__near_the_cpu_engine(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rounded")
    save_source(random_model(ALL[name], 0.25), folder / "source")
    pack = pack_source(folder / "source", folder / "pack")
    with loaded(pack, kv_format="bf16", dense_format="int8") as cpu:
        want = logits_of(cpu, IDS, plane=Plane.FINE, sizes=[1] * len(IDS))
    core = on_gpu(pack, kv_format="bf16", prefill_chunk=16, dense_format="int8")
    steps = forced(core, IDS, Plane.FINE, rows=1)
    assert off(steps, want) < NEAR
    assert torch.equal(forced(core, IDS, Plane.FINE, rows=3), steps)
    assert off(read_anew(core, IDS, Plane.FINE), want[-1]) < 2 * NEAR
    core.close()


def test_rings__gpt_oss_far_around_them__same_bits_as_keeping_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(random_model(GQA_CONFIGS["gpt_oss"], 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = torch.randint(3, 256, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    found = []
    for rings in (True, False):
        if not rings:
            monkeypatch.setattr(model_shape, "ring_layers", lambda spec: ())
        core = on_gpu(pack, kv_format="nvfp4", prefill_chunk=16, context=320)
        assert core.plan.ring_pages == (2 if rings else 0)  # 128 tokens
        assert core.kv.has_rings == rings
        prompt = read_anew(core, ids, Plane.BASE)[None]
        found.append(torch.cat([prompt, forced(core, ids, Plane.BASE, rows=3)]))
        core.close()
    assert torch.equal(*found)


def test_answers__v4_with_its_head__equal_those_without(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pack = with_head(0.25, tmp_path_factory.mktemp("v4_head"), ON_CARD)[2]
    core = on_gpu(pack)
    want = {plane: answered(core, plane).out_ids for plane in Plane}
    core.close()
    core = on_gpu(pack, drafts="mtp", draft_depth=2)
    assert {plane: answered(core, plane).out_ids for plane in Plane} == want
    assert core.decoder.drafting.acceptance.counters().guessed[0] > 0
    core.close()


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_v4__far_around_its_rings__near_the_cpu_engine_and_the_same_bits(
    form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rings of 144 entries go round, most windows are not chosen, sums are kept 16 at a time."""
    pack = packed(V4, tmp_path_factory.mktemp("v4"))
    ids = torch.randint(3, 256, (700,), generator=torch.Generator().manual_seed(4)).tolist()
    with loaded(pack, kv_format=form) as cpu:
        want = logits_of(cpu, ids, plane=Plane.FINE, sizes=[1] * len(ids))
    core = on_gpu(pack, kv_format=form, prefill_chunk=256, context=1024)
    near = NEAR * (1 if form == "bf16" else 10)
    alone = forced(core, ids, Plane.FINE, rows=1)
    assert off(alone[-300:], want[-300:]) < near
    assert torch.equal(forced(core, ids, Plane.FINE, rows=3), alone)
    ends = (257, 400, 512, 699, 700)
    got = torch.stack([read_anew(core, ids[:n], Plane.FINE) for n in ends])
    assert off(got, want[[n - 1 for n in ends]]) < 2 * near
    sequence = core.kv.reserve(len(ids))
    assert sequence is not None
    read(core, ids[:600], sequence, Reading.EXACT)
    sequence.length -= 1  # as a balanced answer does
    steps = []
    for token in ids[599:]:
        steps.append(core.model.run([StepRow(token, sequence)], Plane.FINE)[0].clone())
        sequence.length += 1
    assert off(torch.stack(steps), want[599:]) < 2 * near
    core.close()
