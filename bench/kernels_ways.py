"""Ways of a step's experts and shared attention side by side on a GPU, one JSON line each.

    python -m bench.kernels_ways [experts|attention ...]

Sizes are DeepSeek-V4-Flash's. Every way of the experts must give the same bits; of attention all are
compared with a twin in float64. Processes of their own compile the experts' candidates.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from bench import kernels_moe as moe
from bench.compiling import compilers
from bench.timing import DEVICE, report
from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import SHARED_BLOCK
from moet_desk.kernels.triton import shared_attention as shared
from moet_desk.kernels.triton.attention import DecodeScratch
from moet_desk.kernels.triton.experts import Tile, experts_down, experts_hidden
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prepare import Rotation

SHAPE = (4096, 2048, 6)
Way = tuple[str, int, int, str]  # kernel, rows and warps of a program, how it goes about it

GATE_UP: dict[tuple[int, bool], list[tuple[int, int, str]]] = {
    (1, False): [
        (8, 4, "old"), (8, 4, "ahead"), (4, 4, "ahead"), (8, 8, "ahead"), (4, 2, "ahead"), (2, 2, "ahead"),
        (8, 4, "last"), (4, 4, "last"), (8, 8, "last"), (16, 8, "ahead"), (32, 16, "ahead"), (16, 16, "ahead"), (32, 16, "old"),
    ],
    (2, False): [(8, 4, "old"), (8, 4, "ahead"), (8, 4, "last"), (4, 4, "ahead"), (8, 8, "ahead")],
    (1, True): [(4, 4, "old"), (4, 4, "ahead"), (4, 8, "ahead")],
}  # fmt: skip
DOWN: dict[tuple[int, bool], list[tuple[int, int, str]]] = {
    (1, False): [
        (8, 1, "old"), (8, 1, "ahead"), (8, 2, "ahead"), (4, 1, "ahead"), (16, 2, "ahead"), (16, 4, "ahead"),
        (8, 4, "ahead"), (4, 2, "ahead"),
    ],
    (2, False): [(8, 1, "old"), (8, 1, "ahead"), (8, 2, "ahead"), (16, 4, "ahead")],
    (1, True): [(8, 4, "old"), (8, 4, "ahead"), (8, 2, "ahead")],
}  # fmt: skip
"""By tokens of a step, and whether rows are FP4; the way of today first."""


def calls_of(layers: moe.Layers, way: Way) -> list[Callable[[], None]]:
    kernel, rows, warps, how = way
    tile = Tile(rows, warps)
    done = None
    if how == "last":
        done = torch.zeros(
            layers.n_pairs * SHAPE[1] // 32, dtype=torch.int32, device=layers.x.device
        )
    if kernel == "gate_up":
        return [
            partial(
                experts_hidden, pool, layers.codes, layers.scales, scratch=layers.hidden,
                out_codes=layers.out_codes, out_scales=layers.out_scales, tile=tile,
                ahead=how != "old", done=done,
            )
            for pool in layers.pools
        ]  # fmt: skip
    return [
        partial(
            experts_down, pool, layers.out_codes, layers.out_scales, part=layers.part, tile=tile,
            ahead=how != "old",
        )
        for pool in layers.pools
    ]  # fmt: skip


def ways_of(tokens: int, *, fine: bool) -> list[Way]:
    gate_up = [("gate_up", *way) for way in GATE_UP[tokens, fine]]
    return gate_up + [("down", *way) for way in DOWN[tokens, fine]]


def compile_way(tokens: int, fine: bool, way: Way) -> None:
    layers = moe.Layers(SHAPE, tokens, fine=fine, pool_bytes=1)
    calls_of(layers, way)[0]()


def experts() -> None:
    cases = sorted(GATE_UP)
    with compilers(capability(), ("bench.kernels_moe", __name__)) as pool:
        waiting = [
            pool.apply_async(compile_way, (tokens, fine, way))
            for tokens, fine in cases
            for way in ways_of(tokens, fine=fine)
        ]
        for answer in waiting:
            answer.get()
    for tokens, fine in cases:
        layers = moe.Layers(SHAPE, tokens, fine=fine)
        first: dict[str, list[Tensor]] = {}
        for way in ways_of(tokens, fine=fine):
            kernel, rows, warps, how = way
            calls = calls_of(layers, way)
            wrote = [layers.out_codes, layers.out_scales] if kernel == "gate_up" else [layers.part]
            for tensor in wrote:
                tensor.zero_()
            same = True
            for call in [calls[0]] * 20:
                call()
                found = [tensor.clone().view(torch.int32) for tensor in wrote]
                same &= all(map(torch.equal, found, first.setdefault(kernel, found)))
            matrix = getattr(layers.layout, kernel)
            size = matrix.base_bytes + (matrix.fine_bytes if fine else 0)
            report(
                f"experts {kernel}", calls, moved=layers.n_pairs * size, repeats=9, tokens=tokens,
                fine=fine, tile=f"{rows}x{warps}", how=how, same_bits=same,
            )  # fmt: skip
        del layers
        torch.cuda.empty_cache()


# -- attention -----------------------------------------------------------------------------------

N, D, HELD, EPS, SCALE = 64, 512, 700, 1e-6, 512**-0.5


@dataclass(frozen=True)
class Look:
    """A way of attention.

    Attributes:
        way: "old" or "sliced".
        part: entries of a part, all of which a program takes in one round.
        warps: of a program.
        once: as the kernel's ONCE; 1 straight, 2 with a loop of one round.
        words: NVFP4 is decoded eight numbers at a time.
        few: parts are joined after one round of reads.
    """

    way: str = "sliced"
    part: int = 32
    warps: int = 8
    once: int = 1
    words: bool = True
    few: bool = True


LOOKS = (
    Look("old", few=False),
    Look("old"),
    Look(words=False),
    Look(),
    Look(once=2),
    Look(warps=4),
    Look(part=16, few=False),
    Look(part=16, warps=4, few=False),
)


class Lists:
    """Rows that see `seen` of the entries of a memory, and what attention makes of them."""

    def __init__(self, rows: int, seen: int) -> None:
        source = torch.Generator().manual_seed(1)
        self.rows, self.seen = rows, seen
        written = ref.shared_write(torch.randn(HELD, D, generator=source), FORM, SHARED_BLOCK)
        lists = [torch.randperm(HELD, generator=source)[:seen] for _ in range(rows)]
        self.table = torch.stack(lists).int().to(DEVICE)
        self.layers = [
            KvPages(written[:, None].clone().to(DEVICE), self.table, FORM) for _ in range(4)
        ]
        self.q = (3 * torch.randn(rows, N, D, generator=source)).to(DEVICE)
        self.sink = torch.randn(N, generator=source).to(DEVICE)
        frequencies, magnitude = ref.rope_frequencies(SHARED_BLOCK, 1e4)
        cos, sin = ref.rope_tables(torch.arange(9000), frequencies, magnitude)
        positions = torch.arange(8000, 8000 + rows, dtype=torch.int32, device=DEVICE)
        self.turns = Rotation(positions, cos.to(DEVICE), sin.to(DEVICE), interleaved=True)
        self.lengths = torch.full((rows,), seen, dtype=torch.int32, device=DEVICE)
        self.scratch = DecodeScratch.make(rows, N, D, device=DEVICE)
        self.out = torch.empty(8, rows, N // 8 * D, device=DEVICE)
        self.wanted = self._twin(ref.shared_read(written, FORM, D, SHARED_BLOCK)).to(DEVICE)

    def _twin(self, entries: Tensor) -> Tensor:
        """In float64: [rows, N, D]."""
        heads = self.q.cpu().double()
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS)
        at = self.turns.positions.cpu().long()
        cos, sin = (x.cpu()[at].double()[:, None] for x in (self.turns.cos, self.turns.sin))
        heads = _turned(heads, cos, sin)
        values = entries.double()[self.table.cpu().long()]
        scores = torch.einsum("tnd,tsd->tns", heads, values) * SCALE
        sink = self.sink.cpu().double()[None, :, None].expand(self.rows, -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return _turned(torch.einsum("tns,tsd->tnd", weights, values), cos, -sin)

    def error(self) -> float:
        """Largest difference from the twin."""
        found = self.out.transpose(0, 1).reshape(self.rows, N, D).double()
        return float((found - self.wanted).abs().max())


FORM = KvFormat.NVFP4


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., -SHARED_BLOCK::2], x[..., 1 - SHARED_BLOCK :: 2]
    part = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-SHARED_BLOCK], part], -1)


def parts_of(lists: Lists, kv: KvPages, look: Look) -> None:
    turns = lists.turns.cos, lists.turns.sin, lists.turns.positions
    own: dict[str, Any] = {}
    width: tuple[int, ...] = ()
    kernel: Any = shared._shared_decode_kernel
    if look.way == "sliced":
        kernel, width = shared._sliced_decode_kernel, (lists.seen,)
        own = {"ONCE": look.once, "WORDS": look.words}
    kernel[(triton.cdiv(lists.seen, look.part), N // 16, lists.rows)](
        lists.q, *turns, EPS, kv.pages, kv.table, kv.table.stride(0), lists.lengths,
        lists.scratch.sums, lists.scratch.stats, SCALE, *width, N=N, D=D, W=SHARED_BLOCK, PAGE=1,
        ENTRY=kv.entry_bytes, SPLITS=64, SHORTEST=look.part, TILE=look.part, BH=16,
        FORM=FORM.value, MMA=not INTERPRETED, HARDWARE=not INTERPRETED, num_warps=look.warps,
        num_stages=1, **own,
    )  # fmt: skip


def join(lists: Lists, look: Look) -> None:
    turns = lists.turns.cos, lists.turns.sin, lists.turns.positions
    few = lists.seen <= 8 * look.part and look.few
    shared._join_back_kernel[(4, N, lists.rows)](
        lists.scratch.sums, lists.scratch.stats, lists.lengths, lists.sink, *turns, lists.out,
        lists.out.stride(0), lists.out.stride(1), D=D, DR=SHARED_BLOCK, EACH=8, SPLITS=64,
        SHORTEST=look.part, B=128, AHEAD=8 if few else 24, FEW=look.few,
        COMPILED=not INTERPRETED, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def attention() -> None:
    for rows, seen in ((1, 640), (1, 192), (1, 128), (2, 640)):
        lists = Lists(rows, seen)
        for look in LOOKS:

            def both(kv: KvPages, look: Look = look) -> None:
                parts_of(lists, kv, look)
                join(lists, look)

            try:
                both(lists.layers[0])
            except Exception:  # whatever a compiler refuses
                traceback.print_exc()
                continue
            facts: dict[str, Any] = {"rows": rows, "seen": seen, **asdict(look)}
            facts["error"] = lists.error()
            alone = [partial(parts_of, lists, kv, look) for kv in lists.layers]
            joined = [partial(both, kv) for kv in lists.layers]
            report("parts", alone, repeats=9, **facts)
            report("parts and join", joined, repeats=9, **facts)


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def main(arguments: list[str]) -> None:
    torch.manual_seed(0)
    for name in arguments or ["experts", "attention"]:
        try:
            {"experts": experts, "attention": attention}[name]()
        except Exception:  # the other part says something on its own
            traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1:])
