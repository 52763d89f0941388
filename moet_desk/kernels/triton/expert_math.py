"""The parts of decode's expert kernels: weight tiles, exact block dots, the summing order.

Device code only; `triton.experts` launches it. Twin: `reference.experts`, whose canonical order is
followed number by number: lane c adds blocks c, c + 32, ... in order, then halves are added (16, 8,
4, 2, 1). Launch with `enable_fp_fusion=False`: a fused multiply-add rounds differently.

A block's 32 weights are small integers (levels -4 -1 1 4, or twice an FP4 value), made four at a
time by byte permutes whose selectors lie ready in the row (`kernels.layouts`); eight dp4a then give
the block's dot product with int8 activations, exact in int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moet_desk.kernels.triton.portable import product


def _base_dot_ptx() -> str:
    """$0 = dot of the block in $1 $2 (base words) with $3..$10 (activations).

    Selectors get bit 2 set, because an immediate operand can only be a permute's second one.
    """
    lines = ["{", ".reg .b32 a, b, t;"]
    for half in (0, 1):
        lines += [
            f"lop3.b32 a, ${1 + half}, 0x33333333, 0x44444444, 0xEA;",
            f"shr.u32 b, ${1 + half}, 2;",
            "lop3.b32 b, b, 0x33333333, 0x44444444, 0xEA;",  # (b & 3..3) | 4..4
        ]
        for quad in range(4):
            source = "a" if quad < 2 else "b"
            if quad % 2:
                lines.append(f"shr.u32 {source}, {source}, 16;")
            lines += [
                f"prmt.b32 t, 0, 0x0401FFFC, {source};",  # bytes: the levels of codes 0..3
                f"dp4a.s32.s32 $0, t, ${3 + 4 * half + quad}, {'$0' if half or quad else '0'};",
            ]
    return "\n".join([*lines, "}"])


def _fine_dot_ptx() -> str:
    """$0 = dot of twice the FP4 values of the block in $1 $2 (base words), $3 $4 $5 (fine words)
    with $6..$13.

    Selector of a weight: digit + 5 if its code is big, into the bytes 0 1 2 3 4 6 8 12. A digit
    word w = d0 + 5 d1 + 25 d2 + 125 d3 becomes d0 + 16 d1 + 256 d2 + 4096 d3 by adding
    11 w/5 + 176 w/25 + 2816 w/125, all rounded down.
    """
    lines = [
        "{",
        ".reg .b32 c, g, d, e, q, n, s, m, t;",
    ]

    def digits(word: int, to: str) -> list[str]:
        first = 10 * word
        if first % 32 <= 22:
            take = [f"shr.u32 q, ${3 + first // 32}, {first % 32};"]
        else:
            low = 3 + first // 32
            take = [f"shf.r.wrap.b32 q, ${low}, ${low + 1}, {first % 32};"]
        take += ["and.b32 q, q, 1023;", f"mov.b32 {to}, q;"]
        for factor in (11, 176, 2816):
            take += [
                "mul.lo.u32 q, q, 0x334;",
                "shr.u32 q, q, 12;",
                f"mad.lo.u32 {to}, q, {factor}, {to};",
            ]
        return take

    for half in (0, 1):
        for pair in (0, 1):  # eight weights: two digit words
            lines.append(f"shr.u32 c, ${1 + half}, 2;" if pair else f"mov.b32 c, ${1 + half};")
            lines += [
                "lop3.b32 c, c, 0x33333333, 0x44444444, 0xEA;",
                "shr.u32 g, c, 1;",
                "lop3.b32 g, c, g, 0x11111111, 0x82;",  # big: both bits of the code are equal
                "mul.lo.u32 g, g, 5;",
            ]
            lines += digits(4 * half + 2 * pair, "d") + digits(4 * half + 2 * pair + 1, "e")
            lines += ["mad.lo.u32 g, e, 65536, g;", "add.u32 g, g, d;"]
            for quad in (0, 1):
                if quad:
                    lines += ["shr.u32 c, c, 16;", "shr.u32 g, g, 16;"]
                first_dot = not (half or pair or quad)
                total = "0" if first_dot else "$0"
                lines += [
                    "prmt.b32 s, 0, 0x0000FFFF, c;",  # all ones where the code is negative
                    "mov.b32 t, 0x03020100;",
                    "prmt.b32 m, t, 0x0C080604, g;",
                    "mov.b32 t, 0xFDFEFF00;",
                    "prmt.b32 n, t, 0xF4F8FAFC, g;",
                    "lop3.b32 m, s, n, m, 0xCA;",  # s ? n : m
                    f"dp4a.s32.s32 $0, m, ${6 + 4 * half + 2 * pair + quad}, {total};",
                ]
    return "\n".join([*lines, "}"])


_BASE_DOT = tl.constexpr(_base_dot_ptx())
_FINE_DOT = tl.constexpr(_fine_dot_ptx())
_BASE_OPERANDS = tl.constexpr("=&r" + ",r" * 10)
_FINE_OPERANDS = tl.constexpr("=&r" + ",r" * 13)


@triton.jit
def _element(word, b: tl.constexpr):
    """Signed byte b of each int32."""
    return (word << (24 - 8 * b)) >> 24


@triton.jit
def _code(w, n: tl.constexpr):
    """Base code of weight n of each block."""
    return (w[n // 16] >> (4 * (n % 8) + 2 * (n % 16 // 8))) & 3


@triton.jit
def base_dot(w, x, PTX: tl.constexpr):
    """Exact dot products of blocks of base weights with int8 activations.

    Shapes:
        w: two int32 [N, C] word planes; x: eight int32 [N, C]; returns int32 [N, C]
    """
    if PTX:
        dot = tl.inline_asm_elementwise(
            _BASE_DOT, _BASE_OPERANDS, [w[0], w[1], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        dot = w[0] * 0
        for n in tl.static_range(32):
            code = _code(w, n)
            level = tl.where(code == 1, -1, tl.where(code == 2, 1, 4 * code - 4 - (code // 3) * 4))
            dot += level * _element(x[n // 4], n % 4)
    return dot


@triton.jit
def fine_dot(w, x, PTX: tl.constexpr):
    """Exact dot products of blocks of FP4 weights, doubled, with int8 activations.

    Shapes:
        w: int32 [N, C] base words 0 and 1, fine words 0, 1 and 2 (16 bits); x: eight int32 [N, C]
        returns int32 [N, C]
    """
    if PTX:
        dot = tl.inline_asm_elementwise(
            _FINE_DOT, _FINE_OPERANDS,
            [w[0], w[1], w[2], w[3], w[4], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        dot = w[0] * 0
        for j in tl.static_range(8):
            rest = _digit_word(w, j)
            for b in tl.static_range(4):
                code = _code(w, 4 * j + b)
                next_rest = (rest * 0x334) >> 12
                digit = rest - 5 * next_rest
                rest = next_rest
                big = tl.where(digit == 2, 12, 6 + 2 * digit)
                value = tl.where((code == 0) | (code == 3), big, digit)
                dot += tl.where(code < 2, -value, value) * _element(x[j], b)
    return dot


@triton.jit
def _digit_word(w, j: tl.constexpr):
    """Bits 10j .. 10j + 9 of the 80-bit record in w[2], w[3], w[4]."""
    at: tl.constexpr = 10 * j % 32
    i: tl.constexpr = 2 + 10 * j // 32
    word = (w[i] >> at) & (1023 if at <= 22 else (1 << (32 - at)) - 1)
    if at > 22:
        word |= (w[i + 1] << (32 - at)) & 1023
    return word


@triton.jit
def load_tile(
    base, fine, rows, N: tl.constexpr, G: tl.constexpr, C: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """All words of some rows of a matrix, one tuple entry per load: the reads of a program overlap.

    Shapes:
        base, fine: uint8 pointers to the matrix's planes; rows [B]
        returns per C blocks: words 0 and 1, (fine words 0, 1, 2,) scale bytes; each [B, C]
    """
    words = base.to(tl.pointer_type(tl.int32))
    scale_bytes = base + 8 * N * G
    fine_words = fine.to(tl.pointer_type(tl.int32))
    fine_tops = (fine + 8 * N * G).to(tl.pointer_type(tl.uint16))
    tile = ()
    for first in tl.static_range(0, G, C):
        c = first + tl.arange(0, C)[None, :]
        at = rows[:, None] * G + c
        tile = tile + (
            _load(words + at, c, G, first + C),
            _load(words + N * G + at, c, G, first + C),
        )
        if FINE:
            tile = tile + (
                _load(fine_words + at, c, G, first + C),
                _load(fine_words + N * G + at, c, G, first + C),
                _load(fine_tops + at, c, G, first + C).to(tl.int32),
            )
        tile = tile + (_load(scale_bytes + at, c, G, first + C),)
    return tile


@triton.jit
def _load(pointers, c, G: tl.constexpr, END: tl.constexpr):
    """Weights of the blocks c < END, zeros for blocks from G on."""
    # Weights are read once per step; what stays in L2 should be activations.
    if END <= G:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=c < G, other=0, eviction_policy="evict_first")


@triton.jit
def _load_activation(pointers, c, G: tl.constexpr, END: tl.constexpr):
    if END <= G:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=c < G, other=0)


@triton.jit
def tile_products(
    tile, codes, scales, B: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    FINE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix times one token, in the canonical order.

    Shapes:
        tile from `load_tile`; codes int32 [8, G] and scales float32 [G] of the token
        returns float32 [B]
    """
    PARTS: tl.constexpr = 6 if FINE else 3
    lanes = tl.zeros([B, C], tl.float32)
    every_row = tl.zeros([B, 1], tl.int32)
    for first in tl.static_range(0, G, C):
        c = first + tl.arange(0, C)[None, :] + every_row  # [B, C]: loaded where it is used
        x = ()
        for o in tl.static_range(8):
            x = x + (_load_activation(codes + o * G + c, c, G, first + C),)
        w = _part(tile, first // C * PARTS, PARTS)
        dot = fine_dot(w, x, PTX) if FINE else base_dot(w, x, PTX)
        s = _load_activation(scales + c, c, G, first + C)
        lanes += product(dot.to(tl.float32) * power_of_two(w[PARTS - 1]), s, PTX)
    total = halving_sum(lanes, B, C)
    if FINE:
        total *= 0.5  # weights were doubled
    return total


@triton.jit
def _part(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Entries FIRST .. FIRST + COUNT - 1 of a tuple."""
    part = ()
    for i in tl.static_range(FIRST, FIRST + COUNT):
        part = part + (tile[i],)
    return part


@triton.jit
def power_of_two(byte):
    """2**(byte - 127) of E8M0 bytes 0..254, the subnormal one included."""
    return tl.maximum(byte.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def halving_sum(lanes, B: tl.constexpr, C: tl.constexpr):
    """Add lanes by halves: [B, C] -> [B]; C is a power of two."""
    if C >= 32:
        lanes = _fold(lanes, B, 16)
    if C >= 16:
        lanes = _fold(lanes, B, 8)
    if C >= 8:
        lanes = _fold(lanes, B, 4)
    if C >= 4:
        lanes = _fold(lanes, B, 2)
    if C >= 2:
        lanes = _fold(lanes, B, 1)
    return tl.reshape(lanes, [B])


@triton.jit
def _fold(lanes, B: tl.constexpr, HALF: tl.constexpr):
    # A sum of two numbers has no order.
    return tl.sum(tl.reshape(lanes, [B, 2, HALF]), 1)
