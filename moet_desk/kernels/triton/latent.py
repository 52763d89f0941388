"""MLA's two small products per head: queries into the latent space, mixed latents out of it.

Owns the products with kv_b as it is shipped, bits as in `dense`. Twin: both ends of
`reference.mla_absorbed`. Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.dense import head_gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight, weight_tile
from moet_desk.kernels.triton.numbers import halving_rows, has_e4m3


@dataclass(frozen=True, slots=True)
class LatentWeight:
    """MLA's kv_b projection as shipped: for each head dn rows of U_K, then dv rows of U_V, of r.

    Raises:
        ValueError: the matrix has other rows.
    """

    weight: DenseWeight
    heads: int
    dn: int
    dv: int

    def __post_init__(self) -> None:
        if self.weight.n != self.heads * (self.dn + self.dv):
            raise ValueError(f"{self.weight.n} rows are not {self.heads} heads of latent weights")


@triton.jit
def _absorb_kernel(
    q,
    q_stride,
    q_pitch,
    weight,
    scales,
    out,
    PITCH: tl.constexpr,
    DN: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    head = tl.program_id(1)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    row = tl.arange(0, BD)
    sums = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros([BD, BR], tl.float32),)
    for d0 in tl.range(0, DN, BD, num_stages=STAGES):
        live = d0 + row < DN
        line = head * PITCH + d0 + row
        at = (line.to(tl.int64) * R)[:, None] + r[None, :]
        tile = weight_tile(weight + at, live[:, None] & (r < R)[None, :], KIND, HARDWARE)
        if KIND == "int8":
            spot = (line * (R // 32))[:, None] + (r // 32)[None, :]
            factor = tl.load(scales + spot, mask=live[:, None] & (r < R)[None, :], other=0.0)
            tile *= factor.to(tl.float32)  # exact: 8 bits each
        elif KIND == "fp8":
            if SCALE_ROWS == 1:
                block = line
            else:
                block = line // 128 * ((R + 127) // 128) + tl.program_id(0) * BR // 128
            scale = tl.load(scales + block, mask=live, other=0.0)
        moved = ()
        for t in tl.static_range(T):
            x = tl.load(q + t * q_stride + head * q_pitch + d0 + row, mask=live, other=0.0)
            if KIND == "fp8":
                x *= scale
            moved = moved + (tl.fma(tile, tl.broadcast_to(x[:, None], (BD, BR)), sums[t]),)
        sums = moved
    heads = tl.num_programs(1)
    for t in tl.static_range(T):
        y = halving_rows(sums[t], BD, BR)
        tl.store(out + (t * heads + head) * R + r, y, mask=r < R)


def mla_absorb(q_nope: Tensor, up: LatentWeight, out: Tensor) -> None:
    """Move queries into the latent space: U_K^T q for each head; bits as in `dense`.

    Shapes:
        q_nope [T, N, dn] float32 (rows and heads may lie apart), T = 1..8; out [T, N, r] float32
    """
    r = up.weight.k
    width = min(128, triton.next_power_of_2(r))
    _absorb_kernel[(triton.cdiv(r, width), up.heads)](
        q_nope, q_nope.stride(0), q_nope.stride(1), up.weight.raw, up.weight.scales, out,
        PITCH=up.dn + up.dv, DN=up.dn, R=r, T=q_nope.shape[0], BD=16, BR=width,
        KIND=up.weight.kind.value, SCALE_ROWS=up.weight.scale_rows, STAGES=4,
        HARDWARE=has_e4m3(q_nope.device), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def mla_out(mixed: Tensor, up: LatentWeight, out: Tensor) -> None:
    """Bring mixed latents out: U_V x for each head.

    Shapes:
        mixed [T, N, r] float32, T = 1..8; out [T, N * dv] float32
    """
    head_gemv(mixed, up.weight, out, first=up.dn, count=up.dv, pitch=up.dn + up.dv)
