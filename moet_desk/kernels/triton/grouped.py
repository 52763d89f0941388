"""Experts of a prompt chunk: pairs sorted by expert, weights decoded once, grouped products.

Owns the products and the tables that steer them. `expand` decodes a batch of rows to int8 in a
workspace (25 MB an expert of 4096 x 2048); every tile of pairs then reads it, mostly from L2. A
block of 32 goes through the int8 tensor cores, exact in int32, for activations of 15 bits twice;
float32 adds blocks in order. Twin: `reference.expert_mlp`, which adds in another order: results
agree to float32's rounding, and from run to run bit for bit, whatever the batches are.

The codes' shape says of how many bits they are (`triton.quant`), whatever the weights are: FP4
weights with int8 codes are the quick way through a prompt, with 15 bits the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import SWIGLU, Glu
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.expert_math import block_words, power_of_two
from moet_desk.kernels.triton.experts import gated
from moet_desk.kernels.triton.portable import PTX, product
from moet_desk.kernels.triton.quant import is_wide
from moet_desk.kernels.triton.tile_table import GroupedTile, capability_of, grouped_row

_EXPAND_BLOCKS = 256
"""Blocks of 32 weights per program of `expand`: one per thread, 8 KiB written."""

_ADD_FLOATS = 1024
"""A program's share of a token's row: two float4 per thread."""


_UNROLL = 2
"""Most blocks of 32 inputs that a program multiplies between two waits for memory (4: slower)."""


@dataclass(frozen=True, slots=True)
class RowAddresses:
    """Where rows of a layer's experts lie on the device: pool slots or staging, mixed freely.

    Attributes:
        layout: sizes of an expert.
        base: int64 [E], address of each expert's base row; a multiple of 16.
        fine: int64 [E] likewise for fine rows, or None for 2-bit weights.
    """

    layout: ExpertLayout
    base: Tensor
    fine: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PairGroups:
    """A chunk's pairs in order of expert.

    Attributes:
        order: int32 [R], the pair t * K + k of each sorted row.
        tokens: int32 [R], its token.
        position: int32 [M, K], the sorted row of each pair.
        counts: int64 [E] on the device, pairs of each expert.
    """

    order: Tensor
    tokens: Tensor
    position: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Experts that are computed together: whose rows are there, and their pairs in tiles.

    Attributes:
        experts: int32 [n] on the device.
        tiles: int32 [tiles, 4] on the device: expert, its place in `experts`, first row counted
            from the batch's first, rows in use.
        pairs: most rows of a tile.
        first: first sorted row of the batch.
        n_rows: its sorted rows.
    """

    experts: Tensor
    tiles: Tensor
    pairs: int
    first: int
    n_rows: int


def group_pairs(ids: Tensor, n_experts: int) -> PairGroups:
    """Sort pairs by expert; pairs of one expert stay in order of token. Allocates, does not wait.

    Shapes:
        ids [M, K] any integer type
    """
    n_tokens, top_k = ids.shape
    experts, order = torch.sort(ids.reshape(-1), stable=True)
    bounds = torch.arange(n_experts + 1, device=ids.device, dtype=ids.dtype)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=ids.device)
    return PairGroups(
        order=order.int(),
        tokens=(order // top_k).int(),
        position=position.view(n_tokens, top_k).int(),
        counts=torch.searchsorted(experts, bounds).diff(),  # bincount would wait for the device
    )


def cut_batches(counts: Sequence[int], *, experts: int, pairs: int) -> list[range]:
    """Neighbouring experts in batches of at most `experts` used ones and `pairs` pairs.

    A batch has one expert at least, so `pairs` must not be below the largest count.
    """
    batches: list[range] = []
    begin = n_used = n_pairs = 0
    for expert, count in enumerate(counts):
        if count and n_used and (n_used == experts or n_pairs + count > pairs):
            batches.append(range(begin, expert))
            begin, n_used, n_pairs = expert, 0, 0
        n_used += count > 0
        n_pairs += count
    if n_used:
        batches.append(range(begin, len(counts)))
    return batches


def make_batch(
    counts: Sequence[int], experts: range, *, device: torch.device | str, pairs: int | None = None
) -> Batch:
    """Cut some neighbouring experts' pairs into tiles. Allocates and copies to the device.

    Args:
        counts: pairs of each expert of the layer.
        experts: which experts; those without pairs are left out.
        device: where the kernels run.
        pairs: most rows of a tile; by default what suits the mean count.
    """
    used, tiles, size, first, n_rows = _cut_tiles(counts, experts, pairs)
    return Batch(
        experts=torch.tensor(used, dtype=torch.int32).to(device),
        tiles=torch.tensor(tiles, dtype=torch.int32).view(-1, 4).to(device),
        pairs=size,
        first=first,
        n_rows=n_rows,
    )


def make_batches(
    counts: Sequence[int], pieces: Sequence[range], to_device: Callable[[Tensor], Tensor]
) -> list[Batch]:
    """`make_batch` of each of several pieces, whose tables come to the device in one copy."""
    cuts = [_cut_tiles(counts, experts, None) for experts in pieces]
    flat = [number for used, tiles, *_ in cuts for number in chain(used, tiles)]
    table, at, batches = to_device(torch.tensor(flat, dtype=torch.int32)), 0, []
    for used, tiles, size, first, n_rows in cuts:
        middle, end = at + len(used), at + len(used) + len(tiles)
        tiled = table[middle:end].view(-1, 4)
        batches.append(Batch(table[at:middle], tiled, size, first, n_rows))
        at = end
    return batches


def _cut_tiles(
    counts: Sequence[int], experts: range, pairs: int | None
) -> tuple[list[int], list[int], int, int, int]:
    """Experts that are used, the numbers of their tiles, most rows of one, and the batch's first
    row and rows.
    """
    used = [expert for expert in experts if counts[expert]]
    n_rows = sum(counts[expert] for expert in used)
    size = pairs or tile_pairs(n_rows // max(1, len(used)))
    tiles, begin = list[int](), 0
    for place, expert in enumerate(used):
        count = counts[expert]
        for at in range(0, count, size):
            tiles += (expert, place, begin + at, min(size, count - at))
        begin += count
    return used, tiles, size, sum(counts[: experts.start]), n_rows


def tile_pairs(mean: int) -> int:
    """Pairs per tile for experts with `mean` pairs: little padding, few repeats of the weights."""
    return 16 if mean <= 16 else 32 if mean <= 32 else 64 if mean <= 96 else 128


FULL_PAIRS = 128
"""Pairs of a full tile: those that the table's rows were measured with."""


def grouped_tile(
    layout: ExpertLayout, *, pairs: int, wide: bool, has_gate: bool, capability: str = ""
) -> GroupedTile:
    """How the products of a prompt are cut: full tiles as measured on cards of this capability
    (`tile_table`), others by a rule. Results do not depend on it.
    """
    if pairs == FULL_PAIRS:
        known = grouped_row(layout, wide=wide, capability=capability)
        if known is not None:
            return known.gate_up if has_gate else known.down
    rows = (64 if has_gate else 128) // (2 if pairs > 64 else 1)
    return GroupedTile(rows, warps=4, stages=3)


@triton.jit
def _row(address, expert, OFFSET: tl.constexpr):
    """A matrix of an expert's row, as a pointer to bytes."""
    row = tl.load(address + expert) + OFFSET
    return tl.multiple_of(row.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def _expand_kernel(
    base, fine, experts, out,
    BLOCKS: tl.constexpr, BASE_OFFSET: tl.constexpr, FINE_OFFSET: tl.constexpr,
    OUT_OFFSET: tl.constexpr, OUT_STRIDE: tl.constexpr,
    B: tl.constexpr, FINE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1)
    expert = tl.load(experts + place)
    b = tl.program_id(0) * B + tl.arange(0, B)[:, None]  # [B, 1]
    inside = b < BLOCKS
    words = _row(base, expert, BASE_OFFSET).to(tl.pointer_type(tl.int32))
    w = (
        tl.load(words + b, mask=inside, other=0),
        tl.load(words + BLOCKS + b, mask=inside, other=0),
    )
    if FINE:
        digits = _row(fine, expert, FINE_OFFSET)
        low = digits.to(tl.pointer_type(tl.int32))
        top = (digits + 8 * BLOCKS).to(tl.pointer_type(tl.uint16))
        w = w + (
            tl.load(low + b, mask=inside, other=0),
            tl.load(low + BLOCKS + b, mask=inside, other=0),
            tl.load(top + b, mask=inside, other=0).to(tl.int32),
        )
    quads = tl.reshape(block_words(w, FINE, PTX), [B, 8])
    at = place.to(tl.int64) * OUT_STRIDE + OUT_OFFSET
    at += tl.arange(0, 8)[None, :] + 8 * (tl.program_id(0) * B + tl.arange(0, B))[:, None]
    tl.store(out + at, quads, mask=inside)


@triton.jit
def _add_block(w, x, low, e, s, total, WIDE: tl.constexpr):
    """total + the scaled products of a block; fused by word, so that no tile size rounds else.

    A sum that begins at the bits of 1.5 * 2**23 is, while it stays within 2**22, a float32 with the
    same unit: taking that number away is exact and four times as quick as a conversion. 32 products
    of int8 activations with weights of up to 12 stay below 2**16.
    """
    if WIDE:
        dot = tl.dot(w, low, tl.dot(w, x, out_dtype=tl.int32) << 8, out_dtype=tl.int32)
        value = dot.to(tl.float32)
    else:
        begin = tl.full([w.shape[0], x.shape[1]], 0x4B400000, tl.int32)
        dot = tl.dot(w, x, begin, out_dtype=tl.int32)
        value = dot.to(tl.float32, bitcast=True) - 12582912.0
    return tl.fma(value, e[:, None] * s[None, :], total)


@triton.jit
def _neighbours(at, inside, COUNT: tl.constexpr):
    """What lies at, at + 1, ... of each row: a tuple of COUNT (1 or 2)."""
    # Both at once, unless a thread of four warps would get one of them: they would be exchanged
    # through shared memory, and waited for there.
    ROWS: tl.constexpr = at.shape[0]
    if COUNT == 1:
        return (tl.load(at, mask=inside, other=0),)
    elif ROWS < 64 or ROWS >= 128:
        here = at[:, None] + tl.arange(0, 2)[None, :]
        return tl.split(tl.load(here, mask=inside[:, None], other=0))
    else:
        return tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)


@triton.jit
def _scales(
    s_at, e_at, g0, inside, real, UP: tl.constexpr, GATED: tl.constexpr, UNROLL: tl.constexpr
):
    """Of UNROLL blocks from g0 on: scales of activations, exponents of gates and of ups."""
    e = _neighbours(e_at + g0, real, UNROLL)
    e_up = e
    if GATED:
        e_up = _neighbours(e_at + UP + g0, real, UNROLL)
    return _neighbours(s_at + g0, inside, UNROLL), e, e_up


@triton.jit(do_not_specialize=["shift"])
def _grouped_kernel(
    weights, base, tiles, tokens, codes, scales, out, limit, bias, shift,
    N: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr, B: tl.constexpr, P: tl.constexpr, FINE: tl.constexpr,
    WIDE: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr, ALPHA: tl.constexpr,
    SHIFT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if WIDE else 1
    tile = tiles + 4 * tl.program_id(1)
    expert, place = tl.load(tile), tl.load(tile + 1)
    first, n_pairs = tl.load(tile + 2), tl.load(tile + 3)
    p = tl.arange(0, P)
    inside = p < n_pairs
    source = (first + p).to(tl.int64)
    if GATED:  # activations of a chunk's tokens; those of `down` are the batch's rows
        source = tl.load(tokens + shift + first + p, mask=inside, other=0).to(tl.int64)
    k = tl.arange(0, 32)
    x_at = codes + source[:, None] * (32 * G * PARTS) + k[None, :]
    s_at = scales + source * G
    n = tl.program_id(0) * B + tl.arange(0, B)
    real = n < N
    w_at = weights + place.to(tl.int64) * STRIDE + OFFSET + n[:, None] * (32 * G) + k[None, :]
    e_at = _row(base, expert, SCALE_OFFSET) + n * G

    total = tl.zeros([B, P], tl.float32)
    total_up = tl.zeros([B, P], tl.float32)
    s, e, e_up = _scales(s_at, e_at, 0, inside, real, N * G, GATED, UNROLL)
    for g0 in range(0, G, UNROLL):
        # Those of the next blocks: a few bytes of each row, too small to be brought ahead with the
        # weights, and asked for here they would hold up what is added.
        ahead = tl.multiple_of(tl.minimum(g0 + UNROLL, G - UNROLL), UNROLL)
        next_s, next_e, next_up = _scales(s_at, e_at, ahead, inside, real, N * G, GATED, UNROLL)
        for u in tl.static_range(UNROLL):
            g = g0 + u
            x = tl.trans(tl.load(x_at + 32 * g, mask=inside[:, None], other=0))
            low = x
            if WIDE:
                low = tl.trans(tl.load(x_at + 32 * (G + g), mask=inside[:, None], other=0))
            w = tl.load(w_at + 32 * g, mask=real[:, None], other=0)
            total = _add_block(w, x, low, power_of_two(e[u]), s[u], total, WIDE)
            if GATED:
                w = tl.load(w_at + N * (32 * G) + 32 * g, mask=real[:, None], other=0)
                total_up = _add_block(w, x, low, power_of_two(e_up[u]), s[u], total_up, WIDE)
        s, e, e_up = next_s, next_e, next_up
    if FINE:  # weights were doubled
        total *= 0.5
        total_up *= 0.5
    if bias is not None:
        own = bias + expert.to(tl.int64) * (2 * N if GATED else N) + n
        total += tl.load(own, mask=real, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(own + N, mask=real, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = gated(total, total_up, limit, LIMITED, ALPHA, SHIFT)
    at = (first + p).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + at, tl.trans(total), mask=inside[:, None] & real[None, :])


@triton.jit(do_not_specialize=["first", "n_rows"])
def _add_rows_kernel(
    part, position, weights, out, first, n_rows,
    H: tl.constexpr, K: tl.constexpr, B: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    n_mine = 0
    for k in range(K):
        row = tl.load(position + t * K + k) - first
        n_mine += ((row >= 0) & (row < n_rows)).to(tl.int32)
    if n_mine > 0:
        c = tl.program_id(0) * B + tl.arange(0, B)
        inside = c < H
        total = tl.load(out + t * H + c, mask=inside, other=0.0)
        for k in range(K):
            row = tl.load(position + t * K + k) - first
            if (row >= 0) & (row < n_rows):
                y = tl.load(part + row.to(tl.int64) * H + c, mask=inside, other=0.0)
                total += product(y, tl.load(weights + t * K + k), PTX)
        tl.store(out + t * H + c, total, mask=inside)


def expand(rows: RowAddresses, batch: Batch, workspace: Tensor, *, ptx: bool = PTX) -> None:
    """Decode a batch's rows: levels, or twice the FP4 values, as int8.

    Shapes:
        workspace int8 [>= experts of the batch, 3 * H * I]: gate_up [2I, H], then down [H, I]
    """
    layout = rows.layout
    stride = layout.slot_floats // 4  # words
    fine = rows.base if rows.fine is None else rows.fine
    base_at = fine_at = out_at = 0
    for matrix in (layout.gate_up, layout.down):
        blocks = matrix.n * matrix.groups
        grid = (triton.cdiv(blocks, _EXPAND_BLOCKS), batch.experts.shape[0])
        _expand_kernel[grid](
            rows.base, fine, batch.experts, workspace.view(torch.int32),
            blocks, base_at, fine_at, out_at, stride,
            _EXPAND_BLOCKS, rows.fine is not None, ptx, num_warps=8,
        )  # fmt: skip
        base_at += matrix.base_bytes
        fine_at += matrix.fine_bytes
        out_at += matrix.n * matrix.k // 4


def grouped_gate_up(
    rows: RowAddresses,
    batch: Batch,
    workspace: Tensor,
    *,
    groups: PairGroups,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    glu: Glu = SWIGLU,
    bias: Tensor | None = None,
    tile: GroupedTile | None = None,
) -> None:
    """The GLU of gate x and up x of the batch's pairs; `tile` stands for the table's choice.

    Shapes:
        bias [E, 2I] bfloat16 or float32, gates first
        workspace from `expand`; codes int8 [M, H] or [M, 2, H] (plain), scales float32 [M, H/32]
        out float32 [>= n_rows, I], the batch's rows in order
    """
    _grouped(
        rows, batch, workspace, groups.tokens, codes, scales, out, glu, bias, tile, has_gate=True
    )


def grouped_down(
    rows: RowAddresses,
    batch: Batch,
    workspace: Tensor,
    *,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    tile: GroupedTile | None = None,
) -> None:
    """Contributions of the batch's pairs, not yet weighted; `tile` as in `grouped_gate_up`.

    Shapes:
        bias [E, H] bfloat16 or float32
        codes int8 [>= n_rows, I] or [>= n_rows, 2, I] (plain), scales float32 [>= n_rows, I/32]
        out float32 [>= n_rows, H], the batch's rows in order
    """
    _grouped(
        rows, batch, workspace, batch.tiles, codes, scales, out, SWIGLU, bias, tile, has_gate=False
    )


def add_rows(
    part: Tensor, batch: Batch, groups: PairGroups, *, weights: Tensor, out: Tensor
) -> None:
    """Add a batch's weighted contributions to its tokens, a token's pairs in order of k.

    With each token's ids ascending and batches in ascending order, the sum's bits do not depend on
    how the experts were cut into batches.

    Shapes:
        part float32 [>= n_rows, H], weights float32 [M, K]; out float32 [M, H], added to
    """
    n_tokens, top_k = weights.shape
    hidden = part.shape[1]
    _add_rows_kernel[(triton.cdiv(hidden, _ADD_FLOATS), n_tokens)](
        part, groups.position, weights, out, batch.first, batch.n_rows,
        hidden, top_k, _ADD_FLOATS, PTX, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _grouped(
    rows: RowAddresses,
    batch: Batch,
    workspace: Tensor,
    tokens: Tensor,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    glu: Glu,
    bias: Tensor | None,
    tile: GroupedTile | None,
    *,
    has_gate: bool,
) -> None:
    layout = rows.layout
    matrix = layout.gate_up if has_gate else layout.down
    n = layout.inter if has_gate else layout.hidden
    offset = 0 if has_gate else layout.gate_up.n * layout.gate_up.k
    scale_at = (0 if has_gate else layout.gate_up.base_bytes) + 8 * matrix.n * matrix.groups
    wide, capability = is_wide(codes), capability_of(out.device)
    tile = tile or grouped_tile(
        layout, pairs=batch.pairs, wide=wide, has_gate=has_gate, capability=capability
    )
    _grouped_kernel[(triton.cdiv(n, tile.rows), batch.tiles.shape[0])](
        workspace, rows.base, batch.tiles, tokens, codes, scales, out,
        0.0 if glu.limit is None else glu.limit, bias, batch.first,
        n, matrix.groups, layout.slot_floats, offset, scale_at, tile.rows, batch.pairs,
        rows.fine is not None, wide, has_gate,
        glu.limit is not None, glu.alpha, glu.shift,
        gcd(matrix.groups, _UNROLL), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
