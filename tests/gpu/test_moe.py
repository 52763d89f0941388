"""The MoE part of a step on a GPU: bits of the reference, both branches, any company of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference
from moet_desk.kernels.kinds import Activations, Glu, Score
from moet_desk.kernels.mailbox import MAILBOX, Answer, Request, answer, read_request
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, claim, lookup
from moet_desk.kernels.triton.experts import Tile
from moet_desk.kernels.triton.fetch import (
    READ_FAILED,
    TIMED_OUT,
    Arena,
    Mailbox,
    fetch,
    post,
    wait,
)
from moet_desk.kernels.triton.grouped import (
    RowAddresses,
    add_rows,
    expand,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    make_batch,
)
from moet_desk.kernels.triton.quant import planar_shape, rms_norm_quantize
from moet_desk.kernels.triton.route import route
from moet_desk.kernels.triton.routed_lookup import Routing, does_both, route_and_look_up
from tests.kernels.makers import Expert, quads_expert, random_expert
from tests.kernels.triton import twin_cache
from tests.kernels.triton.moe_makers import (
    Step,
    StepOutput,
    code_values,
    down_columns,
    expanded,
    plain_codes,
    planar_codes,
    random_bias,
    random_step,
    run_step,
    wanted_bytes,
    wanted_columns,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = "cuda"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def assert_same_bits(got: StepOutput, want: StepOutput) -> None:
    for field in fields(StepOutput):
        assert torch.equal(getattr(got, field.name), getattr(want, field.name)), field.name


def alone(step: Step, t: int) -> Step:
    part = slice(t, t + 1)
    return Step(step.experts, step.ids[part], step.x[part], step.weights[part], step.fine)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize(("hidden", "inter"), [(512, 128), (2880, 96), (160, 2080)])
def test_experts__shapes__bits_of_the_reference(hidden: int, inter: int, fine: bool) -> None:
    step = random_step(hidden, inter, 2, 2, fine=fine, n_experts=3)
    got = run_step(step, device=GPU)
    products = step.products().view(-1, 2 * inter)
    want = reference.swiglu(products[:, :inter], products[:, inter:])
    assert torch.allclose(got.hidden, want, rtol=2e-6, atol=0.0)
    q, s = reference.quantize_activations(got.hidden, step.kind)
    assert torch.equal(code_values(got.codes), q)
    assert torch.equal(got.scales, s)
    down = step.down_products(got.codes, got.scales)
    assert torch.equal(got.part, down.view(got.part.shape))
    assert torch.equal(got.out, reference.combine(down, step.weights))


@pytest.mark.parametrize("fine", [False, True])
def test_experts__without_ptx__same_bits(fine: bool) -> None:
    step = random_step(512, 128, 3, 3, fine=fine)
    step.bias, glu = random_bias(step.layout, len(step.experts)), Glu(2.0, 1.702, 1.0)
    with_ptx = run_step(step, device=GPU, glu=glu)
    assert_same_bits(run_step(step, device=GPU, glu=glu, ptx=False), with_ptx)


@pytest.mark.parametrize("fine", [False, True])
def test_experts__eight_tokens__each_as_alone(fine: bool) -> None:
    step = random_step(1056, 128, 8, 4, fine=fine, n_experts=10)
    together = run_step(step, device=GPU)
    for t in range(8):
        got = run_step(alone(step, t), device=GPU)
        assert torch.equal(got.part, together.part[4 * t : 4 * t + 4])
        assert torch.equal(got.out[0], together.out[t])


@pytest.mark.parametrize("fine", [False, True])
def test_experts__any_tile__same_bits(fine: bool) -> None:
    step = random_step(2048, 256, 2, 3, fine=fine)
    want = run_step(step, device=GPU)
    for gate_up, down in ((Tile(4, 1), Tile(32, 4)), (Tile(32, 8), Tile(8, 2))):
        assert_same_bits(run_step(step, device=GPU, gate_up=gate_up, down=down), want)


@pytest.mark.parametrize("fine", [False, True])
def test_experts__nan_in_one_token__that_token_only(fine: bool) -> None:
    step = random_step(512, 128, 2, 2, fine=fine)
    clean = run_step(step, device=GPU).out
    step.x[1, 70] = float("nan")
    got = run_step(step, device=GPU).out
    assert got[1].isnan().all()
    assert torch.equal(got[0], clean[0])


@pytest.mark.parametrize("fine", [False, True])
def test_expand__every_quad_of_nibbles_in_every_word__the_bytes_of_the_cpu(fine: bool) -> None:
    expert = quads_expert(16384, 128, scale=120, turns=range(8))  # down holds each quad 8 times
    want = wanted_bytes(expert, fine=fine)
    for ptx in (True, False):
        got = expanded(expert, device=GPU, fine=fine, ptx=ptx)
        assert all(map(torch.equal, got, want)), ptx


LARGEST_SCALE = 251  # a kernel doubles FP4 values before it scales: 12 * 2**124 is finite


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("turn", range(8))
def test_down__every_quad_of_nibbles_and_every_scale__the_weights_of_the_cpu(
    turn: int, fine: bool
) -> None:
    columns = list(range(128))
    for scale in range(turn, LARGEST_SCALE + 1, 8):
        expert = quads_expert(2048, 128, scale=scale, turns=[turn])
        split = expert.layout.gate_up.n * expert.layout.gate_up.k
        slot = expert.fine_slot() if fine else expert.base_slot()
        want = slot[split:].view(128, 2048)
        assert torch.equal(want, wanted_columns(expert, columns, fine=fine)), scale
        for ptx in (True, False) if scale < 16 else (True,):
            got = down_columns(expert, columns, device=GPU, fine=fine, ptx=ptx)
            assert torch.equal(got, want), (scale, ptx)


KINDS = pytest.mark.parametrize("kind", list(Activations), ids=lambda kind: kind.name)


@KINDS
def test_quantize_rows__random__bits_of_the_reference(kind: Activations) -> None:
    x = torch.randn(64, 4096) * torch.logspace(-18, 18, 64)[:, None]
    x[3, 64:128] = 0.0
    want, want_scales = reference.quantize_activations(x, kind)
    for codes, scales in (plain_codes(x.cuda(), kind), planar_codes(x.cuda(), kind)):
        assert torch.equal(code_values(codes).cpu(), want)
        assert torch.equal(scales.cpu(), want_scales)


@KINDS
@pytest.mark.parametrize("width", [512, 2880, 4096, 6144])
def test_rms_norm_quantize__rows__close_and_the_same_alone(width: int, kind: Activations) -> None:
    x, weight = torch.randn(5, width).cuda() * 3, torch.randn(width).cuda()
    out, scales = torch.empty_like(x), torch.empty(5, width // 32).cuda()
    codes = torch.empty(5, *planar_shape(width, kind), dtype=torch.int32, device=GPU)
    rms_norm_quantize(x, weight, 1e-6, out=out, codes=codes, scales=scales)
    want = reference.rms_norm(x.cpu(), weight.cpu(), 1e-6)
    assert torch.allclose(out.cpu(), want, rtol=2e-6, atol=1e-6)
    again, again_scales = planar_codes(out, kind)
    assert torch.equal(codes, again)
    assert torch.equal(scales, again_scales)
    one = torch.empty_like(out[:1])
    rms_norm_quantize(x[2:3], weight, 1e-6, out=one, codes=codes, scales=scales)
    assert torch.equal(one[0], out[2])


ROUTERS = [
    (256, 8, Score.SIGMOID, 8, 4),
    (256, 6, Score.SQRT_SOFTPLUS, 1, 1),
    (128, 8, Score.SOFTMAX, 1, 1),
    (128, 4, Score.TOPK_SOFTMAX, 1, 1),
    (512, 16, Score.SOFTMAX, 1, 1),
]


@pytest.mark.parametrize(("n_experts", "top_k", "score", "n_groups", "kept"), ROUTERS)
def test_route__every_kind__ids_equal_and_weights_close(
    n_experts: int, top_k: int, score: Score, n_groups: int, kept: int
) -> None:
    logits, bias = torch.randn(32, n_experts) * 2, torch.randn(n_experts) * 0.1
    logits[5, 3] = float("nan")
    ids = torch.empty(32, top_k, dtype=torch.int32, device=GPU)
    weights = torch.empty(32, top_k, device=GPU)
    options = {
        "score": score,
        "n_groups": n_groups,
        "kept_groups": kept,
        "renormalize": True,
        "scale": 2.5,
    }
    route(logits.cuda(), bias.cuda(), ids=ids, weights=weights, **options)  # type: ignore[arg-type]
    want_ids, want = reference.route(
        logits,
        top_k=top_k,
        selection_bias=bias,
        **options,  # type: ignore[arg-type]
    )
    rows = torch.arange(32) != 5
    assert torch.equal(ids.cpu().long()[rows], want_ids[rows])
    assert torch.allclose(weights.cpu()[rows], want[rows], rtol=1e-5, atol=1e-7)
    assert weights[5].isnan().all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < n_experts


@pytest.mark.parametrize(
    ("n_tokens", "top_k", "n_slots"), [(1, 6, 40), (1, 8, 600), (3, 8, 90), (8, 8, 300)]
)
def test_lookup__many_steps__every_table_as_the_twin(
    n_tokens: int, top_k: int, n_slots: int
) -> None:
    tables = GpuTables.empty(4, 256, n_slots, device=GPU)
    twin = GpuTables.empty(4, 256, n_slots, device="cpu")
    out = LookupOutput.empty(n_tokens, top_k, device=GPU)
    for _ in range(25):
        for layer in range(4):
            scores = torch.rand(n_tokens, 256) - torch.arange(256) / 200
            ids = scores.topk(top_k, dim=1).indices.int()
            want = twin_cache.lookup(ids, twin, layer, ends_step=layer == 3)
            lookup(ids.cuda(), tables, layer=layer, out=out, ends_step=layer == 3)
            assert torch.equal(out.uniq_slot.cpu(), want.uniq_slot)
            assert torch.equal(out.uniq_pair.cpu(), want.uniq_pair)
            n_missed = int(out.miss_n)
            assert out.miss_row[:n_missed].tolist() == [row for row, _ in want.misses]
            assert out.miss_slot[:n_missed].tolist() == [slot for _, slot in want.misses]
    for field in fields(GpuTables):
        got, expected = getattr(tables, field.name), getattr(twin, field.name)
        if isinstance(got, Tensor) and field.name != "free":
            assert torch.equal(got.cpu(), expected), field.name


@pytest.mark.parametrize(("n_experts", "top_k", "score", "n_groups", "kept"), ROUTERS)
@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_route_and_look_up__rows__bits_of_launches_one_by_one(
    n_experts: int, top_k: int, score: Score, n_groups: int, kept: int, n_tokens: int,
    fetches: bool,
) -> None:  # fmt: skip
    if not does_both(n_tokens, n_experts, top_k):
        return
    bias = torch.randn(n_experts, device=GPU) * 0.1
    both, each = (GpuTables.empty(1, n_experts, 3 * top_k, device=GPU) for _ in range(2))
    memory = torch.randint(0, 256, (n_experts, 1 << 16), dtype=torch.uint8).pin_memory()
    places = torch.arange(n_experts, dtype=torch.int32, device=GPU)
    arena = Arena(memory.data_ptr(), places, 1 << 16)
    slots = torch.zeros(3 * top_k, 1 << 16, dtype=torch.uint8, device=GPU)
    whole = {"slots": slots, "arena": arena} if fetches else {}
    for _ in range(20):
        logits = torch.randn(3, n_experts, device=GPU) * 3
        ids, weights = torch.zeros(3, top_k, device=GPU).int(), torch.zeros(3, top_k, device=GPU)
        route(
            logits, bias, ids=ids, weights=weights, score=score, n_groups=n_groups,
            kept_groups=kept, renormalize=True, scale=2.5,
        )  # fmt: skip
        found = [LookupOutput.empty(n_tokens, top_k, device=GPU) for _ in range(2)]
        lookup(ids[:n_tokens], each, layer=0, out=found[1], ends_step=True)
        own, counts = torch.zeros_like(ids[:n_tokens]), torch.zeros_like(weights[:n_tokens])
        routing = Routing(logits[:n_tokens], bias, counts, score, n_groups, kept, True, 2.5)
        route_and_look_up(routing, own, both, layer=0, out=found[0], ends_step=True, **whole)
        assert int(found[0].waiting) == 0
        assert torch.equal(own, ids[:n_tokens])
        assert torch.equal(counts, weights[:n_tokens])
        assert torch.equal(found[0].uniq_slot, found[1].uniq_slot)
        assert torch.equal(found[0].uniq_pair, found[1].uniq_pair)
    assert torch.equal(both.warmth, each.warmth)
    assert torch.equal(both.counters, each.counters)
    held = torch.nonzero(both.owner >= 0).flatten()
    rows = memory[both.owner[held].long().cpu()]
    assert not fetches or torch.equal(slots[held].cpu(), rows)


class Disk:
    """Eight rows, two of them in a pinned arena, and a host that answers when asked to."""

    stride = 1 << 20

    def __init__(self) -> None:
        self.rows = torch.randint(0, 256, (8, self.stride), dtype=torch.uint8)
        self.arena_bytes = torch.zeros(6, self.stride, dtype=torch.uint8).pin_memory()
        self.arena_bytes[:2] = self.rows[:2]
        page = torch.zeros(MAILBOX.n_words, dtype=torch.int32).pin_memory()
        self.words = page.numpy()
        self._page = page
        self.error = torch.zeros(1, dtype=torch.int32, device=GPU)
        place_of = torch.tensor([0, 1, *[-1] * 6], dtype=torch.int32, device=GPU)
        self.arena = Arena(self.arena_bytes.data_ptr(), place_of, self.stride)
        self.mailbox = Mailbox.at(page.data_ptr(), error=self.error)
        self.tables = GpuTables.empty(1, 8, 6, device=GPU)
        self.pool = torch.zeros(6, self.stride, dtype=torch.uint8, device=GPU)
        self.out = LookupOutput.empty(1, 4, device=GPU)

    def launch(self, ids: list[int], *, limit_ns: int = 900_000_000) -> None:
        """A layer's chain; returns while the device may still be waiting."""
        chosen = torch.tensor([ids], dtype=torch.int32, device=GPU)
        lookup(chosen, self.tables, layer=0, out=self.out, ends_step=True)
        post(self.mailbox, self.arena, self.out, layer=0)
        rows = {"miss_row": self.out.miss_row, "miss_slot": self.out.miss_slot}
        fetch(self.pool, self.arena, self.out.miss_n, **rows)
        wait(self.mailbox, self.arena, self.tables, limit_ns=limit_ns)
        late = {"miss_row": self.mailbox.late_row, "miss_slot": self.mailbox.late_slot}
        fetch(self.pool, self.arena, self.mailbox.late_n, **late)

    def request(self) -> Request:
        last = int(self.words[MAILBOX.done])
        while (found := read_request(self.words, last)) is None:
            pass
        return found

    def serve(self, status: Answer = Answer.READ) -> Request:
        found = self.request()
        places = [2 + i for i in range(len(found.rows))]
        for row, place in zip(found.rows, places, strict=True):
            self.arena_bytes[place] = self.rows[row]
        dropped = [-1] * len(places)
        answer(self.words, found, status=status, places=places, dropped=dropped)
        return found

    def check(self) -> None:
        for slot, row in enumerate(self.tables.owner.tolist()):
            if row >= 0:
                assert torch.equal(self.pool[slot].cpu(), self.rows[row])


@pytest.fixture
def disk() -> Iterator[Disk]:
    world = Disk()
    world.launch([0, 1, -1, -1])  # compiles everything: a wait must not count that
    torch.cuda.synchronize()
    yield world
    torch.cuda.synchronize()


def test_fetch__rows_in_ram_and_on_disk__all_arrive(disk: Disk) -> None:
    disk.check()
    disk.launch([1, 5, 3, 0])
    request = disk.serve()
    torch.cuda.synchronize()
    assert request.rows == (5, 3)
    assert int(disk.error) == 0
    disk.check()
    assert disk.arena.place_of[[5, 3]].tolist() == [2, 3]


def test_wait__no_answer__times_out_and_frees_the_slots(disk: Disk) -> None:
    disk.launch([1, 5, 3, 0], limit_ns=3_000_000)
    torch.cuda.synchronize()
    assert int(disk.error) == TIMED_OUT
    assert sorted(disk.tables.owner.tolist()) == [-1, -1, -1, -1, 0, 1]
    disk.launch([6, 5, 3, 0])  # does not ask again while the error word is set
    torch.cuda.synchronize()
    assert int(disk.words[MAILBOX.posted]) == 1


def test_wait__read_error__step_fails_and_the_next_works(disk: Disk) -> None:
    disk.launch([1, 5, 3, 0])
    disk.serve(Answer.FAILED)
    torch.cuda.synchronize()
    assert int(disk.error) == READ_FAILED
    disk.error.zero_()
    disk.launch([1, 5, 3, 0])
    disk.serve()
    torch.cuda.synchronize()
    assert int(disk.error) == 0
    disk.check()
    assert int((disk.tables.owner >= 0).sum()) == 4


def test_chain__captured__replays_with_new_misses(disk: Disk) -> None:
    tables = disk.tables
    ids = torch.tensor([[0, 1, -1, -1]], dtype=torch.int32, device=GPU)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        lookup(ids, tables, layer=0, out=disk.out, ends_step=True)
        rows = {"miss_row": disk.out.miss_row, "miss_slot": disk.out.miss_slot}
        fetch(disk.pool, disk.arena, disk.out.miss_n, **rows)
    disk.arena_bytes[2:] = disk.rows[2:6]
    disk.arena.place_of[2:6] = torch.arange(2, 6, dtype=torch.int32, device=GPU)
    for chosen in ([2, 3, 4, 5], [5, 4, 1, 0], [2, 0, 3, 1]):
        ids.copy_(torch.tensor([chosen], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        disk.check()
        assert {int(row) for row in tables.owner} >= set(chosen)


def test_claim__then_lookup__hits() -> None:
    tables = GpuTables.empty(2, 16, 8, device=GPU)
    claim(tables, [17, 20, 3])
    out = LookupOutput.empty(1, 2, device=GPU)
    lookup(torch.tensor([[1, 4]], dtype=torch.int32, device=GPU), tables, layer=1, out=out)
    assert int(out.miss_n) == 0
    assert out.uniq_slot.tolist() == [0, 1]


def stacked_rows(experts: list[Expert], *, fine: bool) -> tuple[RowAddresses, list[Tensor]]:
    base = torch.stack([e.base_row for e in experts]).cuda()
    digits = torch.stack([e.fine_row for e in experts]).cuda()

    def addresses(rows: Tensor) -> Tensor:
        first, stride = rows.data_ptr(), rows.stride(0)
        return torch.tensor([first + i * stride for i in range(len(rows))], device=GPU)

    rows = RowAddresses(experts[0].layout, addresses(base), addresses(digits) if fine else None)
    return rows, [base, digits]


@pytest.mark.parametrize(
    ("fine", "kind"),
    [(False, Activations.INT8), (True, Activations.INT15), (True, Activations.INT8)],
)
@pytest.mark.parametrize("pairs", [16, 32, 64, 128])
def test_grouped__chunk__as_the_reference(pairs: int, fine: bool, kind: Activations) -> None:
    n_experts, n_tokens, top_k = 4, 150, 2
    experts = [random_expert(512, 160, low=118, high=122) for _ in range(n_experts)]
    layout = experts[0].layout
    rows, _kept = stacked_rows(experts, fine=fine)
    ids = torch.rand(n_tokens, n_experts).topk(top_k, dim=1).indices.sort(dim=1).values
    x, weights = torch.randn(n_tokens, 512), torch.rand(n_tokens, top_k)
    groups = group_pairs(ids.cuda(), n_experts)
    batch = make_batch(groups.counts.tolist(), range(n_experts), device=GPU, pairs=pairs)
    workspace = torch.empty(n_experts, layout.slot_floats, dtype=torch.int8, device=GPU)
    expand(rows, batch, workspace)
    portable = torch.empty_like(workspace)
    expand(rows, batch, portable, ptx=False)
    assert torch.equal(portable, workspace)

    codes, scales = plain_codes(x.cuda(), kind)
    mid = torch.empty(batch.n_rows, 160, device=GPU)
    grouped_gate_up(rows, batch, workspace, groups=groups, codes=codes, scales=scales, out=mid)
    mid_codes, mid_scales = plain_codes(mid, kind)
    part = torch.empty(batch.n_rows, 512, device=GPU)
    grouped_down(rows, batch, workspace, codes=mid_codes, scales=mid_scales, out=part)
    out = torch.zeros(n_tokens, 512, device=GPU)
    add_rows(part, batch, groups, weights=weights.cuda(), out=out)

    step = Step(experts, ids, x, weights, fine)
    want = reference.combine(step.parts(kind=kind), weights)
    # A hidden value on a rounding edge may fall the other way: by one step of its codes.
    near = 2e-3 if kind is Activations.INT8 else 1e-5
    assert float((out.cpu() - want).norm() / want.norm()) < near


@pytest.mark.parametrize("fine", [False, True])
def test_grouped__any_tiles_and_batches__same_bits(fine: bool) -> None:
    kind = Activations.INT15 if fine else Activations.INT8
    experts = [random_expert(256, 64, low=118, high=122) for _ in range(4)]
    rows, _kept = stacked_rows(experts, fine=fine)
    ids = torch.rand(90, 4).topk(2, dim=1).indices.sort(dim=1).values
    x, weights = torch.randn(90, 256).cuda(), torch.rand(90, 2).cuda()
    codes, scales = plain_codes(x, kind)
    groups = group_pairs(ids.cuda(), 4)
    counts, found = groups.counts.tolist(), []
    for cuts, pairs in (([0, 4], 16), ([0, 1, 4], 128), ([0, 2, 4], 64)):
        out = torch.zeros(90, 256, device=GPU)
        for begin, end in pairwise(cuts):
            batch = make_batch(counts, range(begin, end), device=GPU, pairs=pairs)
            workspace = torch.empty(4, 3 * 256 * 64, dtype=torch.int8, device=GPU)
            expand(rows, batch, workspace)
            mid = torch.empty(batch.n_rows, 64, device=GPU)
            grouped_gate_up(
                rows, batch, workspace, groups=groups, codes=codes, scales=scales, out=mid
            )
            mid_codes, mid_scales = plain_codes(mid, kind)
            part = torch.empty(batch.n_rows, 256, device=GPU)
            grouped_down(rows, batch, workspace, codes=mid_codes, scales=mid_scales, out=part)
            add_rows(part, batch, groups, weights=weights, out=out)
        found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert np.isfinite(found[0].cpu().numpy()).all()
