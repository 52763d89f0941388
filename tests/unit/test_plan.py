"""The planner: what it hands out adds up, never exceeds the RAM, and grows with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat
from moet_desk.plan import (
    KV_PAGE_TOKENS,
    WORK_BYTES,
    ModelShape,
    TierPlan,
    Wishes,
    choose_kv_format,
    plan_tiers,
)
from moet_desk.units import GIB, MIB

DEMO = ModelShape(
    n_rows=256, top_k=4, base_stride=57344, fine_stride=61440, slot_bytes=786432,
    dense_bytes=140 * MIB, kv_token_bytes=5760, model_context=2048,
)  # fmt: skip

SHAPES = st.builds(
    ModelShape,
    n_rows=st.integers(8, 20_000),
    top_k=st.integers(1, 8),
    base_stride=st.sampled_from([4096, 57344, 7_077_888]),
    fine_stride=st.sampled_from([4096, 61440, 7_864_320]),
    slot_bytes=st.sampled_from([32768, 786432, 100_663_296]),
    dense_bytes=st.integers(0, 8 * GIB),
    kv_token_bytes=st.integers(100, 100_000),
    model_context=st.integers(64, 131_072),
)
RAM = st.integers(64 * MIB, 256 * GIB)


def bytes_of(shape: ModelShape, plan: TierPlan) -> int:
    """What a plan takes, added up without the planner."""
    slots = plan.base_slots + plan.fine_slots + 1
    rows = plan.arena_base_rows * shape.base_stride + plan.arena_fine_rows * shape.fine_stride
    kv = plan.kv_pages * KV_PAGE_TOKENS * shape.kv_token_bytes
    return shape.dense_bytes + WORK_BYTES + kv + slots * shape.slot_bytes + rows


def plan_or_none(shape: ModelShape, ram: int) -> TierPlan | None:
    """The plan, or None where the least of everything does not fit."""
    least = Wishes(base_slots=shape.top_k, fine_slots=shape.top_k, arena_rows=0)
    if bytes_of(shape, plan_tiers(shape, 2**60, least)) > ram:
        with pytest.raises(MoetError) as caught:
            plan_tiers(shape, ram, Wishes())
        assert caught.value.code == "MD-RAM-01"
        return None
    return plan_tiers(shape, ram, Wishes())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SHAPES, RAM)
def test_plan__any_model_and_machine__adds_up_and_fits_or_is_refused(
    shape: ModelShape, ram: int
) -> None:
    plan = plan_or_none(shape, ram)
    if plan is None:
        return
    assert plan.bytes_total == bytes_of(shape, plan) <= ram
    assert shape.top_k <= plan.base_slots <= max(shape.n_rows, shape.top_k)
    assert plan.arena_base_rows <= shape.n_rows


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SHAPES, RAM, st.integers(0, 64 * GIB))
def test_plan__more_ram__no_tier_gets_smaller(shape: ModelShape, ram: int, more: int) -> None:
    small = plan_or_none(shape, ram)
    if small is None:
        return
    large = plan_tiers(shape, ram + more, Wishes())
    assert large.base_slots >= small.base_slots
    assert large.fine_slots >= small.fine_slots
    assert large.arena_fine_rows >= small.arena_fine_rows
    assert large.arena_base_rows >= small.arena_base_rows
    assert large.context == small.context


def test_plan__small_model_on_a_desk__everything_resident() -> None:
    plan = plan_tiers(DEMO, 8 * GIB, Wishes())
    assert (plan.base_slots, plan.fine_slots) == (256, 256)
    assert (plan.arena_base_rows, plan.arena_fine_rows) == (256, 256)
    assert plan.context == 2048


def test_plan__rows_before_slots__when_ram_is_short() -> None:
    plan = plan_tiers(DEMO, 500 * MIB, Wishes())
    assert plan.arena_base_rows == 256  # a disk read costs more than expanding a row
    assert plan.base_slots < 256


def test_plan__wishes__taken_as_they_are() -> None:
    wishes = Wishes(context=512, base_slots=77, fine_slots=5, arena_rows=0, prefill_chunk=32)
    plan = plan_tiers(DEMO, 8 * GIB, wishes)
    assert (plan.base_slots, plan.fine_slots) == (77, 5)
    assert (plan.arena_base_rows, plan.arena_fine_rows) == (0, 0)
    assert (plan.context, plan.prefill_chunk) == (512, 32)


@pytest.mark.parametrize(
    ("wishes", "code"),
    [
        (Wishes(context=4096), "MD-PLAN-02"),
        (Wishes(base_slots=3), "MD-PLAN-03"),
        (Wishes(fine_slots=0), "MD-PLAN-03"),
    ],
)
def test_plan__impossible_wishes__refused_with_the_nearest_value(wishes: Wishes, code: str) -> None:
    with pytest.raises(MoetError) as caught:
        plan_tiers(DEMO, 8 * GIB, wishes)
    assert caught.value.code == code
    assert str(caught.value.facts.get("largest") or caught.value.facts["least"]) in (
        caught.value.do + caught.value.cause
    )


def test_plan__total_and_active_experts__memory_follows_the_total() -> None:
    """Field case: a fit tool that counted active parameters only."""
    sparse = replace(DEMO, n_rows=2560, top_k=4)
    assert plan_tiers(sparse, 64 * GIB, Wishes()).bytes_total > 9 * (
        plan_tiers(DEMO, 64 * GIB, Wishes()).bytes_total - DEMO.dense_bytes - 400 * MIB
    )


def test_kv_format__small_then_large_context__float32_then_bfloat16() -> None:
    assert choose_kv_format(5760, 8192, 8 * GIB) is KvFormat.F32
    assert choose_kv_format(140_544, 131_072, 64 * GIB) is KvFormat.BF16
