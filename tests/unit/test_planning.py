"""Plans for recorded computers: what is handed out adds up, fits, and grows with the computer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.catalogue import find_entry, load_catalogue
from moet_desk.engine.dense_format import DenseFormat
from moet_desk.engine.handle import EngineOptions, Quality
from moet_desk.engine.model_shape import kv_token_bytes
from moet_desk.engine.planned_model import PlannedModel, from_catalogue
from moet_desk.engine.planning import ModelPlan, Refusal, fixed_parts, plan_model
from moet_desk.engine.spec import PooledAttention, Rope
from moet_desk.forecast import (
    HIT_CURVES,
    SHARES,
    Plane,
    TokenWork,
    forecast_device,
    hit_rate,
    speeds_of,
)
from moet_desk.machine import (
    Gpu,
    MachineFacts,
    Rates,
    choose_gpu,
    from_json,
    to_json,
    without_names,
)
from moet_desk.plan import KV_PAGE_TOKENS
from moet_desk.units import GIB
from tools import generate_plans

MACHINES = {
    path.stem: from_json(path.read_bytes()) for path in generate_plans.MACHINES.glob("*.json")
}
MODELS = {entry.name: from_catalogue(entry) for entry in load_catalogue()}
DESK = MACHINES["5090-96gb"]
RECORDS = Path(__file__).resolve().parents[2] / "bench" / "records"
V4 = RECORDS / "2026-11-30-h200-deepseek-v4-flash-shape-lookahead.json"
AUTO = EngineOptions(device="auto")


def with_sizes(vram: int, ram: int, disk: int = 2000 * 10**9) -> MachineFacts:
    """The desk with another card, RAM and drive."""
    gpu = replace(DESK.gpus[0], vram_total=vram, vram_free=vram)
    memory = replace(DESK.memory, total=ram, available=ram)
    return replace(DESK, gpus=(gpu,), memory=memory, drives=(replace(DESK.drives[0], free=disk),))


def planned(machine: MachineFacts, name: str, options: EngineOptions = AUTO) -> ModelPlan:
    answer = plan_model(machine, MODELS[name], options)
    assert isinstance(answer, ModelPlan), answer
    return answer


# -- properties ------------------------------------------------------------------------------

NAMES = st.sampled_from(sorted(MODELS))
VRAM = st.integers(4 * GIB, 96 * GIB)
RAM = st.integers(8 * GIB, 512 * GIB)


def check_sums(model: PlannedModel, plan: ModelPlan) -> None:
    """Add up what was handed out without the planner's own sums."""
    tiers, shape, sizes = plan.tiers, plan.shape, plan.bytes
    each = kv_token_bytes(model.spec, plan.kv_format, on_card=plan.gpu is not None)
    kv = tiers.kv_pages * KV_PAGE_TOKENS * each
    in_ring = tiers.ring_pages * KV_PAGE_TOKENS * shape.windows.token_bytes
    assert sizes.kv == kv + plan.requests * (shape.state_bytes + in_ring)
    rows = tiers.arena_base_rows * shape.base_stride + tiers.arena_fine_rows * shape.fine_stride
    assert sizes.arena == rows
    assert sizes.total == tiers.bytes_total
    left = shape.n_rows * (shape.base_stride + shape.fine_stride) - rows
    assert sizes.nvme_only == left >= 0
    if plan.gpu is None:
        assert sizes.total <= plan.budget.ram
        return
    slots = tiers.base_slots * shape.base_stride + tiers.fine_slots * shape.fine_stride
    saved = model.dense_saving if plan.dense_format is DenseFormat.INT8 else 0
    fixed = model.dense_bytes - saved + sizes.kv + sizes.work + sizes.chunk
    assert sizes.compute == fixed + slots <= plan.budget.vram
    assert sizes.arena <= plan.budget.ram


@settings(max_examples=150, deadline=None, derandomize=True)
@given(NAMES, VRAM, RAM, st.sampled_from(["auto", "cpu"]))
def test_plan__any_computer__adds_up_and_stays_within_the_budget_or_is_refused(
    name: str, vram: int, ram: int, device: str
) -> None:
    machine = with_sizes(vram, ram)
    answer = plan_model(machine, MODELS[name], EngineOptions(device=device))
    if isinstance(answer, ModelPlan):
        check_sums(MODELS[name], answer)
        assert 0 < answer.forecast.tok_per_s[0] <= answer.forecast.tok_per_s[1]
        return
    assert answer.error.code in ("MD-GPU-05", "MD-RAM-01")
    assert answer.error.facts["need"] != answer.error.facts["have"]
    if answer.nearest is not None:
        check_sums(MODELS[name], answer.nearest)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    NAMES, VRAM, RAM, st.integers(0, 32 * GIB), st.integers(0, 128 * GIB),
    st.sampled_from(["stored", "int8"]),
)  # fmt: skip
def test_plan__more_of_anything__no_tier_gets_smaller(
    name: str, vram: int, ram: int, more_vram: int, more_ram: int, dense_format: str
) -> None:
    # with "auto" a larger card may hold dense weights as shipped and fewer experts
    options = EngineOptions(
        device="auto", context=4096, prefill_chunk=256, dense_format=dense_format
    )
    small = plan_model(with_sizes(vram, ram), MODELS[name], options)
    large = plan_model(with_sizes(vram + more_vram, ram + more_ram), MODELS[name], options)
    if isinstance(small, Refusal):
        return
    assert isinstance(large, ModelPlan)  # what fits, fits on a larger computer
    for tier in ("base_slots", "fine_slots", "arena_base_rows", "arena_fine_rows"):
        assert getattr(large.tiers, tier) >= getattr(small.tiers, tier)
    assert large.bytes.nvme_only <= small.bytes.nvme_only
    assert large.forecast.tok_per_s[0] >= small.forecast.tok_per_s[0] * 0.999
    assert large.forecast.tok_per_s[1] >= small.forecast.tok_per_s[1] * 0.999


@settings(max_examples=100, deadline=None, derandomize=True)
@given(NAMES, VRAM, st.integers(0, 32 * GIB))
def test_plan__more_vram__the_automatic_context_gets_no_shorter(
    name: str, vram: int, more: int
) -> None:
    small = plan_model(with_sizes(vram, 256 * GIB), MODELS[name], AUTO)
    large = plan_model(with_sizes(vram + more, 256 * GIB), MODELS[name], AUTO)
    if isinstance(small, ModelPlan) and isinstance(large, ModelPlan):
        assert large.tiers.context >= small.tiers.context


@pytest.mark.parametrize("curve", sorted(HIT_CURVES))
def test_hit_rate__from_nothing_to_everything__never_falls(curve: str) -> None:
    rates = [hit_rate(n / 500, curve) for n in range(501)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, 1.0)
    for share, stated in zip(SHARES, HIT_CURVES[curve], strict=True):
        assert hit_rate(share, curve) == pytest.approx(stated)


# -- decisions -------------------------------------------------------------------------------


def test_plan__base_rows_larger_than_ram__some_stay_on_the_drive_and_it_fits() -> None:
    """96 GiB do not hold the 74 GiB of 2-bit rows beside a desktop; the drive tier is for that."""
    plan = planned(DESK, "deepseek-v4-flash")
    assert 0.7 < plan.tiers.arena_base_rows / plan.shape.n_rows < 1
    assert plan.tiers.arena_fine_rows < 200
    assert plan.forecast.ram_hit_rate[1] < 1


def test_plan__without_a_wish__a_context_whose_kv_leaves_room_for_experts() -> None:
    plan = planned(DESK, "deepseek-v4-flash")
    assert plan.tiers.context == 131_072  # of 1,048,576
    assert plan.bytes.kv <= plan.budget.vram / 8 + plan.requests * 6 * 2**20
    wished = planned(DESK, "deepseek-v4-flash", replace(AUTO, context=8192))
    assert wished.tiers.context == 8192
    assert wished.tiers.base_slots > plan.tiers.base_slots


def test_plan__context_too_long_for_the_card__refused_with_figures_and_the_nearest() -> None:
    options = replace(AUTO, context=1_048_576, kv_format="bf16")
    answer = plan_model(DESK, MODELS["deepseek-v4-flash"], options)
    assert isinstance(answer, Refusal)
    assert answer.error.code == "MD-GPU-05"
    assert answer.nearest is not None
    assert answer.changes[0] == f"--context {answer.nearest.tiers.context}"
    assert answer.nearest.tiers.context < 1_048_576
    again = replace(options, context=answer.nearest.tiers.context)
    assert planned(DESK, "deepseek-v4-flash", again).tiers == answer.nearest.tiers


def test_plan__context_longer_than_the_models__nearest_is_the_models_own() -> None:
    answer = plan_model(DESK, MODELS["olmoe-1b-7b"], replace(AUTO, context=100_000))
    assert isinstance(answer, Refusal)
    assert answer.error.code == "MD-PLAN-02"
    assert answer.changes == ("--context 4096",)


def test_plan__dense_stack_larger_than_the_card__no_plan_on_it() -> None:
    answer = plan_model(MACHINES["4090-64gb"], MODELS["glm-5.2"], AUTO)
    assert isinstance(answer, Refusal)
    assert answer.error.code == "MD-GPU-05"
    assert answer.nearest is None


def test_plan__glm_5_2_on_a_desk__three_tiers_and_most_experts_on_the_drive() -> None:
    model = MODELS["glm-5.2-fp8"]
    machine = with_sizes(32 * GIB, 96 * GIB)
    answer = plan_model(machine, model, EngineOptions(device="auto", kv_format="nvfp4"))
    assert isinstance(answer, ModelPlan)
    check_sums(model, answer)
    assert answer.shape.kv_token_bytes == 78 * 352 + 21 * 132  # with the indexers' keys
    assert answer.tiers.base_slots >= model.spec.moe_ffn.router.top_k
    assert 0 < answer.tiers.arena_base_rows < answer.shape.n_rows / 2
    assert answer.bytes.nvme_only > answer.bytes.compute + answer.bytes.arena


def test_plan__a_full_drive__refused_before_anything_is_downloaded() -> None:
    machine = with_sizes(32 * GIB, 128 * GIB, disk=100 * 10**9)
    answer = plan_model(machine, MODELS["deepseek-v4-flash"], AUTO)
    assert isinstance(answer, Refusal)
    assert answer.error.code == "MD-DISK-01"
    assert (answer.error.facts["need"], answer.error.facts["have"]) == ("173.3 GB", "100.0 GB")
    installed = replace(MODELS["deepseek-v4-flash"], is_installed=True)
    assert isinstance(plan_model(machine, installed, AUTO), ModelPlan)


def test_plan__a_limited_container__the_limit_counts_not_the_host() -> None:
    plan = planned(MACHINES["container-48gb"], "qwen3-30b-a3b")
    assert plan.budget.ram <= 0.7 * 48 * GIB


def test_plan__wsl__half_of_the_ram_can_be_pinned() -> None:
    machine = MACHINES["wsl-5090"]
    plan = planned(machine, "minimax-m2.7")
    assert plan.budget.ram == machine.memory.total // 2
    on_cpu = planned(machine, "olmoe-1b-7b", EngineOptions(device="cpu"))
    assert on_cpu.budget.ram == int(0.7 * machine.memory.available)  # nothing is pinned


@pytest.mark.parametrize(
    "path",
    [*sorted(RECORDS.glob("*-h200-*-shape-decode.json")), V4],
    ids=lambda path: path.stem[11:],
)
def test_forecast__of_what_was_measured__its_range_holds_the_measurement(path: Path) -> None:
    """Steps of real shapes, with the bytes that they moved instead of an assumed hit rate."""
    found = json.loads(path.read_text())
    entry, moved, rates = find_entry(found["shape"]), found["bytes_per_step"], found["measured_bw"]
    assert entry is not None
    vram, pcie = rates["vram_bytes_per_s"], rates["pcie_bytes_per_s"]
    machine = replace(DESK, rates=Rates(measured="", vram=vram, pcie=pcie))
    spec = from_catalogue(entry).spec
    if "stands in for" in str(found["note"]):
        spec = replace(spec, streams=None)
    fetched = Plane(row_bytes=moved["pcie"], slots=0, in_ram=1)
    work = TokenWork(fixed_parts(spec), 1, 1, moved["vram"], 1, (fetched,))
    low, high = forecast_device(work, speeds_of(machine, None, None)).tok_per_s
    # 128 heads over 8,192 latents take longer than the 2,048 tokens that a forecast is for
    late = 0.8 if entry.mla is not None and entry.heads == 128 else 1.0
    assert late * low <= found["decode_tok_per_s"] + 0.05 <= high + 0.1  # rounded in the record
    assert high < 2 * low


def test_plan__swap__is_no_tier() -> None:
    swapping = replace(DESK, memory=replace(DESK.memory, swap_total=512 * GIB))
    assert planned(swapping, "minimax-m2.7") == planned(DESK, "minimax-m2.7")


def test_plan__total_and_active_parameters__memory_follows_the_total() -> None:
    """Field case: a fit tool that took the active parameters for the size."""
    plan = planned(DESK, "qwen3.5-122b-a10b")
    everything = plan.shape.n_rows * plan.shape.base_stride
    assert everything > 30 * GIB
    assert plan.bytes.arena_base == everything


def test_plan__exact_answers__slower_and_balanced_between() -> None:
    speeds = [
        planned(DESK, "minimax-m2.7", replace(AUTO, quality=quality)).forecast.tok_per_s
        for quality in (Quality.FAST, Quality.BALANCED, Quality.EXACT)
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert len(set(speeds)) == 3


def test_plan__layers_without_kernels__left_to_the_cpu_unless_the_card_is_insisted_on() -> None:
    model = MODELS["olmoe-1b-7b"]
    rope = Rope(dim=16, base=10000.0, interleaved=True)
    mixer = PooledAttention(
        n_heads=4, head_dim=48, q_rank=32, out_groups=2, out_rank=16, window=8, norm_eps=1e-6,
        softmax_scale=1.0, rope=rope, pool=None,
    )  # fmt: skip
    layers = tuple(replace(layer, mixer=mixer) for layer in model.spec.layers)
    model = replace(model, spec=replace(model.spec, layers=layers))
    plan = plan_model(DESK, model, AUTO)
    assert isinstance(plan, ModelPlan)
    part = "pooled attention with heads of 48, 16 of which rotate"
    assert (plan.device, plan.why) == ("cpu", f"for {part} a card has no kernels yet")
    refused = plan_model(DESK, model, EngineOptions(device="cuda"))
    assert isinstance(refused, Refusal)
    assert refused.error.code == "MD-GPU-10"
    assert refused.changes == ("--device cpu",)


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.parametrize("chunk", [256, 4096])
def test_plan__gpt_oss__half_of_its_layers_keep_the_window_and_a_chunk(
    device: str, chunk: int
) -> None:
    entry = find_entry("gpt-oss-20b")
    assert entry is not None
    options = EngineOptions(device=device, context=65536, kv_format="bf16", prefill_chunk=chunk)
    plan = planned(DESK, entry.name, options)
    each = entry.layers // 2 * 2048  # 8 heads of keys and values, 64 numbers of two bytes each
    rows = chunk if device == "cpu" else min(chunk, 2048)  # a card reads a chunk block by block
    ring = 64 * (-(-(128 + rows) // 64) + 1)
    assert plan.bytes.kv == plan.requests * (65536 + ring) * each
    short = planned(DESK, entry.name, replace(options, context=1024))
    assert short.tiers.ring_pages == min(ring // 64, 16)


def test_plan__no_card__cpu_and_says_why() -> None:
    plan = planned(MACHINES["cpu-only"], "olmoe-1b-7b")
    assert (plan.device, plan.gpu) == ("cpu", None)
    assert "driver" in plan.why


# -- several cards ---------------------------------------------------------------------------


def gpu(index: int, free: int, **more: object) -> Gpu:
    fields = {"capability": (12, 0), "has_display": False, **more}
    return Gpu(
        index=index, name=f"card {index}", uuid=f"GPU-{index}", vram_total=32 * GIB,
        vram_free=free * GIB, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "index", "word"),
    [
        ([gpu(0, 30)], 0, "only one"),
        ([gpu(0, 8), gpu(1, 30)], 1, "most free memory"),
        ([gpu(0, 30, has_display=True), gpu(1, 30)], 1, "no display"),
        ([gpu(0, 30), gpu(1, 30)], 0, "first"),
        ([gpu(0, 30, capability=(7, 5)), gpu(1, 8)], 1, "new enough"),
    ],
)
def test_choose_gpu__several__one_and_why(gpus: list[Gpu], index: int, word: str) -> None:
    choice = choose_gpu(gpus)
    assert choice is not None
    assert choice.gpu.index == index
    assert word in choice.why


def test_choose_gpu__none_that_is_new_enough__none() -> None:
    assert choose_gpu([]) is None
    assert choose_gpu([gpu(0, 24, capability=(7, 5))]) is None


# -- records and pages -----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_record__written_and_read__the_same(name: str) -> None:
    assert from_json(to_json(MACHINES[name])) == MACHINES[name]
    assert MACHINES[name].name == name


def test_without_names__the_plan_is_the_same() -> None:
    bare = without_names(DESK, "/home/user")
    text = to_json(bare).decode()
    assert "/home/user" not in text
    assert DESK.gpus[0].uuid not in text
    assert planned(bare, "minimax-m2.7").bytes == planned(DESK, "minimax-m2.7").bytes


def test_pages__of_the_tree__agree_with_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    """After a wanted change: python tools/generate_plans.py, and read the difference."""
    status = generate_plans.main(["--check"])
    assert capsys.readouterr().out == ""
    assert status == 0
    assert {path.stem for path in generate_plans.PLANS.glob("*.txt")} == set(MACHINES)
    assert len(MACHINES) == 10


def test_catalogue_name_in_the_pages__every_model_on_every_machine() -> None:
    for path in generate_plans.PLANS.glob("*.txt"):
        text = path.read_text("utf-8")
        assert all(f"\n{name} " in text for name in MODELS)
    assert find_entry("deepseek-v3.1") is not None


@pytest.mark.parametrize("machine", ["5090-64gb", "5090-96gb", "5090-128gb", "5090-192gb"])
def test_glm__bf16_dense_weights_on_32_gib__rounded_and_most_experts_on_the_drive_or_in_ram(
    machine: str,
) -> None:
    model, plan = MODELS["glm-5.2"], planned(MACHINES[machine], "glm-5.2")
    assert plan.tiers.context == 4096  # of itself: with the 8,192 of others it does not fit
    assert plan.dense_format is DenseFormat.INT8
    assert model.dense_bytes > plan.budget.vram > plan.bytes.compute
    assert plan.bytes.dense == model.dense_bytes - model.dense_saving
    tiers, rows = plan.tiers, plan.shape.n_rows
    assert 0 < tiers.base_slots < tiers.arena_base_rows < rows
    assert plan.bytes.nvme_only > plan.bytes.arena
    with_fp8 = planned(MACHINES[machine], "glm-5.2-fp8")
    assert with_fp8.dense_format is DenseFormat.STORED  # nothing there is larger than 8 bits


def test_glm__a_context_that_the_user_fixed__refused_and_never_shortened_unasked() -> None:
    answer = plan_model(DESK, MODELS["glm-5.2"], replace(AUTO, context=8192))
    assert isinstance(answer, Refusal)
    assert answer.error.code == "MD-GPU-05"
    assert answer.changes == ("--context 4096",)


def test_dense_format__fits_as_shipped__kept_unless_asked_for() -> None:
    machine = with_sizes(80 * GIB, 256 * GIB)
    stored = planned(machine, "glm-5.2")
    assert stored.dense_format is DenseFormat.STORED
    rounded = planned(machine, "glm-5.2", replace(AUTO, dense_format="int8"))
    assert rounded.dense_format is DenseFormat.INT8
    assert rounded.bytes.dense < 0.6 * stored.bytes.dense
    assert rounded.tiers.base_slots > stored.tiers.base_slots
    assert rounded.forecast.tok_per_s > stored.forecast.tok_per_s


def test_dense_format__stored_is_asked_for_and_does_not_fit__refused() -> None:
    answer = plan_model(DESK, MODELS["glm-5.2"], replace(AUTO, dense_format="stored"))
    assert isinstance(answer, Refusal)
    assert answer.error.code == "MD-GPU-05"
