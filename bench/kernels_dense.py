"""Times of dense products, norms and sampling on a GPU, one JSON line each.

    python -m bench.kernels_dense [products|ffn|latents|prompts|small ...] [--sweep]

Without names all parts run; --sweep tries other tiles of gemv and gemm beside the engine's.

Every figure is the median of CUDA-graph replays; weights rotate through several copies, so that
they come from memory and not from L2. Needs a CUDA device; writes nothing.
"""

from __future__ import annotations

from functools import partial

import torch

from bench.timing import DEVICE, report, run_parts
from moet_desk.kernels.triton import gemm as gemms
from moet_desk.kernels.triton.dense import DenseWeight, GemvTile, gemv, swiglu_gemv, tile_for
from moet_desk.kernels.triton.gemm import GemmTile, gemm, split
from moet_desk.kernels.triton.latent import LatentWeight, mla_absorb, mla_out
from moet_desk.kernels.triton.norms import add_rms_norm
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
    GemvTile(rows, warps, unroll)
    for rows, warps in (
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
        (4, 4),
        (8, 2),
        (8, 4),
        (16, 4),
        (16, 8),
    )
    for unroll in (1, 2, 4)
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
                used = tile_for(n, rows)
                others = SWEEP if sweep and rows in (1, 3) and what in SWEPT else []
                for tile in [used, *others]:
                    report(
                        "gemv",
                        [partial(gemv, x, w, out, tile=tile) for w in copies],
                        moved=weight_bytes(copies[0]),
                        shape=f"{what} {n}x{k}",
                        weights=str(dtype).removeprefix("torch."),
                        rows=rows,
                        tile=f"{tile.rows} rows, {tile.warps} warps, unrolled {tile.unroll}",
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
    used = gemms.tile_for(DEVICE)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        for m, n, k in ((4096, 4096, 4096), (2048, 2112, 7168), (4096, 24576, 1536)):
            w = weights(n, k, dtype)[0]
            x = torch.randn(m, k, device=DEVICE)
            parts = torch.empty(2, m, k, dtype=torch.bfloat16, device=DEVICE)
            out = torch.empty(m, n, device=DEVICE)
            split(x, parts)
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
        x, y = (torch.randn(1, hidden, device=DEVICE) for _ in range(2))
        w, out = torch.randn(hidden, device=DEVICE), torch.empty(1, hidden, device=DEVICE)
        report("add_rms_norm", [partial(add_rms_norm, x, y, w, 1e-6, out=out)], shape=f"{hidden}")
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


def main() -> None:
    parts = {
        "products": products,
        "ffn": lambda _: feed_forward(),
        "latents": lambda _: latents(),
        "prompts": prompts,
        "small": lambda _: small(),
    }
    run_parts(parts, "Times of dense kernels, one JSON line each.")


if __name__ == "__main__":
    main()
