"""How kernels write a vector into a KV entry and read tiles of vectors back.

Owns the bytes of `reference.kv_formats` as device code, and the launchers `mla_write`, `gqa_write`,
which give the same bytes. Pages are uint8 [n_pages, page_tokens, entry_bytes] of one layer; entry i
of a sequence lies in page `table[i // page_tokens]`. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import index_form
from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton.numbers import (
    bf16_code,
    e2m1_code,
    e2m1_value,
    e4m3_code,
    e4m3_value,
)


@dataclass(frozen=True, slots=True)
class KvPages:
    """One layer's pages and where each row's entries lie in them.

    Attributes:
        pages: uint8 [n_pages, page_tokens, entry_bytes].
        table: int32 [T, max_pages], one line per row; a stride of 0 gives all rows one sequence.
        form: storage format of an entry.
        index: the same pages' keys of the layer's indexer, if it has one.
    """

    pages: Tensor
    table: Tensor
    form: KvFormat
    index: Tensor | None = None

    @property
    def page_tokens(self) -> int:
        """Entries of a page."""
        return self.pages.shape[1]

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry."""
        return self.pages.shape[2]

    def of_index(self) -> KvPages:
        """The keys of the layer's indexer.

        Raises:
            ValueError: it has none.
        """
        if self.index is None:
            raise ValueError("a layer without an indexer has no keys of one")
        return KvPages(self.index, self.table, index_form(self.form))


def block_of(form: KvFormat) -> int:
    """Values that a program holds side by side: one scale's worth."""
    return 16 if form is KvFormat.NVFP4 else 128


@triton.jit
def entry_of(table, position, PAGE: tl.constexpr):
    """Index (int64) of the entry of each position among all entries of the layer."""
    page = tl.load(table + position // PAGE).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.constexpr_function
def vector_bytes(d: int, form: str) -> int:
    """Bytes of a vector of d values with its scales, as `reference.kv_formats` has it."""
    if form == "f32":
        return 4 * d
    if form == "bf16":
        return 2 * d
    return d + 4 * ((d + 127) // 128) if form == "fp8" else d // 2 + d // 16


@triton.jit
def _store_bf16(to, at, x, mask):
    tl.store(to.to(tl.pointer_type(tl.int16)) + at, bf16_code(x), mask=mask)


@triton.jit
def _amax(x):
    """Largest magnitude of each line of [B, W]; NaN if there is one."""
    # As integers NaN lies above infinity; a float maximum would drop it.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def store_vector(to, x, D: tl.constexpr, B: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr):
    """Write a vector of D values, given as blocks [B, W] (W = 16 for NVFP4, else 128), at `to`."""
    block = tl.arange(0, B)
    at = block[:, None] * W + tl.arange(0, W)[None, :]
    inside = at < D
    x = tl.where(inside, x, 0.0)
    if FORM == "f32":
        tl.store(to.to(tl.pointer_type(tl.float32)) + at, x, mask=inside)
    elif FORM == "bf16":
        _store_bf16(to, at, x, inside)
    elif FORM == "fp8":
        scale = tl.div_rn(_amax(x), 448.0)
        safe = tl.where(scale == 0.0, 1.0, scale)
        tl.store(to + at, e4m3_code(tl.div_rn(x, tl.broadcast_to(safe[:, None], (B, W)))), inside)
        scales = (to + D).to(tl.pointer_type(tl.float32))
        tl.store(scales + block, scale, mask=block * W < D)
    else:
        code = e4m3_code(tl.div_rn(_amax(x), 6.0) * 64.0)
        real = e4m3_value(code, False) * 0.015625
        safe = tl.broadcast_to(tl.where(real == 0.0, 1.0, real)[:, None], (B, W))
        unit = tl.where((real == 0.0)[:, None], 0.0, tl.div_rn(x, safe))
        even, odd = tl.split(tl.reshape(e2m1_code(unit), (B, W // 2, 2)))
        pair = block[:, None] * (W // 2) + tl.arange(0, W // 2)[None, :]
        tl.store(to + pair, (even | (odd << 4)).to(tl.uint8), mask=pair < D // 2)
        tl.store(to + D // 2 + block, code, mask=block * W < D)


@triton.jit
def store_rope(to, at, x, mask, R: tl.constexpr, FORM: tl.constexpr):
    """Write the rotary part of an MLA entry behind a latent of R values."""
    if FORM == "f32":
        tl.store((to + 4 * R).to(tl.pointer_type(tl.float32)) + at, x, mask=mask)
    elif FORM == "nvfp4":
        tl.store(to + vector_bytes(R, FORM) + at, e4m3_code(x), mask=mask)
    else:
        _store_bf16(to + vector_bytes(R, FORM), at, x, mask)


@triton.jit
def load_raw(
    pages,
    entry,
    live,
    ENTRY: tl.constexpr,
    START: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FORM: tl.constexpr,
):
    """The bytes behind `load_vectors`: a tuple for `decoded`, so that reads can be issued early."""
    column = FIRST + tl.arange(0, COUNT)
    seen = live[:, None] & (column < D)[None, :]
    if FORM == "f32":
        line = pages.to(tl.pointer_type(tl.float32)) + entry * (ENTRY // 4) + START // 4
        return (tl.load(line[:, None] + column[None, :], mask=seen, other=0.0),)
    elif FORM == "bf16":
        line = pages.to(tl.pointer_type(tl.bfloat16)) + entry * (ENTRY // 2) + START // 2
        return (tl.load(line[:, None] + column[None, :], mask=seen, other=0.0),)
    elif FORM == "fp8":
        line = pages + entry * ENTRY + START
        return (tl.load(line[:, None] + column[None, :], mask=seen, other=0),)
    else:
        line = pages + entry * ENTRY + START
        pair = FIRST // 2 + tl.arange(0, COUNT // 2)
        mask = live[:, None] & (pair < D // 2)[None, :]
        raw = tl.load(line[:, None] + pair[None, :], mask=mask, other=0)
        block = FIRST // 16 + tl.arange(0, COUNT // 16)
        mask = live[:, None] & (block < D // 16)[None, :]
        return raw, tl.load(line[:, None] + (D // 2 + block)[None, :], mask=mask, other=0)


@triton.jit
def decoded(raw, COUNT: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr):
    """Values of `load_raw`'s bytes: [S, COUNT] float32, as `load_vectors` says."""
    if FORM == "fp8":
        return e4m3_value(raw[0], HARDWARE)
    elif FORM == "nvfp4":
        S: tl.constexpr = raw[0].shape[0]
        pair = raw[0].to(tl.int32)
        values = tl.interleave(e2m1_value(pair & 15), e2m1_value(pair >> 4))
        scale = e4m3_value(raw[1], HARDWARE) * 0.015625
        blocks = tl.reshape(values, (S, COUNT // 16, 16)) * scale[:, :, None]
        return tl.reshape(blocks, (S, COUNT))
    else:
        return raw[0].to(tl.float32)


@triton.jit
def load_vectors(
    pages,
    entry,
    live,
    ENTRY: tl.constexpr,
    START: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Values FIRST .. FIRST + COUNT of vectors of D values at byte START of each entry [S].

    COUNT is a power of two; values from D on are zero. Of "fp8" COUNT lies in one block of 128 and
    the values come without their scale (`load_scale`); all others are complete. Returns [S, COUNT]
    float32, of which all but "f32" are exact in bfloat16.
    """
    raw = load_raw(pages, entry, live, ENTRY, START, D, FIRST, COUNT, FORM)
    return decoded(raw, COUNT, FORM, HARDWARE)


@triton.jit
def load_scale(
    pages,
    entry,
    live,
    ENTRY: tl.constexpr,
    START: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The scale [S] of the "fp8" block that begins at value FIRST."""
    line = pages.to(tl.pointer_type(tl.float32)) + entry * (ENTRY // 4)
    return tl.load(line + (START + D) // 4 + FIRST // 128, mask=live, other=0.0)


@triton.jit
def load_rope(
    pages,
    entry,
    live,
    ENTRY: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    COUNT: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The rotary part of MLA entries, complete: [S, COUNT] float32, zero from DR on."""
    if FORM == "nvfp4":
        column = tl.arange(0, COUNT)
        at = (pages + entry * ENTRY + vector_bytes(R, FORM))[:, None] + column[None, :]
        mask = live[:, None] & (column < DR)[None, :]
        return e4m3_value(tl.load(at, mask=mask, other=0), HARDWARE)
    elif FORM == "f32":
        return load_vectors(pages, entry, live, ENTRY, 4 * R, DR, 0, COUNT, "f32", HARDWARE)
    else:
        return load_vectors(
            pages, entry, live, ENTRY, vector_bytes(R, FORM), DR, 0, COUNT, "bf16", HARDWARE
        )


@triton.jit
def _mla_write_kernel(
    latent,
    rope,
    pages,
    table,
    table_stride,
    positions,
    R: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    FORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    to = pages + entry_of(table + t * table_stride, tl.load(positions + t), PAGE) * ENTRY
    at = tl.arange(0, B)[:, None] * W + tl.arange(0, W)[None, :]
    store_vector(to, tl.load(latent + t * R + at, mask=at < R, other=0.0), R, B, W, FORM)
    column = tl.arange(0, BR)
    part = tl.load(rope + t * DR + column, mask=column < DR, other=0.0)
    store_rope(to, column, part, column < DR, R, FORM)


@triton.jit
def _gqa_write_kernel(
    k,
    v,
    pages,
    table,
    table_stride,
    positions,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    FORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    to = pages + entry_of(table + t * table_stride, tl.load(positions + t), PAGE) * ENTRY
    at = tl.arange(0, B)[:, None] * W + tl.arange(0, W)[None, :]
    x = tl.load(k + (t * KEYS + head) * D + at, mask=at < D, other=0.0)
    store_vector(to + head * vector_bytes(D, FORM), x, D, B, W, FORM)
    x = tl.load(v + (t * KEYS + head) * DV + at, mask=at < DV, other=0.0)
    values = to + KEYS * vector_bytes(D, FORM) + head * vector_bytes(DV, FORM)
    store_vector(values, x, DV, B, W, FORM)


def mla_write(latent: Tensor, k_rope: Tensor, kv: KvPages, positions: Tensor) -> None:
    """Write each row's entry at its position, in the bytes of `reference.mla_write`.

    Shapes:
        latent [T, r] float32, k_rope [T, dr] float32 (already rotated), positions [T] int32
    Raises:
        ValueError: the pages hold entries of another size.
    """
    (rows, r), dr = latent.shape, k_rope.shape[1]
    check_entries(kv, mla_entry_bytes(kv.form, r, dr))
    width = block_of(kv.form)
    _mla_write_kernel[(rows,)](
        latent, k_rope, kv.pages, kv.table, kv.table.stride(0), positions,
        R=r, DR=dr, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes,
        B=triton.next_power_of_2(triton.cdiv(r, width)), W=width,
        BR=triton.next_power_of_2(dr), FORM=kv.form.value,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def gqa_write(k: Tensor, v: Tensor, kv: KvPages, positions: Tensor) -> None:
    """Write each row's keys and values at its position, in the bytes of `reference.gqa_write`.

    Shapes:
        k [T, M, D] float32, v [T, M, Dv] float32, positions [T] int32
    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, keys, d = k.shape
    dv = v.shape[2]
    check_entries(kv, gqa_entry_bytes(kv.form, keys, d, dv))
    width = block_of(kv.form)
    _gqa_write_kernel[(rows, keys)](
        k, v, kv.pages, kv.table, kv.table.stride(0), positions,
        KEYS=keys, D=d, DV=dv, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes,
        B=triton.next_power_of_2(triton.cdiv(max(d, dv), width)), W=width, FORM=kv.form.value,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def check_entries(kv: KvPages, entry_bytes: int) -> None:
    """Refuse pages that do not hold entries of `entry_bytes`.

    Raises:
        ValueError: they do not, or float scales would not be aligned in them.
    """
    if kv.entry_bytes != entry_bytes or kv.pages.dtype is not torch.uint8:
        raise ValueError(f"pages hold entries of {kv.entry_bytes} bytes, not {entry_bytes}")
    if kv.form in (KvFormat.F32, KvFormat.FP8) and entry_bytes % 4:
        raise ValueError(f"float32 cannot lie in entries of {entry_bytes} bytes")
