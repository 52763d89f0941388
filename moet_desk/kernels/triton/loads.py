"""Sixteen bytes of weights per lane and the activations that meet them, in one layout.

Device code only. Loads are written as PTX, because a vector load of Triton's own chooses a layout
in which every use crosses shared memory (seen in the SASS: 16 barriers per 512 weights).

A lane's 16 bytes are a run of 4, 8 or 16 weights, met by 1, 2 or 4 pieces of four activations.
Taken in order, the pieces of neighbouring lanes would lie 32 or 64 bytes apart, which L1 serves two
or four times slower; so lanes take their pieces in turns, and their words of weights with them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moet_desk.kernels.triton.numbers import e4m3_value

# Read once: no room in L1. Not as ".nc", which ptxas would move behind `in_order`.
_WORDS = "ld.global.L1::no_allocate.v4.b32 {w0, w1, w2, w3}, [$4];"
_FLOATS = "ld.global.v4.b32 {w0, w1, w2, w3}, [$4];"
_OUT = " ".join(f"mov.b32 ${i}, w{i};" for i in range(4))


def _ptx(load: str, *, seen: str = "", turn: str = "", pieces: int = 1) -> tl.constexpr:
    """Four words from the address $4; zeros where operand `seen` is 0, turned by operand `turn`.

    With two pieces a turn of 1 exchanges halves; with four, turn t puts word t first.
    """
    lines = [".reg .b32 w<4>, v<4>; .reg .pred p, q;"]
    if seen:
        lines += [f"setp.ne.s32 p, {seen}, 0;", *(f"mov.b32 w{i}, 0;" for i in range(4)), "@p"]
    lines.append(load)
    if pieces == 4:
        lines += [f"and.b32 v0, {turn}, 1;", "setp.ne.s32 p, v0, 0;"]
        lines += [f"and.b32 v0, {turn}, 2;", "setp.ne.s32 q, v0, 0;"]
        lines += [f"selp.b32 v{i}, w{(i + 1) % 4}, w{i}, p;" for i in range(4)]
        lines += [f"selp.b32 w{i}, v{(i + 2) % 4}, v{i}, q;" for i in range(4)]
    if pieces == 2:
        lines += [f"setp.ne.s32 q, {turn}, 0;", *(f"mov.b32 v{i}, w{i};" for i in range(4))]
        lines += [f"selp.b32 w{i}, v{(i + 2) % 4}, v{i}, q;" for i in range(4)]
    return tl.constexpr("{ " + " ".join([*lines, _OUT]) + " }")


_FLOATS_ALL, _FLOATS_SEEN = _ptx(_FLOATS), _ptx(_FLOATS, seen="$5")
_ALL_1, _SEEN_1 = _ptx(_WORDS), _ptx(_WORDS, seen="$6")
_ALL_2, _SEEN_2 = (_ptx(_WORDS, seen=s, turn="$5", pieces=2) for s in ("", "$6"))
_ALL_4, _SEEN_4 = (_ptx(_WORDS, seen=s, turn="$5", pieces=4) for s in ("", "$6"))
_IN_ORDER = tl.constexpr("{ bar.warp.sync 0xffffffff; mov.b32 $0, $1; }")
_IN_ORDER_EIGHT = tl.constexpr(
    "{ bar.warp.sync 0xffffffff; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }"
)
_ONE_FLOAT = tl.constexpr("ld.global.f32 $0, [$1];")
_ONE_BF16 = tl.constexpr(
    "{ .reg .b16 zero, half; .reg .b32 w; mov.b16 zero, 0; ld.global.b16 half, [$1];"
    " mov.b32 w, {zero, half}; mov.b32 $0, w; }"
)
_FOUR_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high, a, b, c, d; .reg .b32 p, q;"
    " mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, low; cvt.rn.f16x2.e4m3x2 q, high;"
    " mov.b32 {a, b}, p; mov.b32 {c, d}, q;"
    " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


@triton.jit
def _plain(pointers, seen):
    return (
        tl.load(pointers, mask=seen, other=0),
        tl.load(pointers + 1, mask=seen, other=0),
        tl.load(pointers + 2, mask=seen, other=0),
        tl.load(pointers + 3, mask=seen, other=0),
    )


@triton.jit
def turn_of(lane, PIECES: tl.constexpr):
    """Which of its pieces a lane takes first: then eight neighbours read eight different banks."""
    if PIECES == 4:
        return (lane >> 1) & 3
    elif PIECES == 2:
        return (lane >> 2) & 1
    else:
        return lane * 0


@triton.jit
def in_order(x, PTX: tl.constexpr):
    """x, an int32; what was loaded before it is asked for before anything that needs this x.

    ptxas moves a load down to its first use, which leaves one under way where eight were written
    (seen in the SASS); across a barrier of the warp it does not.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _IN_ORDER, "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return x


@triton.jit
def in_order_halves(x, PTX: tl.constexpr):
    """`in_order` of bfloat16, of which a thread has eight side by side: sixteen bytes."""
    if PTX:
        return tl.inline_asm_elementwise(
            _IN_ORDER_EIGHT, "=r,=r,=r,=r,r,r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=8
        )
    else:
        return x


@triton.jit
def four_floats(pointers, seen, EVEN: tl.constexpr, PTX: tl.constexpr):
    """The four float32 from each pointer on, a multiple of 16 bytes; 0 where not `seen`.

    EVEN: all are seen. PTX: see `portable`. Returns four tensors of the pointers' shape.
    """
    if PTX and EVEN:
        values = tl.inline_asm_elementwise(
            _FLOATS_ALL, "=f,=f,=f,=f,l", [pointers.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX:
        values = tl.inline_asm_elementwise(
            _FLOATS_SEEN, "=f,=f,=f,=f,l,r",
            [pointers.to(tl.int64), tl.broadcast_to(seen, pointers.shape).to(tl.int32)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        values = _plain(pointers, seen)
    return values


@triton.jit
def four_words(
    pointers, turn, seen, PIECES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """The four int32 from each pointer on, turned: piece (j + turn) % PIECES comes at place j."""
    if PTX and EVEN:
        words = tl.inline_asm_elementwise(
            _ALL_4 if PIECES == 4 else _ALL_2 if PIECES == 2 else _ALL_1, "=r,=r,=r,=r,l,r",
            [pointers.to(tl.int64), tl.broadcast_to(turn, pointers.shape)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    elif PTX:
        words = tl.inline_asm_elementwise(
            _SEEN_4 if PIECES == 4 else _SEEN_2 if PIECES == 2 else _SEEN_1, "=r,=r,=r,=r,l,r,r",
            [
                pointers.to(tl.int64),
                tl.broadcast_to(turn, pointers.shape),
                tl.broadcast_to(seen, pointers.shape).to(tl.int32),
            ],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        first = (turn * (4 // PIECES)) % 4
        w = _plain(pointers, seen)
        words = ()
        for i in tl.static_range(4):
            at = (first + i) % 4
            words = words + (
                tl.where(at == 0, w[0], tl.where(at == 1, w[1], tl.where(at == 2, w[2], w[3]))),
            )
    return words


@triton.jit
def run_values(words, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """The weights in four words as float32, in order, without the scale of e4m3 or int8.

    KIND: "f32", "bf16", "fp8" or "int8". HARDWARE: e4m3 is converted by instructions of SM89 and
    later; the same values.
    """
    values = ()
    for i in tl.static_range(4):
        if KIND == "f32":
            values = values + (words[i].to(tl.float32, bitcast=True),)
        elif KIND == "bf16":
            values = values + (
                (words[i] << 16).to(tl.float32, bitcast=True),
                (words[i] & -65536).to(tl.float32, bitcast=True),
            )
        elif KIND == "int8":
            for byte in tl.static_range(4):
                # 2**23 + the byte with its sign bit turned, as bits of float32: exact
                bits = (((words[i] ^ -2139062144) >> (8 * byte)) & 255) | 0x4B000000
                values = values + (bits.to(tl.float32, bitcast=True) - 8388736.0,)
        elif HARDWARE:
            values = values + tl.inline_asm_elementwise(
                _FOUR_E4M3, "=f,=f,=f,=f,r", [words[i]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            for byte in tl.static_range(4):
                code = ((words[i] >> (8 * byte)) & 255).to(tl.uint8)
                values = values + (e4m3_value(code, False),)
    return values


@triton.jit
def one_scale(pointers, KIND: tl.constexpr, PTX: tl.constexpr):
    """The scale behind each pointer as float32: bfloat16 for "int8", else float32."""
    if not PTX:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            _ONE_BF16 if KIND == "int8" else _ONE_FLOAT,
            "=f,l",
            [pointers.to(tl.int64)],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
