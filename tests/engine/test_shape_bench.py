"""Measuring made-up models of real shape: numbers, bytes, the search, and one tiny run."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from moet_desk.catalogue import find_entry, load_catalogue
from moet_desk.engine.cuda import measure as measuring
from moet_desk.engine.cuda import synthetic
from moet_desk.engine.cuda.bandwidth import Bandwidth
from moet_desk.engine.cuda.blocks import Branch, GqaLaunches, LayerLaunches
from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.cuda.chunk_sizes import chunk_bytes, stage_bytes
from moet_desk.engine.cuda.kernel_groups import (
    GROUP_OF_KERNEL,
    Group,
    KernelRun,
    KernelTime,
    by_kernel,
    group_of,
    shares_of,
    split,
)
from moet_desk.engine.cuda.measured import RESERVE_BYTES, Figures, Setup, Steps
from moet_desk.engine.cuda.popularity import TOLERANCE, find_popularity
from moet_desk.engine.cuda.shapes import KNOWN, SHAPES, Shape
from moet_desk.engine.cuda.synthetic import (
    SyntheticLoader,
    dense_bytes,
    dense_read_bytes,
    make_arena,
    stored_bytes,
)
from moet_desk.engine.cuda.synthetic_drive import SyntheticDrive
from moet_desk.engine.families import runs
from moet_desk.engine.model_shape import kv_token_bytes
from moet_desk.engine.spec import (
    DenseFfn,
    Gdn,
    Gqa,
    Layer,
    Mla,
    MoeFfn,
    QkNorm,
    Rope,
    Router,
    Spec,
)
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat, Score
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import MOST_PAIRS
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.store.arena import Arena, plain_memory
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB, MIB
from tests.kernels.triton.makers import real_values

CPU = torch.device("cpu")

PUBLISHED = {  # routed GiB at 2.25 bits, MiB of an expert, layers, experts chosen
    "deepseek-v4-flash": (72.6, 6.75, 43, 6),
    "qwen3-30b-a3b": (7.6, 1.27, 48, 8),
    "qwen3-next-80b": (20.2, 0.84, 48, 10),
    "gpt-oss-120b": (30.0, 6.67, 36, 4),
    "glm-4.5-air": (26.1, 4.64, 46, 8),
}


def tiny_spec() -> Spec:
    """Every kernel of a step: query latent, a dense layer, a shared expert."""
    mixer = Mla(2, 32, 32, 16, 16, 16, 0.2, 1e-6, Rope(16, 1e4, interleaved=True))
    moe = MoeFfn(Router(8, 2, Score.SIGMOID, True, 1, 1, True, 1.0), 32, 128)
    layers = (Layer(0, mixer, DenseFfn(128)), Layer(1, mixer, moe))
    return Spec("deepseek_v3", 64, 32, 64, 1e-6, False, layers, None)


def tiny(vram_bytes: int) -> Setup:
    shape = Shape("tiny", tiny_spec(), 1, 2 * 352)
    return Setup(shape, CPU, vram_bytes, context=64, prefill=3, warm=1, steps=2, attempts=2)


def counted(name: str) -> tuple[float, float, int, int]:
    entry = find_entry(name)
    assert entry is not None
    return entry.base_gib, entry.layout.base_bytes / MIB, entry.layers, entry.top_k


def test_known__every_model_of_the_catalogue_whose_family_runs() -> None:
    runnable = {e.name for e in load_catalogue() if runs(e.family) and not e.not_yet}
    assert runnable <= set(SHAPES)


def test_shape__gpt_oss__has_the_blocks_of_its_family() -> None:
    shape = SHAPES["gpt-oss-20b"](8192)
    first, second, *_ = shape.spec.layers
    assert isinstance(first.mixer, Gqa)
    assert (first.mixer.window, first.mixer.has_sinks, first.mixer.out_bias) == (128, True, True)
    assert second.mixer == replace(first.mixer, window=None)
    moe = shape.spec.moe_ffn
    assert (moe.expert_bias, moe.glu.alpha, moe.router.logit_bias) == (True, 1.702, True)
    assert not shape.is_fp8
    hybrid = SHAPES["qwen3-next-80b"](8192).spec
    linear, full = hybrid.layers[2].mixer, hybrid.layers[3].mixer
    assert isinstance(linear, Gdn)
    assert isinstance(full, Gqa)
    assert (len(hybrid.recurrent), linear.n_values, linear.fused) == (36, 32, True)
    assert (full.out_gate, full.rope.dim, full.head_dim) == (True, 64, 256)
    assert hybrid.moe_ffn.shared_gate
    glm = SHAPES["glm-4.7"](8192).spec.layers[0].mixer
    assert isinstance(glm, Gqa)
    assert (glm.qk_norm, glm.rope.dim, glm.head_dim) == (QkNorm.HEAD, 64, 128)


@pytest.mark.parametrize("name", SHAPES)
def test_shape__bytes__are_those_of_the_model(name: str) -> None:
    shape = SHAPES[name](8192)
    spec, moe = shape.spec, shape.spec.moe_ffn
    if name not in PUBLISHED:
        assert name in KNOWN  # the catalogue's own test counts these
        routed_gib, expert_mib, n_layers, top_k = counted(name)
    else:
        routed_gib, expert_mib, n_layers, top_k = PUBLISHED[name]
    layout = ExpertLayout(spec.hidden, moe.inter)
    n_rows = len(spec.main_moe_layers) * moe.router.n_experts
    assert n_rows * layout.base_bytes / GIB == pytest.approx(routed_gib, abs=0.06)
    assert layout.base_bytes / MIB == pytest.approx(expert_mib, abs=0.006)
    assert (len(spec.layers), moe.router.top_k) == (n_layers, top_k)
    assert dense_bytes(shape) == pytest.approx(shape.dense_bytes, rel=0.012)
    assert shape.name == name
    if shape.is_rounded:
        assert "rounded to int8" in str(shape.note)
        assert spec.attention.entry_bytes(KvFormat.NVFP4) == 352
    else:
        assert shape.note is None


def test_shape__limits__are_those_of_the_kernels() -> None:
    for name, make in SHAPES.items():
        shape = make(64)
        router = shape.spec.moe_ffn.router
        most = min(MAX_ROWS, MOST_PAIRS // router.top_k)
        assert shape.most_rows == most, name
        assert kv_token_bytes(shape.spec, KvFormat.NVFP4) == shape.kv_token_bytes
        # FP8 scales of gate and up must not share a block
        for layer in shape.spec.layers:
            ffn = layer.ffn
            shared = ffn.inter if isinstance(ffn, DenseFfn) else ffn.shared_inter
            assert shared % 128 == 0 or not shape.is_fp8


def test_loader__every_tensor__takes_the_bytes_that_are_counted() -> None:
    loader = SyntheticLoader(tiny_spec(), CPU)
    for name, shape in loader._shapes.items():
        if len(shape) == 1:
            made = [loader.vector(name)]
        elif name.endswith("embed_tokens"):
            made = [loader.table(name)]
        else:
            weight = loader.matrix(name)
            made = [weight.values, *([] if weight.scales is None else [weight.scales])]
        assert sum(t.numel() * t.element_size() for t in made) == stored_bytes(name, shape), name
    shape = tiny(0).shape
    assert dense_bytes(shape) - dense_read_bytes(shape, 4) == 60 * 32 * 2


def test_loader__many_weights__made_in_one_piece_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces that are freed between weights are cut up for the next ones and lost."""
    monkeypatch.setattr(synthetic, "_PIECE_FLOATS", 100)
    loader = SyntheticLoader(tiny_spec(), CPU)
    made = [loader.matrix("lm_head").values, loader.table("model.embed_tokens")]
    piece = loader._piece
    assert piece is not None
    assert piece.shape == (100,)
    made.append(loader.matrix("lm_head").values)
    assert loader._piece is piece
    for values in made:  # every piece is filled, with numbers of its own
        flat = values.float().flatten()
        assert len(flat) > 300
        assert (flat[:100] != flat[100:200]).float().mean() > 0.9
        assert flat[-20:].abs().min() > 0
    loader.forget_piece()
    assert loader._piece is None


def test_loader__rounded_products__integers_with_a_gain_of_one() -> None:
    shape = replace(tiny(0).shape, is_fp8=False, is_rounded=True)
    loader = SyntheticLoader(shape.spec, CPU, is_fp8=False, is_rounded=True)
    weight = loader.matrix("model.layers.1.mlp.shared_experts.gate_proj")
    assert weight.scales is not None
    assert weight.kind is WeightKind.INT8
    assert float(real_values(weight).square().sum(1).mean()) == pytest.approx(1.0, rel=0.05)
    assert loader.matrix("lm_head").kind is WeightKind.BF16
    name = "model.layers.1.mlp.shared_experts.gate_proj"
    taken = weight.values.nbytes + weight.scales.nbytes
    assert taken == stored_bytes(name, (128, 32), is_fp8=False, is_rounded=True)


def test_loader__identity_experts__popular_too_but_without_rows() -> None:
    spec = tiny_spec()
    moe = spec.moe_ffn
    wide = replace(moe, router=replace(moe.router, n_identity=4))
    loader = SyntheticLoader(
        replace(spec, layers=(spec.layers[0], Layer(1, spec.attention, wide))), CPU
    )
    assert loader.vector("model.layers.1.mlp.gate.e_score_correction_bias").shape == (12,)
    assert sorted(loader.rows_by_popularity()) == list(range(8))


def test_shape__glm__reads_the_chosen_entries_and_all_keys_of_its_indexers() -> None:
    spec = SHAPES["glm-5.2"](32768).spec
    own, reusing = spec.layers[0].mixer, spec.layers[-1].mixer
    assert measuring._read_bytes(own, spec, 30000) == 2048 * 352 + 30000 * 132
    assert measuring._read_bytes(reusing, spec, 30000) == 2048 * 352
    assert measuring._read_bytes(own, spec, 1000) == 1000 * 352


def test_loader__grouped_query_layer__has_all_that_its_launches_ask_for() -> None:
    rope = Rope(8, 1e4, interleaved=False)
    mixer = Gqa(2, 1, 16, True, QkNorm.HEAD, norm_eps=1e-6, softmax_scale=0.25, rope=rope)
    spec = tiny_spec()
    spec = replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))
    loader, branch = SyntheticLoader(spec, CPU), Branch(CPU)
    for layer in spec.layers:
        made = LayerLaunches(layer, loader, moe_layer=0, branch=branch)
        assert isinstance(made.attention, GqaLaunches)
        assert made.attention.bias is not None
        assert made.attention.bias.shape == (64,)
        assert made.attention.w_in.n == 64


def test_loader__gpt_oss__has_sinks_biases_and_the_experts_form() -> None:
    shape = SHAPES["gpt-oss-20b"](64)
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, n_heads=4, n_keys=2, head_dim=16))
        for layer in shape.spec.layers[:2]
        if isinstance(layer.mixer, Gqa)
    )
    spec = replace(shape.spec, hidden=64, vocab=64, layers=layers)
    loader, branch = SyntheticLoader(spec, CPU, is_fp8=False), Branch(CPU)
    made = LayerLaunches(spec.layers[0], loader, moe_layer=0, branch=branch)
    assert isinstance(made.attention, GqaLaunches)
    assert made.attention.sinks is not None
    assert made.attention.out_bias is not None
    assert made.attention.w_in.values.dtype == torch.bfloat16
    form = loader.form()
    assert form.glu == spec.moe_ffn.glu
    assert sorted(form.biases) == [0, 1]
    assert form.biases[1].gate_up.shape == (32, 5760)
    assert form.biases[1].down.dtype == torch.bfloat16


def test_loader__popularity__ranks_experts_in_place() -> None:
    loader = SyntheticLoader(tiny_spec(), CPU)
    bias = loader.vector("model.layers.1.mlp.gate.e_score_correction_bias")
    loader.set_popularity(0.5)
    order = torch.argsort(bias, descending=True).tolist()
    assert sorted(bias.tolist()) == [-3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]
    assert loader.rows_by_popularity() == order
    loader.set_popularity(0.0)
    assert bias.tolist() == [0.0] * 8


def test_loader__table_of_experts__names_popular_ones_and_no_expert_twice() -> None:
    spec = SHAPES["deepseek-v4-flash"](64).spec
    assert spec.n_named == 3
    loader = SyntheticLoader(replace(spec, vocab=64), CPU)
    table = loader.vector("model.layers.0.ffn.gate.tid2eid")
    assert table.dtype == torch.int32
    loader.set_popularity(10.0)  # more than scores differ by
    assert set(table.flatten().tolist()) == set(loader.rows_by_popularity()[:6])
    loader.set_popularity(0.0)
    assert len(table.unique()) > 150
    assert bool((table.sort(1).values.diff(dim=1) > 0).all())


def test_arena__few_places__shared_by_all_rows() -> None:
    layout = ExpertLayout(64, 32)
    rows = make_arena(layout, 10, allocate=plain_memory, most_bytes=3 * layout.base_stride)
    memory = rows.memory
    arena = rows.on(CPU)
    assert memory.shape == (3, layout.base_stride)
    assert arena.place_of.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    blocks = layout.gate_up.n * layout.gate_up.groups
    assert memory[1, 8 * blocks : 9 * blocks].unique().tolist() == [120]
    assert memory[2, layout.base_bytes - 1] == 120


# -- how even routing must be ----------------------------------------------------------------


@pytest.mark.parametrize("goal", [0.5, 0.83, 0.96, 0.964, 0.997])
@pytest.mark.parametrize("scale", [0.0003, 0.004, 0.02])
def test_find_popularity__smooth_pool__within_tolerance(goal: float, scale: float) -> None:
    def rate_at(popularity: float) -> float:
        return 1 - 0.68 * math.exp(-popularity / scale)

    found = find_popularity(rate_at, goal, guess=0.0039)
    assert abs(rate_at(found) - goal) <= TOLERANCE


def test_find_popularity__steep_and_noisy_pool__within_tolerance() -> None:
    calls: list[float] = []

    def rate_at(popularity: float) -> float:
        calls.append(popularity)
        noise = 0.001 * (-1) ** len(calls)
        return 1 / (1 + math.exp(-(popularity - 0.007) / 0.0008)) * 0.68 + 0.32 + noise

    found = find_popularity(rate_at, 0.96, guess=0.0039)
    assert abs(rate_at(found) - 0.96) <= TOLERANCE + 0.002
    assert len(calls) <= 9


def test_find_popularity__guess_far_above__goes_along_the_line_not_below_it() -> None:
    """On an H200 halving went from 98 % hits to 86 %, where a step takes twice as long."""
    rates: list[float] = []

    def rate_at(popularity: float) -> float:
        rates.append(1 - math.exp(-popularity / 0.00046) / 1.3)
        return rates[-1]

    find_popularity(rate_at, 0.96, guess=0.0032)
    assert abs(rates[-1] - 0.96) <= TOLERANCE
    assert len(rates) <= 4
    assert min(rates) > 0.93


def test_find_popularity__goal_out_of_reach__nearest_and_it_ends() -> None:
    calls: list[float] = []

    def rate_at(popularity: float) -> float:
        calls.append(popularity)
        return 0.6 + popularity

    assert find_popularity(rate_at, 0.2, guess=0.01, attempts=5) == min(calls)
    assert len(calls) == 5


# -- the plan and what it says of bytes ------------------------------------------------------


def test_setup__deepseek_in_32_gib__slots_fill_what_is_left() -> None:
    setup = Setup(SHAPES["deepseek-v4-flash"](8192), CPU, 32 * GIB, context=8192)
    slots = setup.n_slots()
    used = dense_bytes(setup.shape) + slots * setup.layout.base_stride
    assert 3200 < slots < 3500
    assert 0 < 32 * GIB - RESERVE_BYTES - used < 200 * MIB
    whole = Setup(SHAPES["qwen3-30b-a3b"](8192), CPU, 32 * GIB, context=8192)
    assert whole.n_slots() == whole.n_rows == 48 * 128


def test_setup__too_little_vram__says_how_much() -> None:
    setup = Setup(SHAPES["glm-5.2"](8192), CPU, 12 * GIB, context=8192)
    with pytest.raises(MoetError) as caught:
        setup.n_slots()
    assert caught.value.code == "MD-GPU-05"
    assert "12.0 GiB" in caught.value.cause


def test_figures__roofline__the_slower_bus_counts() -> None:
    def ratio(vram: int, pcie: int) -> float | None:
        steps = Steps((9.0, 10.0, 11.0), 0.96, 2.0, 10.0)
        bandwidth = Bandwidth(vram=4e12, pcie=50e9)
        return Figures(steps, 10, 0, 1, vram, pcie, None, bandwidth, None, None).roofline_ratio

    assert ratio(8 * 10**9, 0) == pytest.approx(0.2)
    assert ratio(8 * 10**9, 400 * 10**6) == pytest.approx(0.8)


# -- kernel groups ---------------------------------------------------------------------------


def test_groups__every_kernel_of_the_step_s_modules__is_in_the_table() -> None:
    modules = (
        "attention cache delta dense experts fetch gates indexer kv_entries latent norms prepare"
        " quant route sampling choose pooled_keys pooling seen shared_attention streams"
    )
    for name in modules.split():
        module = importlib.import_module(f"moet_desk.kernels.triton.{name}")
        launched = re.findall(r"^ +(_\w+_kernel)\[", Path(str(module.__file__)).read_text(), re.M)
        assert launched or name == "latent", name
        for kernel in launched:
            assert kernel in GROUP_OF_KERNEL, f"{kernel} of {name}.py has no group"


def runs_of(*lasting: tuple[str, float]) -> list[KernelRun]:
    """Kernels one behind the other, each for so many microseconds."""
    ends = list(accumulate(us for _, us in lasting))
    return [KernelRun(name, end - us, end) for (name, us), end in zip(lasting, ends, strict=True)]


def test_split__kernels__by_group_with_the_rest_as_gaps() -> None:
    times = [("_gemv_kernel", 3000.0), ("_down_kernel", 1000.0), ("Memcpy HtoD", 500.0)]
    found = split(runs_of(*times), n_steps=2, step_ms=5.0)
    assert found == {
        "attention": 0, "dense": 1.5, "router_lookup": 0, "fetch": 0, "experts": 0.5,
        "sampling": 0, "norms_other": 0.25, "gaps_host": 2.75,
    }  # fmt: skip
    assert split(runs_of(*times), n_steps=1, step_ms=2.0)["gaps_host"] == 0
    twice = by_kernel(runs_of(*times, ("_down_kernel", 3000.0)), n_steps=2)
    assert [(name, time.launches, time.ms) for name, time in twice.items()] == [
        ("_down_kernel", 1.0, 2.0), ("_gemv_kernel", 0.5, 1.5), ("Memcpy HtoD", 0.5, 0.25),
    ]  # fmt: skip
    torchs = runs_of(("void at::native::a<int>()", 1000.0), ("void at::native::b<float>()", 500.0))
    assert by_kernel(torchs, n_steps=1) == {"elementwise of torch": KernelTime(2.0, 1.5, 1.5, 0.0)}
    assert group_of("_rms_norm_kernel_0d1d2") is Group.OTHER
    assert group_of("_fetch_kernel_0d1") is Group.FETCH


def test_shares__kernels_side_by_side__an_instant_is_shared_and_gaps_are_the_next_ones() -> None:
    a, b, c = KernelRun("a", 10, 20), KernelRun("b", 14, 26), KernelRun("c", 30, 34)
    assert shares_of([a, b, c]) == [(4 + 3, 0), (3 + 6, 0), (4, 4)]
    inside = [KernelRun("a", 0, 14), KernelRun("b", 4, 10), KernelRun("c", 4, 10)]
    assert shares_of(inside) == [(8 + 2, 0), (2, 0), (2, 0)]
    assert shares_of([]) == []
    found = by_kernel([a, b, c], n_steps=1)
    assert sum(each.share_ms for each in found.values()) == pytest.approx(0.020)
    assert split([a, b, c], n_steps=1, step_ms=0.024)["gaps_host"] == pytest.approx(0.004)


# -- all of it, interpreted ------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that the interpreter is asked to run."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: set[str] = set()
    intact: Callable[..., object] = InterpretedFunction.run

    def run(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        seen.add(self.fn.__name__)
        return intact(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return seen


@pytest.mark.long
@pytest.mark.slow
def test_measure__tiny_model_interpreted__whole_figures(
    launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "PROMPTS", 2)
    setup, told = tiny(0), list[str]()
    fixed = dense_bytes(setup.shape) + setup.kv_pages * 64 * setup.kv_token_bytes
    fixed += stage_bytes(setup.layout, 8)
    fixed += chunk_bytes(setup.shape.spec, 3, context=setup.kv_pages * 64)
    setup = tiny(RESERVE_BYTES + fixed + 6 * 4096)
    bench = measuring.ShapeBench(setup, plain_memory, told.append)
    found = bench.run(0.6)
    assert (found.n_slots, setup.n_rows, len(found.steps.times_ms)) == (6, 8, 2)
    assert 1 <= found.attempts <= 2
    assert found.steps.distinct == 2
    assert found.steps.hit_rate == 1 - found.steps.misses / 2
    assert found.vram_bytes == (
        dense_read_bytes(setup.shape, 1)
        + 2 * setup.layout.base_bytes
        + setup.context * setup.kv_token_bytes
    )
    assert found.pcie_bytes == round(found.steps.misses * 4096)
    assert (found.by_group, found.bandwidth, found.roofline_ratio) == (None, None, None)
    assert sum("hits" in line for line in told) == found.attempts
    assert found.prefill_tok_per_s is not None
    assert found.prefill_tok_per_s > 0
    assert "_grouped_kernel" in launched
    assert bench.kv.free_tokens == setup.kv_pages * 64
    launched.clear()
    bench.steps(1)
    assert launched - set(GROUP_OF_KERNEL) == set()
    own = {"_routed_fetch_kernel", "_swiglu_gemv_kernel", "_scan_kernel"}
    assert own <= launched
    assert "_pass_kernel" not in launched


@pytest.mark.long
@pytest.mark.slow
def test_measure__guesses__steps_that_check_them_and_the_head() -> None:
    setup = replace(tiny(RESERVE_BYTES + 2**27), prefill=0, warm=0, steps=1, drafts=1)
    setup = replace(setup, shape=setup.shape.with_head())
    bench = measuring.ShapeBench(setup, plain_memory, lambda _: None)
    assert (setup.n_slots(), setup.n_rows, setup.most_rows) == (16, 16, 2)
    counts = bench.pool.tables.counters
    before = counts[:, 0].tolist()  # look-ups, by MoE layer: the model's and the head's
    found = bench._drafts()
    assert found is not None
    assert (len(found.checks.times_ms), found.guess_ms > 0) == (1, True)
    assert 2 <= found.checks.distinct <= 4
    assert [now - then for now, then in zip(counts[:, 0].tolist(), before, strict=True)] == [4, 2]
    bare = replace(setup.shape, spec=replace(setup.shape.spec, mtp=None))
    assert dense_read_bytes(setup.shape, 1) == dense_read_bytes(bare, 1)


@pytest.mark.long
@pytest.mark.slow
def test_measure__exact_steps__every_fp4_row_from_ram() -> None:
    setup = replace(tiny(RESERVE_BYTES + 2**27), plane=Plane.FINE, prefill=0, warm=0)
    bench = measuring.ShapeBench(setup, plain_memory, lambda _: None)
    found = bench.run(1.0)
    assert (found.n_slots, found.n_fine_slots) == (8, 2)
    assert found.steps.fine_misses <= 2
    assert found.pcie_bytes == round(found.steps.fine_misses * setup.layout.fine_stride)
    experts = 2 * (setup.layout.base_bytes + setup.layout.fine_bytes)
    kv = setup.context * setup.kv_token_bytes
    assert found.vram_bytes == dense_read_bytes(setup.shape, 1) + experts + kv


# -- rows on a drive -------------------------------------------------------------------------------


def test_setup__ram_limit__the_least_of_both_planes_then_base_rows() -> None:
    shape = SHAPES["glm-5.2"](8192)
    fast = Setup(shape, CPU, 32 * GIB, context=8192, ram_bytes=64 * GIB)
    assert fast.in_ram() == {Plane.BASE: 64 * GIB // fast.layout.base_stride}
    assert fast.uses_drive
    assert not replace(fast, ram_bytes=200 * GIB).uses_drive
    exact = replace(fast, plane=Plane.FINE)
    assert exact.in_ram()[Plane.FINE] == 2 * 8
    assert sum(exact.in_ram().values()) * exact.layout.base_stride < 64 * GIB
    with pytest.raises(MoetError) as caught:
        replace(fast, ram_bytes=100 * MIB).in_ram()
    assert caught.value.code == "MD-RAM-05"


def test_drive__rows__read_checked_and_gone_at_the_end(tmp_path: Path) -> None:
    layout, folder = ExpertLayout(64, 32), tmp_path / "models"
    drive = SyntheticDrive(folder, layout, 10, (Plane.BASE,), file_bytes=3 * layout.base_stride)
    place = memoryview(plain_memory(4 * layout.base_stride, 4096))
    rows = [place[i * layout.base_stride : (i + 1) * layout.base_stride] for i in range(4)]
    for row, out in zip((0, 1, 3, 9), rows, strict=True):
        drive.read_row(Plane.BASE, row, out)
    assert rows[0] == rows[2] == rows[3] != rows[1]
    assert drive.bytes_per_s() > 0
    (file,) = folder.rglob("base")
    with file.open("r+b") as spoiled:
        spoiled.write(b"\0" * 4096)
    if not drive.direct:
        with pytest.raises(MoetError) as caught:
            drive.read_row(Plane.BASE, 0, rows[0])
        assert caught.value.code == "MD-NVME-04"
    drive.close()
    assert list(folder.iterdir()) == []


def test_bench__less_ram_than_rows__the_most_popular_are_there_and_a_mailbox_asks_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.ShapeBench, "_capture", lambda self, rows: None)
    setup = replace(tiny(0), prefill=0, ram_bytes=4 * 4096, folder=tmp_path)
    fixed = dense_bytes(setup.shape) + setup.kv_pages * 64 * setup.kv_token_bytes + RESERVE_BYTES
    setup = replace(setup, vram_bytes=fixed + 2 * 4096)
    assert (setup.n_slots(), setup.in_ram()) == (2, {Plane.BASE: 4})
    with ExitStack() as undo:
        bench = measuring.ShapeBench(setup, plain_memory, lambda _: None, undo=undo)
        host, popular = bench._host, bench.loader.rows_by_popularity()
        assert isinstance(host, Arena)
        assert {row for row, place in enumerate(host.table(Plane.BASE)) if place >= 0} == set(
            popular[:4]
        )
        assert bench.pool.arena.place_of.tolist() == host.table(Plane.BASE).tolist()
        assert sorted(bench.pool.tables.owner.tolist()) == sorted(popular[:2])
        assert host.read_times() is None  # no step waited for these
        server = bench.model._server
        assert server is not None
        before, readers = bench._read(), undo.enter_context(ThreadPoolExecutor(1))
        ((place, lost),) = host.bring(Plane.BASE, popular[5:6], keep=popular[:1], run=readers)
        assert (lost in popular[1:4], host.table(Plane.BASE)[popular[5]]) == (True, place)
        assert tuple(now - then for now, then in zip(bench._read(), before, strict=True)) == (
            1, 4096,
        )  # fmt: skip
        found = bench._drive_figures()
        assert found is not None
        assert found.read_ms is not None
        assert found.bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_measure__states_and_windows__steps_begin_where_the_last_one_did(
    launched: set[str],
) -> None:
    full = Gqa(
        2, 1, 16, False, QkNorm.HEAD, 1e-6, 0.25, Rope(8, 1e4, interleaved=False), out_gate=True
    )
    spec, moe = tiny_spec(), replace(tiny_spec().moe_ffn, shared_gate=True)
    mixers = (Gdn(1, 2, 16, 16, 4, 1e-6, fused=True), replace(full, window=8), full)
    ffns = (DenseFfn(32), DenseFfn(32), moe)
    layers = tuple(map(Layer, range(3), mixers, ffns))
    shape = Shape("tiny", replace(spec, layers=layers), 1, 36, is_fp8=False)
    setup = Setup(shape, CPU, RESERVE_BYTES + 2**27, context=512, prefill=0, warm=0, steps=1)
    assert setup.ring_pages == 2
    bench = measuring.ShapeBench(setup, plain_memory, lambda _: None)
    assert bench.kv.has_rings
    assert len(bench.steps(1).times_ms) == 1
    assert {"_delta_step_kernel", "_conv_kernel", "_gate_kernel"} <= launched
    assert launched - set(GROUP_OF_KERNEL) == set()
