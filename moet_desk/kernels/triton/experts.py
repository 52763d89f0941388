"""Routed experts of a decode step: gate_up with its GLU, integers again, down, weighted sum.

Owns launches and tile sizes; the arithmetic is `expert_math`. Twins: `reference.experts`. A program
owns some rows of one distinct expert's matrix, reads them once and serves every token of the step
that chose this expert, so a token's bits do not depend on the others. Codes are planar
(`triton.quant`), of 15 bits with fine slots, else int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import SWIGLU, Glu
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.reference.experts import ExpertBias
from moet_desk.kernels.triton.expert_math import load_tile, tile_products
from moet_desk.kernels.triton.loads import in_order
from moet_desk.kernels.triton.portable import PTX, product
from moet_desk.kernels.triton.quant import (
    block_codes,
    is_wide,
    quantize_rows,
    store_planar,
)
from moet_desk.kernels.triton.tile_table import Tile, capability_of, decode_row

__all__ = [
    "ExpertPool",
    "ExpertTiles",
    "Tile",
    "combine",
    "experts_down",
    "experts_gate_up",
    "experts_hidden",
    "tiles_for",
    "tiles_of",
]

_LANES = 32  # of the canonical order


@dataclass(frozen=True, slots=True)
class ExpertPool:
    """Rows in VRAM as they lie on disk, and who is in use in one layer of one step.

    Attributes:
        layout: sizes of an expert.
        base: uint8 [S, base_stride].
        uniq_slot: int32 [P], slot of the u-th distinct expert, -1 beyond the last.
        uniq_pair: int32 [P, T], the pair t * K + k in which token t uses that expert, or -1.
        fine: uint8 [S2, fine_stride], or None for 2-bit weights.
        fine_slot: int32 [P] like `uniq_slot`, in `fine`; given exactly when `fine` is.
        bias: of all experts of the layer, gate_up [E, 2I] and down [E, H], or None.
        ids: int32 [P], the expert of each pair; given exactly when `bias` is.
    """

    layout: ExpertLayout
    base: Tensor
    uniq_slot: Tensor
    uniq_pair: Tensor
    fine: Tensor | None = None
    fine_slot: Tensor | None = None
    bias: ExpertBias | None = None
    ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How one expert shape is cut. With 32 rows or more `gate_up` quantises its own result."""

    gate_up: Tile
    down: Tile


_WEIGHT_REGISTERS = 48
"""Words of weights that a thread may hold: with the activations' 32 and the sums that is about 100
registers of a gate_up thread, so 5 programs of 4 warps share an SM. More spills from 100 on. A
thread with four blocks holds 64 words of 15-bit activations: 135 registers in FP4's down.
"""


@triton.jit
def gated(g, u, limit, LIMITED: tl.constexpr, ALPHA: tl.constexpr = 1.0, SHIFT: tl.constexpr = 0.0):
    """As `reference.gated`, cut to +-limit if LIMITED; NaN stays NaN."""
    if LIMITED:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    at = -g
    if ALPHA != 1.0:
        at = at * ALPHA
    if SHIFT != 0.0:
        u = u + SHIFT
    return tl.div_rn(g, tl.exp(at) + 1.0) * u


@triton.jit
def _gate_up_kernel(
    base, fine, uniq_slot, fine_slot, uniq_pair, codes, scales, out, out_codes, out_scales, limit,
    bias, ids,
    H: tl.constexpr, I: tl.constexpr, T: tl.constexpr,
    BASE_STRIDE: tl.constexpr, FINE_STRIDE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr,
    FINE: tl.constexpr, LIMITED: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    QUANTIZE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // 32
    WORDS: tl.constexpr = 16 if FINE else 8
    first = tl.program_id(0) * B
    expert = tl.program_id(1)
    slot = tl.load(uniq_slot + expert)
    if slot >= 0:
        base += slot.to(tl.int64) * BASE_STRIDE
        if FINE:
            fine += tl.load(fine_slot + expert).to(tl.int64) * FINE_STRIDE
        rows = first + tl.arange(0, B)
        gate = load_tile(base, fine, rows, 2 * I, G, C, FINE)
        up = load_tile(base, fine, rows + I, 2 * I, G, C, FINE)
        # All of a program's weights are asked for before the first is multiplied.
        pairs = uniq_pair + in_order(expert * T, PTX)
        for t in range(T):
            pair = tl.load(pairs + t)
            if pair >= 0:
                x, s = codes + t * (WORDS * G), scales + t * G
                g = tile_products(gate, x, s, B, G, C, FINE, PTX)
                u = tile_products(up, x, s, B, G, C, FINE, PTX)
                if bias is not None:
                    own = bias + tl.load(ids + pair).to(tl.int64) * (2 * I) + rows
                    g += tl.load(own).to(tl.float32)
                    u += tl.load(own + I).to(tl.float32)
                h = gated(g, u, limit, LIMITED, ALPHA, SHIFT)
                if QUANTIZE:
                    q, scale = block_codes(tl.reshape(h, [B // 32, 32]), FINE, PTX)
                    block = first // 32 + tl.arange(0, B // 32)
                    store_planar(out_codes, block, q, pair, I // 32, B // 32, FINE)
                    tl.store(out_scales + pair * (I // 32) + block, scale)
                else:
                    tl.store(out + pair * I + rows, h)


@triton.jit
def _down_kernel(
    base, fine, uniq_slot, fine_slot, uniq_pair, codes, scales, part, bias, ids,
    H: tl.constexpr, I: tl.constexpr, T: tl.constexpr,
    BASE_STRIDE: tl.constexpr, FINE_STRIDE: tl.constexpr,
    BASE_OFFSET: tl.constexpr, FINE_OFFSET: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, FINE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = I // 32
    WORDS: tl.constexpr = 16 if FINE else 8
    expert = tl.program_id(1)
    slot = tl.load(uniq_slot + expert)
    if slot >= 0:
        base += slot.to(tl.int64) * BASE_STRIDE + BASE_OFFSET
        if FINE:
            fine += tl.load(fine_slot + expert).to(tl.int64) * FINE_STRIDE + FINE_OFFSET
        rows = tl.program_id(0) * B + tl.arange(0, B)
        tile = load_tile(base, fine, rows, H, G, C, FINE)
        for t in range(T):
            pair = tl.load(uniq_pair + expert * T + t)
            if pair >= 0:
                x, s = codes + pair * (WORDS * G), scales + pair * G
                y = tile_products(tile, x, s, B, G, C, FINE, PTX)
                if bias is not None:
                    own = bias + tl.load(ids + pair).to(tl.int64) * H + rows
                    y += tl.load(own).to(tl.float32)
                tl.store(part + pair * H + rows, y)


@triton.jit
def _part(part, ids, pair, c, H: tl.constexpr, inside):
    """A pair's contribution; 0 for one without an expert, of which nothing was written."""
    if ids is not None:
        inside = inside & (tl.load(ids + pair) >= 0)
    return tl.load(part + pair * H + c, mask=inside, other=0.0)


@triton.jit
def _combine_kernel(
    part, weights, base, residual, out, ids,
    H: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    SHARED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    c = tl.program_id(0) * B + tl.arange(0, B)
    inside = c < H
    total = product(_part(part, ids, t * K, c, H, inside), tl.load(weights + t * K), PTX)
    for k in tl.static_range(1, K):
        more = _part(part, ids, t * K + k, c, H, inside)
        total += product(more, tl.load(weights + t * K + k), PTX)
    if SHARED:
        total += tl.load(base + t * H + c, mask=inside)
    total = tl.load(residual + t * H + c, mask=inside) + total
    tl.store(out + t * H + c, total, mask=inside)


def experts_gate_up(
    pool: ExpertPool,
    codes: Tensor,
    scales: Tensor,
    *,
    out: Tensor,
    glu: Glu = SWIGLU,
    tile: Tile | None = None,
    ptx: bool = PTX,
) -> None:
    """The GLU of gate x and up x of every pair; the products' bits are those of the twin.

    Shapes:
        codes int32 [T, 8, H/32], with fine slots [T, 2, 8, H/32]; scales float32 [T, H/32]
        out float32 [P, I], rows of pairs in `uniq_pair` are written
    """
    tile = tile or tiles_of(pool).gate_up
    _gate_up(pool, codes, scales, (out, out, out), tile, glu=glu, quantize=False, ptx=ptx)


def experts_hidden(
    pool: ExpertPool,
    codes: Tensor,
    scales: Tensor,
    *,
    scratch: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    glu: Glu = SWIGLU,
    tile: Tile | None = None,
    ptx: bool = PTX,
) -> None:
    """`experts_gate_up` and its result as codes for `experts_down`: one launch if a tile holds
    whole blocks of 32 rows, else two with the same bits.

    Shapes:
        codes, scales as in `experts_gate_up`; scratch float32 [P, I]
        out_codes int32 [P, 8, I/32], with fine slots [P, 2, 8, I/32]; out_scales float32 [P, I/32]
    """
    tile = tile or tiles_of(pool).gate_up
    quantize = tile.rows % 32 == 0
    outs = (scratch, out_codes, out_scales)
    _check_codes(pool, out_codes)
    _gate_up(
        pool, codes, scales, outs, tile, glu=glu, quantize=quantize, ptx=ptx,
    )  # fmt: skip
    if not quantize:
        quantize_rows(scratch, out_codes, out_scales)


def experts_down(
    pool: ExpertPool,
    codes: Tensor,
    scales: Tensor,
    *,
    part: Tensor,
    tile: Tile | None = None,
    ptx: bool = PTX,
) -> None:
    """Each pair's contribution, not yet weighted.

    Shapes:
        codes int32 [P, 8, I/32], with fine slots [P, 2, 8, I/32]; scales float32 [P, I/32]
        part float32 [P, H]
    """
    tile = tile or tiles_of(pool).down
    layout, n_experts = pool.layout, pool.uniq_slot.shape[0]
    fine, fine_slot = _fine_of(pool)
    _check_codes(pool, codes)
    _down_kernel[(layout.hidden // tile.rows, n_experts)](
        pool.base, fine, pool.uniq_slot, fine_slot, pool.uniq_pair, codes, scales, part,
        None if pool.bias is None else pool.bias.down, pool.ids,
        layout.hidden, layout.inter, pool.uniq_pair.shape[1],
        layout.base_stride, layout.fine_stride,
        layout.gate_up.base_bytes, layout.gate_up.fine_bytes,
        tile.rows, _lanes(layout.inter), pool.fine is not None, ptx,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def combine(
    part: Tensor,
    weights: Tensor,
    *,
    base: Tensor | None,
    residual: Tensor,
    out: Tensor,
    ids: Tensor | None = None,
) -> None:
    """residual + (sum over k, in order, of weight * part, + base): the bits of `reference.combine`
    and two additions. With `ids` (int32 [P]), pairs of an id below 0 have no part.

    Shapes:
        part float32 [P, H], weights float32 [T, K]; base (shared expert), residual, out [T, H]
        float32; out may be residual
    """
    n_tokens, top_k = weights.shape
    hidden = part.shape[1]
    _combine_kernel[(triton.cdiv(hidden, _COMBINE_FLOATS), n_tokens)](
        part, weights, residual if base is None else base, residual, out, ids,
        hidden, top_k, _COMBINE_FLOATS, base is not None, PTX,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


_COMBINE_FLOATS = 512
"""A program's share of a row: one float4 per thread, 8 programs per token at H = 4096."""


def tiles_for(
    layout: ExpertLayout, *, fine: bool, tokens: int = 1, capability: str = ""
) -> ExpertTiles:
    """The tile sizes of an expert shape for a step of `tokens` tokens: as measured on cards of this
    capability (`tile_table`), else by a rule. Results do not depend on them.
    """
    known = decode_row(layout, fine=fine, tokens=tokens, capability=capability)
    if known is not None:
        return ExpertTiles(known.gate_up, known.down)
    return ExpertTiles(
        gate_up=_tile(8, layout.hidden, matrices=2, fine=fine),
        down=_tile(16, layout.inter, matrices=1, fine=fine),
    )


def tiles_of(pool: ExpertPool) -> ExpertTiles:
    """Those of a launch on this pool."""
    return tiles_for(
        pool.layout, fine=pool.fine is not None, tokens=pool.uniq_pair.shape[1],
        capability=capability_of(pool.base.device),
    )  # fmt: skip


def _tile(rows: int, width: int, *, matrices: int, fine: bool) -> Tile:
    """As few warps as hold the rows in registers; a thread owns 4 blocks per load at most, which
    is 16 bytes of a plane.
    """
    lanes = _lanes(width)
    loads = matrices * triton.cdiv(width // 32, lanes)
    words = 5 if fine else 3  # of a block, its scale among them
    each = max(n for n in (1, 2, 4) if n == 1 or n * loads * words <= _WEIGHT_REGISTERS)
    return Tile(rows, max(1, rows * lanes // (32 * each)))


def _gate_up(
    pool: ExpertPool,
    codes: Tensor,
    scales: Tensor,
    outs: tuple[Tensor, Tensor, Tensor],
    tile: Tile,
    *,
    glu: Glu,
    quantize: bool,
    ptx: bool,
) -> None:
    layout, n_experts = pool.layout, pool.uniq_slot.shape[0]
    fine, fine_slot = _fine_of(pool)
    _check_codes(pool, codes)
    _gate_up_kernel[(layout.inter // tile.rows, n_experts)](
        pool.base, fine, pool.uniq_slot, fine_slot, pool.uniq_pair, codes, scales, *outs,
        0.0 if glu.limit is None else glu.limit,
        None if pool.bias is None else pool.bias.gate_up, pool.ids,
        layout.hidden, layout.inter, pool.uniq_pair.shape[1],
        layout.base_stride, layout.fine_stride,
        tile.rows, _lanes(layout.hidden),
        pool.fine is not None, glu.limit is not None, glu.alpha, glu.shift, quantize, ptx,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def _check_codes(pool: ExpertPool, codes: Tensor) -> None:
    """Refuse codes of the other kind, which a kernel would read beyond their end."""
    if is_wide(codes) != (pool.fine is not None):
        raise ValueError(f"codes {list(codes.shape)} are of the wrong kind for these slots")


def _fine_of(pool: ExpertPool) -> tuple[Tensor, Tensor]:
    """The fine pool and its slots; stand-ins that no kernel reads if there is none."""
    if pool.fine is None or pool.fine_slot is None:
        return pool.base, pool.uniq_slot
    return pool.fine, pool.fine_slot


def _lanes(width: int) -> int:
    """Blocks side by side in a tile: all 32 lanes, or as many as a narrow matrix fills."""
    return min(_LANES, int(triton.next_power_of_2(width // 32)))
