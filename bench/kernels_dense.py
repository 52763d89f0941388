"""Times of dense products, norms and sampling on a GPU, one JSON line each.

    python -m bench.kernels_dense [products|ffn|latents|prompts|small ...] [--sweep]
    python -m bench.kernels_dense tiles [--seconds 58]

Without names all parts run but tiles; --sweep tries other tiles of gemv and gemm beside the engine's.
`tiles` compares those of a step's products at DeepSeek-V4-Flash's shapes, for one row, two and eight;
processes of their own compile them meanwhile.

Every figure is the median of CUDA-graph replays; weights rotate through several copies, so that
they come from memory and not from L2. Needs a CUDA device; writes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.compiling import compiled, compilers, newest, only_compile
from bench.timing import DEVICE, report
from moet_desk.kernels.triton import dense
from moet_desk.kernels.triton import gemm as gemms
from moet_desk.kernels.triton.dense import gemv, swiglu_gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.kernels.triton.gemm import GemmTile, gemm, split
from moet_desk.kernels.triton.gemv_tiles import GemvTile, tile_for, way_of
from moet_desk.kernels.triton.latent import LatentWeight, mla_absorb, mla_out
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.sampling import SampleScratch, greedy, sample, wish

COLD_BYTES = 400 << 20
"""Weights read between two uses of one copy: several times the L2 of the cards we know."""

SHAPES = [  # what, outputs, inputs
    ("square", 4096, 4096),
    ("wide", 16384, 4096),
    ("deepseek joined", 2112, 7168),
    ("deepseek q_b", 24576, 1536),
    ("deepseek out", 7168, 16384),
    ("qwen joined", 5120, 2048),
    ("router", 256, 4096),
    ("demo", 512, 512),
]
SWEPT = ("square", "wide", "deepseek joined", "router")
SWEEP = [
    GemvTile(rows, warps, ahead)
    for rows, warps in ((1, 4), (2, 4), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (16, 4), (16, 8))
    for ahead in (1, 2, 4)
]
GEMM_SWEEP = [
    GemmTile(m=128, n=128, k=64, warps=8, stages=3),
    GemmTile(m=128, n=128, k=64, warps=8, stages=4),
    GemmTile(m=128, n=128, k=64, warps=4, stages=3),
    GemmTile(m=128, n=256, k=64, warps=8, stages=3),
    GemmTile(m=64, n=128, k=64, warps=4, stages=3),
    GemmTile(m=64, n=256, k=64, warps=8, stages=3),
    GemmTile(m=128, n=128, k=128, warps=8, stages=2),
]


def weights(n: int, k: int, dtype: torch.dtype) -> list[DenseWeight]:
    """Copies of a weight that together do not fit L2."""
    size = n * k * (1 if dtype is torch.float8_e4m3fn else 2)
    copies = max(2, min(64, -(-COLD_BYTES // size)))
    made = []
    for _ in range(copies):
        values = torch.randn(n, k, device=DEVICE).to(dtype)
        scales = None
        if dtype is torch.float8_e4m3fn:
            scales = torch.rand(-(-n // 128), -(-k // 128), device=DEVICE)
        made.append(DenseWeight(values, scales))
    return made


def weight_bytes(weight: DenseWeight) -> int:
    scales = 0 if weight.scales is None else 4 * weight.scales.numel()
    return weight.values.numel() * weight.values.element_size() + scales


def products(sweep: bool) -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        for what, n, k in SHAPES:
            copies = weights(n, k, dtype)
            for rows in (1, 3, 8):
                x, out = torch.randn(rows, k, device=DEVICE), torch.empty(rows, n, device=DEVICE)
                used = tile_for(n, k, copies[0].kind, rows)
                others = SWEEP if sweep and rows in (1, 3) and what in SWEPT else []
                for tile in [used, *others]:
                    report(
                        "gemv",
                        [partial(gemv, x, w, out, tile=tile) for w in copies],
                        moved=weight_bytes(copies[0]),
                        shape=f"{what} {n}x{k}",
                        weights=str(dtype).removeprefix("torch."),
                        rows=rows,
                        tile=f"{tile.rows} rows, {tile.warps} warps, {tile.ahead} ahead",
                        used=tile == used,
                    )


def feed_forward() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        for inter, k in ((2048, 4096), (2048, 7168)):
            copies = weights(2 * inter, k, dtype)
            for rows in (1, 3):
                x = torch.randn(rows, k, device=DEVICE)
                out = torch.empty(rows, inter, device=DEVICE)
                report(
                    "swiglu_gemv",
                    [partial(swiglu_gemv, x, w, out) for w in copies],
                    moved=weight_bytes(copies[0]),
                    shape=f"2x{inter}x{k}",
                    weights=str(dtype).removeprefix("torch."),
                    rows=rows,
                )


def latents() -> None:
    for heads, dn, dv in ((64, 128, 128), (64, 192, 256), (128, 128, 128)):
        copies = [
            LatentWeight(w, heads, dn, dv) for w in weights(heads * (dn + dv), 512, torch.bfloat16)
        ]
        for rows in (1, 3):
            q = torch.randn(rows, heads, dn, device=DEVICE)
            mixed = torch.randn(rows, heads, 512, device=DEVICE)
            out = torch.empty(rows, heads * dv, device=DEVICE)
            shape = f"{heads} heads, dn {dn}, dv {dv}"
            report(
                "mla_absorb",
                [partial(mla_absorb, q, up, mixed) for up in copies],
                moved=heads * dn * 1024,
                shape=shape,
                rows=rows,
            )
            report(
                "mla_out",
                [partial(mla_out, mixed, up, out) for up in copies],
                moved=heads * dv * 1024,
                shape=shape,
                rows=rows,
            )


def prompts(sweep: bool) -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        for m, n, k in (
            (4096, 4096, 4096), (2048, 2112, 7168), (4096, 24576, 1536), (512, 256, 4096),
            (512, 1536, 4096),
        ):  # fmt: skip
            w, used = weights(n, k, dtype)[0], gemms.tile_for(DEVICE, m, n, k)
            x = torch.randn(m, k, device=DEVICE)
            parts = torch.empty(2, m, k, dtype=torch.bfloat16, device=DEVICE)
            out = torch.empty(m, n, device=DEVICE)
            split(x, parts)
            used = gemms.tile_for(DEVICE, m, n)
            others = GEMM_SWEEP if sweep and m == n == 4096 else []
            for tile in [used, *(t for t in others if t != used)]:
                report(
                    "gemm",
                    [partial(gemm, parts, w, out, tile=tile)],
                    flops=2 * m * n * k,
                    shape=f"{m}x{n}x{k}",
                    weights=str(dtype).removeprefix("torch."),
                    tile=f"{tile.m}x{tile.n}x{tile.k}, {tile.warps} warps, {tile.stages} stages",
                    used=tile == used,
                )
    x = torch.randn(4096, 4096, device=DEVICE)
    parts = torch.empty(2, 4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    report("split", [partial(split, x, parts)], moved=8 * x.numel(), shape="4096x4096")


def small() -> None:
    for hidden in (512, 4096, 7168):
        x = torch.randn(1, hidden, device=DEVICE)
        w, out = torch.randn(hidden, device=DEVICE), torch.empty(1, hidden, device=DEVICE)
        report("rms_norm", [partial(rms_norm, x, w, 1e-6, out=out)], shape=f"{hidden}")
    for vocab in (129280, 262144):
        for rows in (1, 3):
            logits = torch.randn(rows, vocab, device=DEVICE) * 3
            tokens = torch.empty(rows, dtype=torch.int32, device=DEVICE)
            confidence = torch.empty(rows, device=DEVICE)
            error = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            scratch = SampleScratch.make(rows, vocab, device=DEVICE)
            report(
                "greedy",
                [partial(greedy, logits, tokens, confidence, error, scratch=scratch)],
                shape=f"{vocab}",
                rows=rows,
            )
            for name, row in (
                ("all filters", wish(temperature=0.7, top_k=40, top_p=0.95, min_p=0.02)),
                ("temperature alone", wish(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)),
            ):
                wishes = torch.tensor([row] * rows, dtype=torch.float64, device=DEVICE)
                draws = torch.tensor([[t, 7] for t in range(rows)], device=DEVICE)
                run = partial(
                    sample, logits, wishes, draws, tokens, confidence, error, scratch=scratch
                )
                report("sample", [run], shape=f"{vocab}, {name}", rows=rows)


@dataclass(frozen=True)
class Product:
    """A product of DeepSeek-V4-Flash's step: `groups` times [n, k], or gate and up of n in all."""

    name: str
    n: int
    k: int
    weights: str = "float8_e4m3fn"
    groups: int = 1
    gated: bool = False

    @property
    def kernel(self) -> Any:
        return dense._swiglu_gemv_kernel if self.gated else dense._gemv_kernel

    def weight(self) -> DenseWeight:
        rows, fp8 = self.n * self.groups, self.weights == "float8_e4m3fn"
        values = torch.randn(rows, self.k, device=DEVICE).to(getattr(torch, self.weights))
        scales = torch.rand(-(-rows // 128), -(-self.k // 128), device=DEVICE) if fp8 else None
        return DenseWeight(values, scales)

    def buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        width = self.n * self.groups // (2 if self.gated else 1)
        x = torch.randn(rows, self.groups * self.k, device=DEVICE)
        return x, torch.empty(rows, width, device=DEVICE)

    def run(self, x: Tensor, weight: DenseWeight, out: Tensor, tile: GemvTile) -> None:
        if self.gated:
            swiglu_gemv(x, weight, out, tile=tile)
        else:
            rows = dense._Rows(self.groups, self.n, 0, self.n)
            dense._launch(x, weight, out, rows, x_pitch=self.k, tile=tile)


PRODUCTS = (
    Product("q_a and kv", 1536, 4096),
    Product("q_b", 32768, 1024),
    Product("o_a", 1024, 4096, groups=8),
    Product("o_b", 4096, 8192),
    Product("shared down", 4096, 2048),
    Product("shared gate and up", 4096, 4096, gated=True),
    Product("pool", 2624, 4096, "bfloat16"),
    Product("router", 256, 4096, "bfloat16"),
    Product("index q_b", 8192, 1024),
    Product("head", 129280, 4096, "bfloat16"),
)
LEAST_LOADS, MOST_LOADS = 4, 16  # of 16 bytes of weights that a lane has under way


def tiles_of(product: Product, rows: int) -> list[GemvTile]:
    """Tiles to try, the engine's first."""
    kind = WeightKind.FP8 if product.weights == "float8_e4m3fn" else WeightKind.BF16
    n = product.groups * product.n
    used = tile_for(n, product.k, kind, rows, gated=product.gated)
    found = {way_of(product.k, kind, rows, used): used}
    for tile in SWEEP:
        way = way_of(product.k, kind, rows, tile)
        loads = way.rows * way.lanes * way.ahead / (32 * way.warps)
        if LEAST_LOADS <= loads <= MOST_LOADS and not (product.gated and tile.rows < 2):
            found.setdefault(way, tile)
    return list(found.values())


def without_card(capability: int, modules: Sequence[str]) -> None:
    only_compile(capability, modules)
    vars(dense)["has_e4m3"] = lambda _: capability >= 89


def fits(product: Product, rows: int, tile: GemvTile) -> bool:
    """Compile one tile; whether it spills nothing."""
    x, out = product.buffers(rows)
    product.run(x, product.weight(), out, tile)
    return newest(product.kernel).stack_bytes == 0


def tiles(until: float) -> None:
    jobs = [(product, rows) for rows in (1, 2, 8) for product in PRODUCTS]
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    with compilers(10 * major + minor, (__name__,), begin=without_card) as pool:
        waiting = {
            job: [("gemv", tile, pool.apply_async(fits, (*job, tile))) for tile in tiles_of(*job)]
            for job in jobs
        }
        for (product, rows), passed in compiled(waiting, until=until):
            compare(product, rows, passed["gemv"])


def compare(product: Product, rows: int, passed: Sequence[GemvTile]) -> None:
    """Print the time of every tile; all must give the same bits, and one row those of many.

    Raises:
        ValueError: one gives others.
    """
    first = product.weight()
    size = weight_bytes(first)
    copies = [first, *(product.weight() for _ in range(max(1, min(63, COLD_BYTES // size))))]
    x, out = product.buffers(rows)
    _, wanted = product.buffers(rows)
    for row in range(rows):
        product.run(x[row : row + 1], first, wanted[row : row + 1], passed[-1])
    for tile in passed:
        product.run(x, first, out.fill_(torch.nan), tile)
        if not torch.equal(out, wanted):
            raise ValueError(f"{tile} gives other bits for {rows} rows of {product}")
        report(
            "swiglu_gemv" if product.gated else "gemv",
            [partial(product.run, x, w, out, tile) for w in copies],
            moved=size, repeats=7, product=product.name, n=product.groups * product.n, k=product.k,
            weights=product.weights, rows=rows, tile=[tile.rows, tile.warps, tile.ahead],
        )  # fmt: skip


def main() -> None:
    parts = {
        "products": products,
        "ffn": lambda _: feed_forward(),
        "latents": lambda _: latents(),
        "prompts": prompts,
        "small": lambda _: small(),
    }
    parser = argparse.ArgumentParser(description="Times of dense kernels, one JSON line each.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default all")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    parser.add_argument("--seconds", type=float, default=58.0, help="of tiles")
    args = parser.parse_args()
    if args.parts == ["tiles"]:
        tiles(time.monotonic() + args.seconds)
        return
    for name in args.parts or parts:
        parts[name](args.sweep)


if __name__ == "__main__":
    main()
