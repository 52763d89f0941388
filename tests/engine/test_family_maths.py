"""What each family computes: a wrong spec is noticed, 2-bit experts, and KV formats."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine.spec import Gqa, Mla, QkNorm, Spec
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.reference import (
    ExpertBias,
    combine,
    expand_base,
    expert_mlp,
    quantize_activations,
)
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.engine.conftest import TinyPack
from tests.engine.family_mutations import CODE, MUTATIONS, attention, fitted
from tests.engine.oracle import allowed, loaded, logits_of, logits_with, plus_one
from tests.engine.tiny_models import IDS, MODELS


@pytest.fixture(scope="module", params=list(MODELS))
def case(
    request: pytest.FixtureRequest, tiny_pack: TinyPack
) -> tuple[str, Path, list[int], Tensor]:
    """A name, its packed model with large weights, token ids, and transformers' logits."""
    pack, want = tiny_pack(request.param, 0.25)
    return request.param, pack, IDS.tolist(), want


# -- mutations -----------------------------------------------------------------------------------


def test_mutated_spec__any_part__parity_is_lost(
    case: tuple[str, Path, list[int], Tensor],
) -> None:
    name, pack, ids, want = case
    unnoticed = []
    with loaded(pack, activations="float", kv_format="f32") as core:
        near = allowed(core, want)
        assert (logits_with(core, core.spec, ids) - want).abs().max() < near
        for what, mutate in MUTATIONS[name].items():
            mutant = mutate(core.spec)
            assert mutant != core.spec
            off = logits_with(core, mutant, ids, change=partial(fitted, mutant)) - want
            if not off.abs().max() > 10 * near:
                unnoticed.append(what)
        if not (logits_with(core, core.spec, ids, change=plus_one) - want).abs().max() > near:
            unnoticed.append("norms with 1 + w")
    assert unnoticed == []


def test_mutated_block__any_part__parity_is_lost(
    case: tuple[str, Path, list[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pack, ids, want = case
    unnoticed = []
    with loaded(pack, activations="float", kv_format="f32") as core:
        concerned = {what: wrong for what, wrong in CODE.items() if wrong.concerns(core.spec)}
        for what, wrong in concerned.items():
            with monkeypatch.context() as patch:
                for owner, name, instead in wrong.patches:
                    patch.setattr(owner, name, instead)
                off = (logits_with(core, core.spec, ids) - want).abs().max()
            if not off > 10 * allowed(core, want):
                unnoticed.append(what)
    assert unnoticed == []


EPSILON_NAMES = (
    "plain_rope", "glm", "qwen3", "olmoe", "mixtral", "minimax", "gpt_oss", "qwen3_next", "qwen3_5",
    "glm_lite", "v32", "glm_dsa", "longcat",
)  # fmt: skip
"""A model of each family."""


@pytest.mark.parametrize("name", EPSILON_NAMES)
def test_mutated_epsilon__small_weights__parity_is_lost(name: str, tiny_pack: TinyPack) -> None:
    """Only small weights show it: activations are near to epsilon there."""
    pack, want = tiny_pack(name, 0.02)
    ids = IDS.tolist()
    with loaded(pack, activations="float", kv_format="f32") as core:
        near = 1e-4 * want.std()
        assert (logits_with(core, core.spec, ids) - want).abs().max() < near
        mutants = [replace(core.spec, norm_eps=2 * core.spec.norm_eps)]
        mixer = core.spec.attention
        if isinstance(mixer, Mla):
            mutants.append(attention(latent_eps=lambda eps: 10 * eps)(core.spec))
        elif isinstance(mixer, Gqa) and mixer.qk_norm is not QkNorm.NONE:
            mutants.append(attention(norm_eps=lambda eps: 10 * eps)(core.spec))
        for mutant in mutants:
            assert (logits_with(core, mutant, ids) - want).abs().max() > near


# -- 2-bit experts and KV formats ----------------------------------------------------------------


class Twin:
    """2-bit experts straight from the pack's rows, one expert and one token after the other."""

    def __init__(self, reader: PackReader, spec: Spec) -> None:
        self._reader, self._ffn = reader, spec.moe_ffn

    def _bias(self, layer: int, expert: int) -> ExpertBias | None:
        if not self._ffn.expert_bias:
            return None
        name = f"model.layers.{layer}.mlp.experts."
        gate_up = self._reader.dense_tensor(name + "gate_up_proj_bias")[expert]
        down = self._reader.dense_tensor(name + "down_proj_bias")[expert]
        return ExpertBias(torch.cat([gate_up[0::2], gate_up[1::2]])[None], down[None])

    def __call__(self, moe_layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        layout, meta = self._reader.layout, self._reader.meta
        tokens = []
        for row, chosen in zip(x, ids.tolist(), strict=True):
            codes, scales = quantize_activations(row[None], Activations.INT8)
            parts = []
            for expert in chosen:
                assert expert < meta.n_experts
                base = bytearray(meta.base_stride)
                at = moe_layer * meta.n_experts + expert
                self._reader.read_row(Plane.BASE, at, memoryview(base))
                slot = torch.empty(layout.slot_floats)
                expand_base(torch.frombuffer(base, dtype=torch.uint8), layout, slot)
                bias = self._bias(meta.moe_layers[moe_layer], expert)
                out = expert_mlp(
                    codes, scales, slot, layout, glu=self._ffn.glu, bias=bias, kind=Activations.INT8
                )
                parts.append(out)
            tokens.append(torch.cat(parts))
        return combine(torch.stack(tokens), weights)


def test_two_bit_path__token_by_token__equals_the_twin_bit_for_bit(
    case: tuple[str, Path, list[int], Tensor],
) -> None:
    _, pack, ids, _ = case
    ids = ids[:12]
    with loaded(pack, kv_format="bf16") as core:
        got = logits_of(core, ids, plane=Plane.BASE, sizes=[1] * len(ids))
        sequence = core.kv.reserve(len(ids))
        assert sequence is not None
        twin, want = Twin(core.reader, core.spec), []
        with torch.inference_mode():
            for token in ids:
                hidden = core.model.forward(torch.tensor([token]), core.kv, sequence, twin)
                want.append(core.model.logits(hidden))
    assert torch.equal(got, torch.cat(want))


def test_kv_formats__chunk_then_decode__the_wider_the_nearer(
    case: tuple[str, Path, list[int], Tensor],
) -> None:
    _, pack, ids, want = case
    off = []
    for form in ("bf16", "fp8", "nvfp4"):
        with loaded(pack, activations="float", kv_format=form) as core:
            got = logits_of(core, ids[:20], plane=Plane.FINE, sizes=[15] + [1] * 5)
        # the median: a router's near tie may turn out the other way, which moves that token a lot
        off.append(float((got - want[:20]).abs().median() / want.std()))
    assert 1e-4 < 2 * off[0] < off[1] < off[2] < 1.0
    assert off[0] < 0.02
