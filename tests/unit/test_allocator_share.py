"""The planner's reserve for a device's allocator, against that allocator's rules played through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from moet_desk.engine.cuda import synthetic
from moet_desk.engine.cuda.chunk_sizes import chunk_bytes, stage_bytes
from moet_desk.engine.cuda.measure import Setup
from moet_desk.engine.cuda.shapes import KNOWN, SHAPES
from moet_desk.engine.cuda.synthetic import stored_bytes
from moet_desk.engine.families.tensors import NGRAM_TABLES, dense_shapes
from moet_desk.plan import (
    ALLOCATOR_SHARE,
    WORK_BYTES,
    DeviceBudget,
    ModelShape,
    Wishes,
    device_work,
    plan_device_tiers,
    tier_bytes,
)
from moet_desk.units import GIB, MIB

JOINED = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj")


def matrices_of(name: str) -> list[int]:
    """Bytes of each dense matrix in the order that they are loaded, with those that one launch
    reads joined. Tables of n-grams stay off the device.
    """
    shape, found = SHAPES[name](64), dict[str, int]()
    for tensor, size in dense_shapes(shape.spec):
        head, _, last = tensor.rpartition(".")
        place = f"{head}.joined" if last in JOINED else tensor
        if len(size) > 1 and not tensor.startswith(NGRAM_TABLES):
            n_bytes = stored_bytes(tensor, size, is_fp8=shape.is_fp8, is_rounded=shape.is_rounded)
            found[place] = found.get(place, 0) + n_bytes
    return list(found.values())


def reserved(sizes: Iterable[int]) -> int:
    """What torch's allocator takes of a device for these, one after the other, none ever freed.

    Above 1 MiB: the smallest gap that is large enough, else a piece of 20 MiB, or for 10 MiB and
    more one rounded up to 2 MiB. Of what is left of it, more than 1 MiB is used further.
    """
    gaps: list[int] = []
    total = 0
    for size in sizes:
        n = -(-size // 512) * 512
        fits = [gap for gap in gaps if gap >= n]
        if fits:
            taken = min(fits)
            gaps.remove(taken)
        else:
            taken = 20 * MIB if n < 10 * MIB else -(-n // (2 * MIB)) * 2 * MIB
            total += taken
        if taken - n > MIB:
            gaps.append(taken - n)
    return total


@pytest.mark.parametrize("name", KNOWN)
def test_dense_weights__as_the_allocator_places_them__within_the_share(name: str) -> None:
    sizes = [size for size in matrices_of(name) if size > MIB]
    lost = reserved(sizes) - sum(sizes)
    assert 0 <= lost <= ALLOCATOR_SHARE * sum(sizes) + 32 * MIB


def test_dense_weights__of_the_worst_model__work_bytes_alone_would_not_do() -> None:
    sizes = [size for size in matrices_of("glm-4.7") if size > MIB]
    assert reserved(sizes) - sum(sizes) > WORK_BYTES


@pytest.mark.parametrize("name", KNOWN)
def test_bench__each_shape_in_32_gib__everything_fits_as_the_allocator_places_it(name: str) -> None:
    setup = Setup(
        SHAPES[name](8192), torch.device("cpu"), 32 * GIB, context=8192, prefill=8192
    )  # fmt: skip
    spec, context = setup.shape.spec, setup.kv_pages * 64
    buffers = [
        context * setup.kv_token_bytes, setup.n_slots() * setup.layout.base_stride,
        4 * synthetic._PIECE_FLOATS, chunk_bytes(spec, setup.chunk, context=context),
        stage_bytes(setup.layout, spec.moe_ffn.router.n_experts) + setup.ahead_bytes,
    ]  # fmt: skip
    taken = reserved([*buffers, *matrices_of(name)])
    graphs = 256 * MIB
    assert taken + graphs <= 32 * GIB


def test_plan__larger_dense_weights__more_is_left_to_the_allocator() -> None:
    shape = ModelShape(
        n_rows=64, top_k=2, base_stride=MIB, fine_stride=MIB, slot_bytes=0, dense_bytes=0,
        kv_token_bytes=100, model_context=512,
    )  # fmt: skip
    wishes, budget = Wishes(base_slots=16, fine_slots=16), DeviceBudget(32 * GIB, GIB)
    totals = []
    for dense in (0, 16 * GIB):
        plan = plan_device_tiers(replace(shape, dense_bytes=dense), budget, wishes)
        sizes = tier_bytes(replace(shape, dense_bytes=dense), plan, wishes, on_device=True)
        assert sizes.work == device_work(dense)
        assert sizes.total == plan.bytes_total
        totals.append(plan.bytes_total)
    assert totals[1] - totals[0] == 16 * GIB + int(ALLOCATOR_SHARE * 16 * GIB)
