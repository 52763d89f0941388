"""Hyper-connections: residual streams read, mixed and written to around a block.

Twins: `reference.connections` with `block_input` and `after`, `reference.collapse`, and of a
block's norm `reference.rms_norm` and `quantize_activations`. In a step a block takes two launches:
`advance` writes what the block before gave and, with the numbers at hand, makes the products of
this one's connections; `enter` makes the connections and the block's input. Both cut a token's work
into parts that follow from the widths alone and read that token alone, so its bits do not depend on
the others. Launchers allocate nothing and ask the device nothing, so they can be captured. Called
on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.portable import PTX
from moet_desk.kernels.triton.quant import is_wide, store_codes

_COLUMNS = 32
"""Columns of each stream that a program of a step has: 128 programs at H = 4096, as an H200 has
132 processors."""

_READ, _WIDE = 128, 256
"""The same of a program that makes a block's input, and of one that mixes and does nothing else."""

_REGISTERS = 128
"""Left to itself the assembler aims at 64 to 96 here, and asks for memory in two or three turns
that wait for each other.
"""

_TOKENS, _AT_ONCE = 64, 16
"""Of a prompt that a program makes products of, so that it reads the weights once for them, and
columns of each stream at a time: more would not fit the registers of an RTX 5090's processor.
"""


@triton.jit
def _given(y, part, weights, t, c, inside, H: tl.constexpr, K: tl.constexpr):
    """What a block gives at some columns; K experts' parts are not added up yet."""
    shared = tl.load(y + t * H + c, mask=inside, other=0.0)
    if K == 0:
        return shared
    else:
        total = tl.zeros_like(shared)
        for k in tl.static_range(K):
            here = tl.load(part + (t * K + k) * H + c, mask=inside, other=0.0)
            total += tl.load(weights + t * K + k) * here
        return shared + total


@triton.jit
def _mixed(x, given, made, N: tl.constexpr):
    """The streams, each a tensor, behind a block."""
    new = ()
    for m in tl.static_range(N):
        one = tl.load(made + N + m) * given
        for n in tl.static_range(N):
            one += tl.load(made + 2 * N + n * N + m) * x[n]  # from, to
        new = new + (one,)
    return new


@triton.jit
def _advance_kernel(
    streams, made, y, part, weights, project, parts,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    LINE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    own, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, row = own * C + tl.arange(0, C), tl.arange(0, R)
    inside = c < H
    here = (row < ROWS)[:, None] & inside[None, :]
    at = project + row[:, None] * (N * H) + c[None, :]
    streams += t * (N * H)
    w, x = (), ()
    for n in tl.static_range(N):
        w = w + (tl.load(at + n * H, mask=here, other=0.0),)
        x = x + (tl.load(streams + n * H + c, mask=inside, other=0.0),)
    if made is not None:
        given = _given(y, part, weights, t, c, inside, H, K)
        x = _mixed(x, given, made + t * (2 * N + N * N), N)
        tl.debug_barrier()  # all have read before one writes
        for n in tl.static_range(N):
            tl.store(streams + n * H + c, x[n], mask=inside)
    total = tl.zeros([R, C], tl.float32)
    for n in tl.static_range(N):
        total += w[n] * x[n][None, :]
    parts += (t * tl.num_programs(0) + own) * LINE
    tl.store(parts + row, tl.sum(total, 1), mask=row < ROWS)
    squares = 0.0
    for i in tl.static_range(N):
        for j in tl.static_range(i, N):
            pair = tl.sum(x[i] * x[j], 0)
            tl.store(parts + ROWS + i * N + j, pair)
            if i == j:
                squares += pair
            else:
                tl.store(parts + ROWS + j * N + i, pair)
    tl.store(parts + ROWS + N * N, squares)


@triton.jit(do_not_specialize=["n_tokens"])
def _many_kernel(
    streams, project, parts, n_tokens,
    H: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, LINE: tl.constexpr,
    EACH: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    t, own = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B), tl.program_id(1)
    row, known = tl.arange(0, R), t < n_tokens
    at_x, at_w = streams + t[:, None] * (N * H), project + row[None, :] * (N * H)
    total, squares = tl.zeros([B, R], tl.float32), tl.zeros([B, C], tl.float32)
    for first in range(0, EACH, C):
        c = own * EACH + first + tl.arange(0, C)
        inside = c < H
        for n in tl.static_range(N):
            here = known[:, None] & inside[None, :]
            x = tl.load(at_x + (n * H + c)[None, :], mask=here, other=0.0)
            here = (row < ROWS)[None, :] & inside[:, None]
            w = tl.load(at_w + (n * H + c)[:, None], mask=here, other=0.0)
            total = tl.dot(x, w, total, input_precision="tf32x3")
            squares += x * x
    parts += (t * tl.num_programs(1) + own) * LINE
    here = known[:, None] & (row < ROWS)[None, :]
    tl.store(parts[:, None] + row[None, :], total, mask=here)
    tl.store(parts + ROWS + N * N, tl.sum(squares, 1), mask=known)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _of_parts(parts, column, here, P2: tl.constexpr, LINE: tl.constexpr):
    """Some columns of a token's parts, [P2, columns]."""
    at = tl.arange(0, P2)[:, None] * LINE + column[None, :]
    return tl.load(parts + at, mask=here[:, None], other=0.0)


@triton.jit
def _read(
    streams, parts, base, scale, weight, out, codes, scales, eps, norm_eps, t, own,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, ROWS: tl.constexpr,
    LINE: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    PLAIN: tl.constexpr, FINE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Columns of what a block reads. Unless one program has the whole of it, the norm comes from
    the streams' products with each other, so that no program needs all columns.
    """
    column = own * WIDE + tl.arange(0, WIDE)
    inside = column < H
    x = ()
    for i in tl.static_range(N):  # all is asked for before anything is needed
        x = x + (tl.load(streams + i * H + column, mask=inside, other=0.0),)
    if weight is not None:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    n, k, p = tl.arange(0, N), tl.arange(0, N * N), tl.arange(0, P2)
    here = p < P
    squares = tl.load(parts + p * LINE + (ROWS + N * N), mask=here, other=0.0)
    read = _of_parts(parts, n, here, P2, LINE)
    one, other = tl.zeros([N * N], tl.float32), 1.0
    if not WHOLE:
        one = _of_parts(parts, ROWS + k, here, P2, LINE)
    gain, added = tl.load(scale), tl.load(base + n)
    factor = tl.rsqrt(tl.sum(squares, 0) / (N * H) + norm_eps)
    read = _sigmoid(tl.sum(read, 0) * factor * gain + added) + eps
    row = tl.zeros([WIDE], tl.float32)
    if not WHOLE:
        one = tl.sum(one, 0)
    for i in tl.static_range(N):
        gate = tl.sum(tl.where(n == i, read, 0.0), 0)
        row += gate * x[i]
        one = tl.where(k // N == i, gate * one, one)
        other = tl.where(k % N == i, gate, other)
    if weight is not None:
        mean = tl.sum(row * row if WHOLE else one * other, 0) / H
        mean = tl.where(mean < 0.0, 0.0, mean)  # of streams that cancel out
        row = row * tl.rsqrt(mean + norm_eps) * w
    tl.store(out + t * H + column, row, mask=inside)
    if codes is not None:
        B: tl.constexpr = WIDE // 32
        block = own * B + tl.arange(0, B)
        store_codes(tl.reshape(row, [B, 32]), block, codes, scales, t, H // 32, B, PLAIN, FINE, PTX)


@triton.jit
def _inverse(x, PTX: tl.constexpr):
    """1 / x of a sum of the mix, which is neither tiny nor huge, without the code for those."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _balance(mix, factors, eps, ACROSS: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr):
    """A matrix of N * N numbers whose columns, with ACROSS rows, wait for `factors`: the matrix
    with these, and the factors of its rows, or columns, that make their sums 1. Sums take a factor
    as soon as it is there; the matrix itself is not waited for.
    """
    new = ()
    for k in tl.static_range(N * N):
        new = new + (mix[k] * factors[k // N if ACROSS else k % N],)
    found = ()
    for i in tl.static_range(N):
        total = eps
        for j in tl.static_range(N):
            total = tl.fma(mix[j * N + i if ACROSS else i * N + j], factors[j], total)
        found = found + (_inverse(total, PTX),)
    return new, found


@triton.jit
def _balanced(mix, eps, STEPS: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr):
    """Softmax of the rows of N * N numbers, and eps; then columns and rows over their sums."""
    new, ones = (), ()
    for i in tl.static_range(N):
        most = mix[i * N]
        for j in tl.static_range(1, N):
            most = tl.maximum(most, mix[i * N + j])
        for j in tl.static_range(N):
            new = new + (tl.exp(mix[i * N + j] - most),)
        ones = ones + (1.0,)
    mix, rows = _balance(new, ones, 0.0, False, N, PTX)
    new = ()
    for k in tl.static_range(N * N):
        new = new + (mix[k] * rows[k // N] + eps,)
    mix, columns = _balance(new, ones, eps, True, N, PTX)
    for _ in range(STEPS - 1):
        mix, rows = _balance(mix, columns, eps, False, N, PTX)
        mix, columns = _balance(mix, rows, eps, True, N, PTX)
    new = ()
    for k in tl.static_range(N * N):
        new = new + (mix[k] * columns[k % N],)
    return new


@triton.jit
def _write_and_mix(
    parts, base, scale, made, eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, ROWS: tl.constexpr,
    LINE: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What is needed behind a block."""
    n, k, p = tl.arange(0, N), tl.arange(0, N * N), tl.arange(0, P2)
    here = p < P
    squares = tl.load(parts + p * LINE + (ROWS + N * N), mask=here, other=0.0)
    cells = _of_parts(parts, 2 * N + k, here, P2, LINE)
    write = _of_parts(parts, N + n, here, P2, LINE)
    gain, added = tl.load(scale + 1), tl.load(base + N + n)
    own_gain, own_added = tl.load(scale + 2), tl.load(base + 2 * N + k)
    factor = tl.rsqrt(tl.sum(squares, 0) / (N * H) + norm_eps)
    cells = tl.sum(cells, 0) * factor * own_gain + own_added
    # Every lane has the whole mix, so that its many sums wait for no other lane.
    mix = ()
    for i in tl.static_range(N * N):
        mix = mix + (tl.sum(tl.where(k == i, cells, 0.0), 0),)
    write = tl.sum(write, 0) * factor * gain + added
    tl.store(made + N + n, 2.0 * _sigmoid(write))
    mix = _balanced(mix, eps, STEPS, N, PTX)
    for i in tl.static_range(N * N):
        cells = tl.where(k == i, mix[i], cells)
    tl.store(made + 2 * N + k, cells)


@triton.jit
def _enter_kernel(
    streams, parts, base, scale, made, weight, out, codes, scales, eps, norm_eps,
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, ROWS: tl.constexpr,
    LINE: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    FIRST: tl.constexpr, PLAIN: tl.constexpr, FINE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t, own = tl.program_id(1).to(tl.int64), tl.program_id(0) + FIRST
    parts += t * (P * LINE)
    if ROWS > N:
        own -= 1  # the first program's work takes longest
    if own >= 0:
        _read(
            streams + t * (N * H), parts, base, scale, weight, out, codes, scales, eps, norm_eps,
            t, own, H, N, P, P2, ROWS, LINE, WIDE, WHOLE, PLAIN, FINE, PTX,
        )  # fmt: skip
    else:
        _write_and_mix(
            parts, base, scale, made + t * ROWS, eps, norm_eps, H, N, P, P2, ROWS, LINE, STEPS,
            PTX,
        )  # fmt: skip


@triton.jit
def _after_kernel(
    streams,
    made,
    y,
    H: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (n < N)[:, None] & (column < H)[None, :]
    at = streams + (t * N + n[:, None]) * H + column[None, :]
    x = tl.load(at, mask=inside, other=0.0)
    made += t * ROWS
    mix = tl.load(made + 2 * N + n[:, None] * N + n[None, :])  # from, to
    block = tl.load(y + t * H + column, mask=column < H, other=0.0)
    mixed = tl.sum(mix[:, :, None] * x[:, None, :], 0)
    write = tl.load(made + N + n)
    tl.store(at, write[:, None] * block[None, :] + mixed, mask=inside)


@dataclass(frozen=True, slots=True)
class StreamScratch:
    """What connections are made in; the next block may use it again.

    Attributes:
        parts: [T, parts, rows + N*N + 4] float32, of each product, of the streams with each other,
            and of all squares.
        made: [T, rows] float32: of each token, behind room for N, what writes, and the mix (from,
            to).
        many: of a prompt, whose streams are not multiplied with each other.
    """

    parts: Tensor
    made: Tensor
    many: bool

    @classmethod
    def make(
        cls, rows: int, n: int, hidden: int, device: torch.device, *, parts: int | None = None
    ) -> StreamScratch:
        """For up to `rows` tokens of a step, or with `parts` of a prompt."""
        most, n_parts = 2 * n + n * n, parts or -(-hidden // _COLUMNS)
        return cls(
            torch.empty((rows, n_parts, _line(most, n)), device=device),
            torch.empty((rows, most), device=device),
            many=parts is not None,
        )

    def of(self, rows: slice) -> StreamScratch:
        """That of some tokens."""
        return StreamScratch(self.parts[rows], self.made[rows], self.many)


@dataclass(frozen=True, slots=True)
class Given:
    """What a block gives: y, and if routed experts are beside it, sum over k of weight * part.

    Shapes:
        y [T, H]; part [T * K, H], weights [T, K]; float32
    """

    y: Tensor
    part: Tensor | None = None
    weights: Tensor | None = None


def advance(
    streams: Tensor, given: Given | None, project: Tensor, *, scratch: StreamScratch
) -> None:
    """The streams behind a block, in place, and the products of the next one's connections.

    What was given came of the block whose connections are in `scratch.made`; None if there was
    none. `project` is the next block's, or of the end of all layers, with N rows.

    Shapes:
        streams [T, N, H], N a power of two; project [2N + N*N or N, N*H], float32; leaves
        `scratch.parts`
    """
    n_tokens, n, hidden = streams.shape
    rows = project.shape[0]
    y = part = weights = None
    if given is not None:
        y, part, weights = given.y, given.part, given.weights
    _advance_kernel[(scratch.parts.shape[1], n_tokens)](
        streams, None if given is None else scratch.made, y, part, weights, project, scratch.parts,
        H=hidden, N=n, K=0 if weights is None else weights.shape[1], ROWS=rows,
        R=triton.next_power_of_2(rows), LINE=_line(rows, n), C=_COLUMNS, num_warps=4,
        maxnreg=_REGISTERS,
    )  # fmt: skip


def multiply_many(streams: Tensor, project: Tensor, *, scratch: StreamScratch) -> None:
    """The products of a block's connections for tokens of a prompt, in as many parts as `scratch`
    was made for; those of `advance`, whose last bits differ.

    Shapes:
        streams [T, N, H], N a power of two; project [2N + N*N, N*H], float32; leaves
        `scratch.parts`
    """
    n_tokens, n, hidden = streams.shape
    rows, n_parts = project.shape[0], scratch.parts.shape[1]
    each = triton.cdiv(triton.cdiv(hidden, n_parts), _AT_ONCE) * _AT_ONCE
    _many_kernel[(triton.cdiv(n_tokens, _TOKENS), n_parts)](
        streams, project, scratch.parts, n_tokens, H=hidden, N=n, ROWS=rows,
        R=max(16, triton.next_power_of_2(rows)), LINE=_line(rows, n), EACH=each, B=_TOKENS,
        C=_AT_ONCE, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamGates:
    """Weights of connections but for the products.

    Attributes:
        base: [2N + N*N or N]; scale: [3] or [1]; float32.
        steps: how often a mix is balanced.
        eps: of the gates and of the mix.
        norm_eps: of the streams' norm and of the block's.
    """

    base: Tensor
    scale: Tensor
    steps: int
    eps: float
    norm_eps: float


def enter(
    streams: Tensor,
    gates: StreamGates,
    norm: Tensor | None,
    *,
    scratch: StreamScratch,
    out: Tensor,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """What a block reads, normed if there is a norm; of the products that `scratch.parts` has.
    Leaves `scratch.made` for what comes behind the block.

    Shapes:
        streams [T, N, H], norm [H], out [T, H] float32; codes and scales as in `quantize_rows`
    """
    n_tokens, n, hidden = streams.shape
    rows, n_parts = gates.base.shape[0], scratch.parts.shape[1]
    n_mixed, padded = int(rows > n), triton.next_power_of_2(hidden)
    launches = [(0, triton.cdiv(hidden, _READ) + n_mixed, _READ, 1)]
    if scratch.many:  # many tokens fill the card with one program for the columns of each
        launches = [(0, n_mixed, _READ, 1), (n_mixed, 1, padded, max(1, min(8, padded // 512)))]
    for first, n_programs, wide, warps in launches:
        _enter_kernel[(n_programs, n_tokens)](
            streams, scratch.parts, gates.base, gates.scale, scratch.made, norm, out, codes,
            scales, gates.eps, gates.norm_eps, H=hidden, N=n, P=n_parts,
            P2=triton.next_power_of_2(n_parts), ROWS=rows, LINE=_line(rows, n), STEPS=gates.steps,
            WIDE=wide, WHOLE=scratch.many, FIRST=first,
            PLAIN=codes is not None and codes.dtype == torch.int8,
            FINE=codes is not None and is_wide(codes), PTX=PTX,
            num_warps=warps,  # of one, many small sums need no barrier
            maxnreg=_REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip


def write_back(streams: Tensor, y: Tensor, *, scratch: StreamScratch) -> None:
    """The streams behind a block, in place.

    Shapes:
        streams [T, N, H], the block's output y [T, H], float32
    """
    n_tokens, n, hidden = streams.shape
    _after_kernel[(n_tokens, triton.cdiv(hidden, _WIDE))](
        streams, scratch.made, y, H=hidden, N=n, ROWS=2 * n + n * n, WIDE=_WIDE, num_warps=4,
    )  # fmt: skip


def _line(rows: int, n: int) -> int:
    """Numbers of a part: products, the streams' with each other, and all squares with what keeps
    the next part aligned.
    """
    return rows + n * n + 4
