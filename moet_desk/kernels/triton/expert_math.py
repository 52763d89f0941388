"""The parts of decode's expert kernels: weight tiles, exact block dots, the summing order.

Device code only; `triton.experts` launches it. Twin: `reference.experts`, whose canonical order is
followed number by number: lane c adds blocks c, c + 32, ... in order, then halves are added (16, 8,
4, 2, 1). Launch with `enable_fp_fusion=False`: a fused multiply-add rounds differently.

A block's 32 weights are small integers (levels -4 -1 1 4, or twice an FP4 value), made four at a
time by byte permutes whose selectors lie ready in the row (`kernels.layouts`). Eight dp4a then give
the block's dot product with int8 activations, exact in int32. FP4 weights meet activations of 15
bits, 256 * hi + lo (docs/adr/0009): digits are decoded once, for two dp4a per four weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import triton
import triton.language as tl

from moet_desk.kernels.triton.portable import product


def _base_ptx(words: Sequence[str], use: Callable[[int], str]) -> str:
    """Make the weights of a block, four at a time in register t, and `use(quad)` each.

    Selectors get bit 2 set, because an immediate operand can only be a permute's second one.
    """
    lines = ["{", ".reg .b32 a, b, t;"]
    for half, word in enumerate(words):
        lines += [
            f"lop3.b32 a, {word}, 0x33333333, 0x44444444, 0xEA;",  # (word & 3..3) | 4..4
            f"shr.u32 b, {word}, 2;",
            "lop3.b32 b, b, 0x33333333, 0x44444444, 0xEA;",
        ]
        for quad in range(4):
            codes = "a" if quad < 2 else "b"
            if quad % 2:
                lines.append(f"shr.u32 {codes}, {codes}, 16;")
            lines += [
                f"prmt.b32 t, 0, 0x0401FFFC, {codes};",  # bytes: the levels of codes 0..3
                use(4 * half + quad),
            ]
    return "\n".join([*lines, "}"])


def _fine_ptx(words: Sequence[str], digits: Sequence[str], use: Callable[[int], str]) -> str:
    """Make twice the FP4 values of a block, four at a time in register t, and `use(quad)` each.

    Selector of a weight: digit + 5 if its code is big, into the bytes 0 1 2 3 4 6 8 12.
    """
    lines = ["{", ".reg .b32 c, g, d, e, q, n, s, t, low;"]
    for pair in range(4):  # eight weights: two digit words
        word, odd = words[pair // 2], pair % 2
        lines += [
            f"shr.u32 c, {word}, 2;" if odd else f"mov.b32 c, {word};",
            "lop3.b32 c, c, 0x33333333, 0x44444444, 0xEA;",
            "shr.u32 g, c, 1;",
            "lop3.b32 g, c, g, 0x11111111, 0x82;",  # big: both bits of the code are equal
            "mul.lo.u32 g, g, 5;",
            *_spread_digits(digits, 2 * pair, "d"),
            *_spread_digits(digits, 2 * pair + 1, "e"),
            "mad.lo.u32 g, e, 65536, g;",
            "add.u32 g, g, d;",
        ]
        for quad in (2 * pair, 2 * pair + 1):
            if quad % 2:
                lines += ["shr.u32 c, c, 16;", "shr.u32 g, g, 16;"]
            lines += [
                "prmt.b32 s, 0, 0x0000FFFF, c;",  # all ones where the code is negative
                "mov.b32 t, 0xFDFEFF00;",
                "prmt.b32 n, t, 0xF4F8FAFC, g;",
                "mov.b32 t, 0x03020100;",
                "prmt.b32 t, t, 0x0C080604, g;",
                "lop3.b32 t, s, n, t, 0xCA;",  # s ? n : t
                use(quad),
            ]
    return "\n".join([*lines, "}"])


def _spread_digits(digits: Sequence[str], word: int, to: str) -> list[str]:
    """Digit word w = d0 + 5 d1 + 25 d2 + 125 d3 to d0 + 16 d1 + 256 d2 + 4096 d3.

    That is w + 11 (w/5) + 176 (w/25) + 2816 (w/125), rounded down.
    """
    i, shift = divmod(10 * word, 32)
    if shift <= 22:
        lines = [f"shr.u32 q, {digits[i]}, {shift};"]
    else:
        lines = [f"shf.r.wrap.b32 q, {digits[i]}, {digits[i + 1]}, {shift};"]
    lines += ["and.b32 q, q, 1023;", f"mov.b32 {to}, q;"]
    for factor in (11, 176, 2816):
        lines += [
            "mul.lo.u32 q, q, 0x334;",
            "shr.u32 q, q, 12;",
            f"mad.lo.u32 {to}, q, {factor}, {to};",
        ]
    return lines


def _add_dot(first_x: int) -> Callable[[int], str]:
    """Add four products to $0; the activations are operands from `first_x` on."""
    return lambda quad: f"dp4a.s32.s32 $0, t, ${first_x + quad}, {'$0' if quad else '0'};"


def _add_wide_dot(first_high: int, first_low: int) -> Callable[[int], str]:
    """Likewise for both bytes of activations; `low` and then $0 hold exact sums of 24 bits."""

    def use(quad: int) -> str:
        lines = [
            f"dp4a.s32.s32 $0, t, ${first_high + quad}, {'$0' if quad else '0'};",
            f"dp4a.s32.s32 low, t, ${first_low + quad}, {'low' if quad else '0'};",
        ]
        if quad == 7:
            lines.append("mad.lo.s32 $0, $0, 256, low;")
        return "\n".join(lines)

    return use


def _to_output(quad: int) -> str:
    return f"mov.b32 ${quad}, t;"


_BASE_DOT = tl.constexpr(_base_ptx(("$1", "$2"), _add_dot(3)))
_FINE_DOT = tl.constexpr(_fine_ptx(("$1", "$2"), ("$3", "$4", "$5"), _add_wide_dot(6, 14)))
_BASE_WORDS = tl.constexpr(_base_ptx(("$8", "$9"), _to_output))
_FINE_WORDS = tl.constexpr(_fine_ptx(("$8", "$9"), ("$10", "$11", "$12"), _to_output))
_BASE_DOT_OPERANDS = tl.constexpr("=&r" + ",r" * 10)
_FINE_DOT_OPERANDS = tl.constexpr("=&r" + ",r" * 21)
_BASE_WORDS_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 2))
_FINE_WORDS_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 5))


@triton.jit
def stacked(o):
    """Eight tensors [...] as one [..., 8] in their order."""
    even = tl.join(tl.join(o[0], o[4]), tl.join(o[2], o[6]))  # [..., bit 2, bit 1]
    odd = tl.join(tl.join(o[1], o[5]), tl.join(o[3], o[7]))
    return tl.reshape(tl.join(even, odd), o[0].shape + [8])


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
def _plain_weights(w, FINE: tl.constexpr):
    """The weights of blocks, FP4 values doubled, by shifts alone: int32 [..., 8, 4] in order of k.

    The branch without PTX; all weights at once, because an interpreted operation takes long.
    """
    # Element e of half h at bits 4 (e % 8) + 2 (e // 8) of word h.
    e = tl.arange(0, 16)
    shift = tl.reshape(4 * (e % 8) + 2 * (e // 8), [1, 1, 1, 16])
    codes = (tl.expand_dims(tl.join(w[0], w[1]), -1) >> shift) & 3
    codes = tl.reshape(codes, w[0].shape + [8, 4])
    if FINE:
        words = ()
        for j in tl.static_range(8):
            words = words + (_digit_word(w, j),)
        place = tl.reshape(tl.arange(0, 4), [1, 1, 1, 4])
        # 2**20 / 5**place, rounded up: exact quotients for words below 1024.
        tail = tl.where(place == 2, 41944, 8389)
        fraction = tl.where(place == 0, 1048576, tl.where(place == 1, 209716, tail))
        quotient = (tl.expand_dims(stacked(words), -1) * fraction) >> 20
        digit = quotient - 5 * ((quotient * 0x334) >> 12)
        big = ((codes ^ (codes >> 1)) & 1) == 0
        value = tl.where(big, 6 + 2 * digit + 2 * (digit >> 1), digit)
        return tl.where(codes < 2, -value, value)
    else:
        return (0x0401FFFC << (24 - 8 * codes)) >> 24


@triton.jit
def block_dot(w, x, FINE: tl.constexpr, PTX: tl.constexpr):
    """Exact dot products of blocks; FP4 weights count double.

    Shapes:
        w: int32 [N, C] base words 0 and 1, then with FINE fine words 0, 1 and 2 (16 bits)
        x: eight int32 [N, C], or with FINE sixteen, hi before lo; returns int32 [N, C]
    """
    if PTX and FINE:
        dot = tl.inline_asm_elementwise(
            _FINE_DOT, _FINE_DOT_OPERANDS, _part(w, 0, 5) + x,
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX:
        dot = tl.inline_asm_elementwise(
            _BASE_DOT, _BASE_DOT_OPERANDS, _part(w, 0, 2) + x,
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        activations = _plain_activations(_part(x, 0, 8))
        if FINE:
            activations = 256 * activations + _plain_activations(_part(x, 8, 8))
        dot = tl.sum(tl.sum(_plain_weights(w, FINE) * activations, 3), 2)
    return dot


@triton.jit
def _plain_activations(x):
    """The signed bytes of eight words: int32 [..., 8, 4]."""
    byte = tl.reshape(tl.arange(0, 4), [1, 1, 1, 4])
    return (tl.expand_dims(stacked(x), -1) << (24 - 8 * byte)) >> 24


@triton.jit
def block_words(w, FINE: tl.constexpr, PTX: tl.constexpr):
    """The weights of blocks as int8, four to a word in order of k; FP4 weights doubled.

    Shapes:
        w: int32 [N, C] each, as in `block_dot`; returns int32 [N, C, 8]
    """
    if PTX and FINE:
        words = tl.inline_asm_elementwise(
            _FINE_WORDS, _FINE_WORDS_OPERANDS, [w[0], w[1], w[2], w[3], w[4]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        words = stacked(words)
    elif PTX:
        words = tl.inline_asm_elementwise(
            _BASE_WORDS, _BASE_WORDS_OPERANDS, [w[0], w[1]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        words = stacked(words)
    else:
        byte = tl.reshape(tl.arange(0, 4), [1, 1, 1, 4])
        words = tl.sum((_plain_weights(w, FINE) & 255) << (8 * byte), 3)
    return words


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
        tile from `load_tile`; codes int32 [8, G], with FINE [2, 8, G], and scales float32 [G] of
        the token; returns float32 [B]
    """
    PARTS: tl.constexpr = 6 if FINE else 3
    WORDS: tl.constexpr = 16 if FINE else 8
    lanes = tl.zeros([B, C], tl.float32)
    every_row = tl.zeros([B, 1], tl.int32)
    for first in tl.static_range(0, G, C):
        c = first + tl.arange(0, C)[None, :] + every_row  # [B, C]: loaded where it is used
        x = ()
        for o in tl.static_range(WORDS):
            x = x + (_load_activation(codes + o * G + c, c, G, first + C),)
        w = _part(tile, first // C * PARTS, PARTS)
        dot = block_dot(w, x, FINE, PTX)
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
