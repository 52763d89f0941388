"""DeepSeek-V4 against transformers: whole, in odd chunks, step by step, rewound; wrong parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine import serving
from moet_desk.engine.blocks import pooled as pooled_block
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.loader import Core
from moet_desk.engine.model_shape import state_bytes
from moet_desk.engine.planned_model import from_pack
from moet_desk.engine.planning import ModelPlan, Refusal, plan_model
from moet_desk.engine.residency import Residency
from moet_desk.engine.spec import MoeFfn, Pool, PooledAttention, PoolIndexer, Spec
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat, Score
from moet_desk.kernels.reference import Connections
from moet_desk.machine import from_json
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import pack_source
from tests.engine.oracle import allowed, loaded, logits_of, logits_with, plus_one
from tests.engine.tiny_v4 import CONFIG, random_v4, save_v4, use_packed_v4

LENGTH = 52  # more than a window, three heavy windows, thrice what the indexer may choose
DESK = Path(__file__).resolve().parents[1] / "data" / "machines" / "5090-96gb.json"
FLOAT = {"activations": "float", "kv_format": "f32"}
SMALL = {**CONFIG, "num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 16]}

Case = tuple[Path, list[int], Tensor]


def packed(config: dict[str, Any], init: float, folder: Path, length: int = LENGTH) -> Case:
    """A pack, token ids, and transformers' logits for them."""
    model = random_v4(config, init)
    save_v4(model, config, folder / "source")
    pack = pack_source(folder / "source", folder / "pack")
    ids = torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        use_packed_v4(model, pack)
        return pack, ids.tolist(), model(ids[None]).logits[0]


@pytest.fixture(scope="module", params=[0.02, 0.25], ids=["cold", "hot"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return packed(CONFIG, request.param, tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return packed(SMALL, 0.25, tmp_path_factory.mktemp("v4"), 40)


SPLITS = {
    "full": [LENGTH],
    "odd chunks": [7, 13, 1, 11, 20],
    "prefill then decode": [33] + [1] * 7 + [3, 9],
}


@pytest.mark.parametrize("split", list(SPLITS))
def test_logits__float_path__equal_transformers(case: Case, split: str) -> None:
    pack, ids, want = case
    with loaded(pack, **FLOAT) as core:
        got = logits_of(core, ids, plane=Plane.FINE, sizes=SPLITS[split])
    assert (got - want).abs().max() < allowed(core, want)


@pytest.mark.slow
def test_logits__token_by_token_with_excursions__as_if_they_never_were(case: Case) -> None:
    """Seven tokens are read and undone at three places: a window, both pools and rings close."""
    pack, ids, want = case
    found, odd = [], torch.tensor([9, 8, 7, 6, 5, 4, 3])
    with loaded(pack, **FLOAT) as core, torch.inference_mode():
        sequence = core.kv.reserve(LENGTH + 8)
        assert sequence is not None
        experts = core.decoder._experts[Plane.FINE], core.prefiller._experts[Plane.FINE]
        for token in ids:
            if sequence.length in (1, 9, 30, 45):
                core.model.forward(odd, core.kv, sequence, experts[1])
                core.kv.rewind(sequence, sequence.length - len(odd))
            hidden = core.model.forward(torch.tensor([token]), core.kv, sequence, experts[0])
            found.append(core.model.logits(hidden))
    assert (torch.cat(found) - want).abs().max() < allowed(core, want)


def test_rewind__one_token_at_every_place__same_bits(small: Case) -> None:
    """As a balanced answer does: the newest token is read twice."""
    pack, ids, _ = small
    ids = ids[:36]
    found = []
    with loaded(pack) as core, torch.inference_mode():
        want = logits_of(core, ids, plane=Plane.BASE, sizes=[13] + [1] * 23)
        sequence = core.kv.reserve(64)
        assert sequence is not None
        experts = core.decoder._experts[Plane.BASE], core.prefiller._experts[Plane.BASE]
        for place, size in [(0, 13), *((i, 1) for i in range(13, 36))]:
            part = torch.tensor(ids[place : place + size])
            hidden = core.model.forward(part, core.kv, sequence, experts[size > 1])
            core.kv.rewind(sequence, place + size - 1)
            again = core.model.forward(part[-1:], core.kv, sequence, experts[0])
            found.append(core.model.logits(torch.cat([hidden[:-1], again])))
    assert torch.equal(torch.cat(found)[13:], want[13:])


@pytest.mark.slow
def test_long_context__4000_tokens__equal_transformers(tmp_path: Path) -> None:
    """Windows and pools of the released sizes: 1000 entries of which 512 are chosen, 31 heavy
    windows.
    """
    config = {
        **SMALL, "sliding_window": 128, "index_topk": 512, "compress_ratios": [0, 4, 128],
        "hc_sinkhorn_iters": 4, "index_n_heads": 64,
    }  # fmt: skip
    pack, ids, want = packed(config, 0.25, tmp_path, 4000)
    with loaded(pack, **FLOAT) as core:
        got = logits_of(core, ids, plane=Plane.FINE, sizes=[1777, 1, 2001, 201] + [1] * 20)
    assert (got - want).abs().max() < 1e-4 * want.std()


# -- wrong parts are noticed ---------------------------------------------------------------------


Mutation = Callable[[Spec], Spec]


def attention(change: Callable[[PooledAttention], PooledAttention]) -> Mutation:
    return lambda spec: replace(
        spec, layers=tuple(replace(layer, mixer=change(layer.mixer)) for layer in spec.layers)
    )


def indexer(change: Callable[[PoolIndexer], PoolIndexer]) -> Mutation:
    def changed(pool: Pool | None) -> Pool | None:
        if pool is None or pool.indexer is None:
            return pool
        return replace(pool, indexer=change(pool.indexer))

    return attention(lambda mixer: replace(mixer, pool=changed(mixer.pool)))


def rope(**changes: Any) -> Mutation:
    return attention(lambda mixer: replace(mixer, rope=replace(mixer.rope, **changes)))


def experts(**changes: Any) -> Mutation:
    return lambda spec: replace(
        spec,
        layers=tuple(replace(layer, ffn=replace(layer.ffn, **changes)) for layer in spec.layers),
    )


def router(**changes: Any) -> Mutation:
    return lambda spec: experts(router=replace(spec.layers[-1].ffn.router, **changes))(spec)


MUTATIONS: dict[str, Mutation] = {
    "a wider window": attention(lambda mixer: replace(mixer, window=mixer.window + 1)),
    "a narrower window": attention(lambda mixer: replace(mixer, window=mixer.window - 1)),
    "softmax scale": attention(lambda mixer: replace(mixer, softmax_scale=0.18)),
    "rope on halves": rope(interleaved=False),
    "no yarn": rope(yarn=None),
    "one base": rope(base=10000.0),
    "rope on fewer numbers": rope(dim=14),
    "one more chosen": indexer(lambda old: replace(old, top_k=5)),
    "one fewer chosen": indexer(lambda old: replace(old, top_k=3)),
    "fewer Sinkhorn steps": lambda spec: replace(
        spec, streams=replace(spec.streams, sinkhorn_steps=1)
    ),
    "no table": experts(hashed=False),
    "no selection bias": router(selection_bias=False),
    "another score": router(score=Score.SIGMOID, selection_bias=True),
    "not renormalised": router(renormalize=False, selection_bias=True),
    "another scale": router(scale=1.51, selection_bias=True),
    "no shared expert": experts(shared_inter=0),
    "one expert fewer where no table says": lambda spec: _with_last_router(spec, top_k=1),
}  # fmt: skip

EPSILONS: dict[str, Mutation] = {
    "of norms": lambda spec: replace(spec, norm_eps=2 * spec.norm_eps),
    "of attention": attention(lambda mixer: replace(mixer, norm_eps=10 * mixer.norm_eps)),
    "of streams": lambda spec: replace(
        spec, streams=replace(spec.streams, eps=1000 * spec.streams.eps)
    ),
}
"""Shown by small weights alone: activations are near to epsilon there."""


def _with_last_router(spec: Spec, **changes: Any) -> Spec:
    *others, last = spec.layers
    ffn = last.ffn
    assert isinstance(ffn, MoeFfn)
    changed = replace(last, ffn=replace(ffn, router=replace(ffn.router, **changes)))
    return replace(spec, layers=(*others, changed))


def _no_bias_where_hashed(spec: Spec) -> Spec:
    """The table's layers have no bias in the files."""
    layers = tuple(
        replace(
            layer,
            ffn=replace(layer.ffn, router=replace(layer.ffn.router, selection_bias=False)),
        )
        if i == 0
        else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def test_mutated_spec__any_part__parity_is_lost(small: Case) -> None:
    pack, ids, want = small
    unnoticed = []
    with loaded(pack, **FLOAT) as core:
        near = allowed(core, want)
        assert (logits_with(core, core.spec, ids) - want).abs().max() < near
        for what, mutate in MUTATIONS.items():
            mutant = _no_bias_where_hashed(mutate(core.spec))
            assert mutant != core.spec
            if not (logits_with(core, mutant, ids) - want).abs().max() > 10 * near:
                unnoticed.append(what)
        if not (logits_with(core, core.spec, ids, change=plus_one) - want).abs().max() > near:
            unnoticed.append("norms with 1 + w")
    assert unnoticed == []


def test_mutated_epsilon__small_weights__parity_is_lost(tmp_path: Path) -> None:
    pack, ids, want = packed(SMALL, 0.02, tmp_path, 20)
    with loaded(pack, **FLOAT) as core:
        near = allowed(core, want)
        assert (logits_with(core, core.spec, ids) - want).abs().max() < near
        off = {
            what: float((logits_with(core, mutate(core.spec), ids) - want).abs().max())
            for what, mutate in EPSILONS.items()
        }
    assert all(difference > near for difference in off.values()), (near, off)


def _not_transposed(self: Connections, streams: Tensor, output: Tensor) -> Tensor:
    return self.write[..., None] * output[:, None] + self.mix @ streams


TURN = pooled_block._Turn.__call__
CODE: dict[str, tuple[Any, str, Any]] = {
    "mix not transposed": (Connections, "after", _not_transposed),
    "output not turned back": (
        pooled_block._Turn, "__call__",
        lambda self, x, positions, back=False: x if back else TURN(self, x, positions),
    ),
    "no norm of queries": (pooled_block, "unit", lambda heads, eps: heads),
    "first half of the own window": (
        pooled_block._Compressor, "read",
        lambda self, joined, start, window, read=pooled_block._Compressor.read: read(
            self, joined.roll(joined.shape[1] // 4, 1), start, window
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CODE))
def test_mutated_block__any_part__parity_is_lost(
    small: Case, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, ids, want = small
    owner, name, wrong = CODE[what]
    monkeypatch.setattr(owner, name, wrong)
    with loaded(pack, **FLOAT) as core:
        got = logits_of(core, ids, plane=Plane.FINE)
    assert (got - want).abs().max() > 10 * allowed(core, want)


def test_limit__reached__equals_transformers_and_is_noticed(tmp_path: Path) -> None:
    pack, ids, want = packed({**SMALL, "swiglu_limit": 0.3}, 0.25, tmp_path, 20)
    with loaded(pack, **FLOAT) as core:
        near = allowed(core, want)
        assert (logits_with(core, core.spec, ids) - want).abs().max() < near
        for limit in (None, 0.31):
            glu = replace(core.spec.moe_ffn.glu, limit=limit)
            other = logits_with(core, experts(glu=glu)(core.spec), ids)
            assert (other - want).abs().max() > 10 * near


# -- experts of a table --------------------------------------------------------------------------


def test_table__decode__its_experts_are_looked_up(
    small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, ids, _ = small
    seen: list[tuple[int, list[int]]] = []
    slots = Residency.slots

    def note(self: Residency, plane: Plane, layer: int, chosen: list[int]) -> Any:
        seen.append((layer, list(chosen)))
        return slots(self, plane, layer, chosen)

    monkeypatch.setattr(Residency, "slots", note)
    with loaded(pack) as core:
        table = core.reader.dense_tensor("model.layers.0.ffn.gate.tid2eid")
        logits_of(core, ids[:9], plane=Plane.BASE, sizes=[1] * 9)
    assert [chosen for layer, chosen in seen if layer == 0] == table[ids[:9]].tolist()


def test_table__rows_on_disk__begun_before_any_layer_runs(
    small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, ids, _ = small
    order: list[tuple[str, int]] = []
    expect, read = PackReader.expect, PackReader.read_row

    def note_expected(self: PackReader, plane: Plane, row: int) -> None:
        order.append(("expected", row))
        expect(self, plane, row)

    def note_read(self: PackReader, plane: Plane, row: int, out: Any, **more: Any) -> None:
        order.append(("read", row))
        read(self, plane, row, out, **more)

    with loaded(pack, pool_slots=2, fine_slots=2, arena_rows=0) as core:
        monkeypatch.setattr(PackReader, "expect", note_expected)
        monkeypatch.setattr(PackReader, "read_row", note_read)
        table = core.reader.dense_tensor("model.layers.0.ffn.gate.tid2eid")
        logits_of(core, ids[:1], plane=Plane.BASE, sizes=[1])
    begun = [row for what, row in order if what == "expected"]
    fetched = [row for what, row in order if what == "read" and row < 8]
    assert sorted(begun) == sorted(fetched)
    assert set(begun) <= set(table[ids[0]].tolist())
    assert begun
    assert order[: len(begun)] == [("expected", row) for row in begun]


def test_table__an_expert_that_is_none__refused(small: Case, tmp_path: Path) -> None:
    config = {**SMALL, "compress_ratios": [0, 0, 0], "num_hash_layers": 2}
    model = random_v4(config, 0.02)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.tid2eid[7, 1] = 8
    save_v4(model, config, tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    with pytest.raises(MoetError) as caught, loaded(pack):
        pass
    assert caught.value.code == "MD-SRC-07"
    assert "model.layers.1.ffn.gate.tid2eid" in str(caught.value)


def test_kv_formats__chunk_then_decode__the_wider_the_nearer(small: Case) -> None:
    pack, ids, want = small
    off = []
    for form in ("bf16", "fp8", "nvfp4"):
        with loaded(pack, activations="float", kv_format=form) as core:
            got = logits_of(core, ids[:20], plane=Plane.FINE, sizes=[15] + [1] * 5)
        off.append(float((got - want[:20]).abs().median() / want.std()))
    assert 1e-4 < 2 * off[0] < off[1] < off[2] < 1.0


# -- on a graphics card --------------------------------------------------------------------------


def test_card__heads_without_kernels__the_cpu_computes_and_the_plan_says_why(
    small: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack, _, _ = small
    model, desk = from_pack(pack), from_json(DESK.read_bytes())
    plan = plan_model(desk, model, EngineOptions(device="auto"))
    assert isinstance(plan, ModelPlan)
    assert plan.device == "cpu"
    assert (
        "for pooled attention with heads of 48, 16 of which rotate a card has no kernels"
        in plan.why
    )
    assert plan.shape.state_bytes == state_bytes(model.spec, plan.kv_format)
    assert plan.kv_format is KvFormat.FP8
    refused = plan_model(desk, model, EngineOptions(device="cuda"))
    assert isinstance(refused, Refusal)
    assert refused.error.code == "MD-GPU-10"
    assert refused.changes == ("--device cpu",)
    caplog.set_level("INFO")
    core = serving._load(pack, EngineOptions(device="auto", save_heat=False), lambda steps: None)
    core.close()
    assert isinstance(core, Core)
    assert "for which a card has no kernels yet" in caplog.text
    monkeypatch.setattr(serving, "_device", lambda wanted, pack: "cuda")
    with pytest.raises(MoetError) as caught:
        serving._load(pack, EngineOptions(device="cuda", save_heat=False), lambda steps: None)
    assert caught.value.code == "MD-GPU-10"
