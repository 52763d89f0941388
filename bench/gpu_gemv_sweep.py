"""Sweep tile sizes of the FP8 gemv on a GPU; prints the best few per shape as JSON lines."""

from __future__ import annotations

import json
import sys

import torch

from bench.gpu_step import timed
from moet_desk.kernels.triton.dense import DenseWeight, GemvTile, gemv

DEVICE = torch.device("cuda")


def main(budget: int) -> None:
    for n, k, rows in ((4096, 4096, 1), (16384, 4096, 1), (2048, 4096, 1), (4096, 4096, 4)):
        values = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
        grid = (-(-n // 128), -(-k // 128))
        weights = [
            DenseWeight(values.clone(), torch.rand(grid, device=DEVICE)) for _ in range(12)
        ]
        x, y = torch.randn(rows, k, device=DEVICE), torch.empty(rows, n, device=DEVICE)
        found = []
        for r, w in ((4, 1), (4, 4), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4), (32, 4), (32, 8)):
            for s in (1, 2, 3):
                tile = GemvTile(rows=r, warps=w, stages=s)

                def work(tile: GemvTile = tile) -> None:
                    for weight in weights:
                        gemv(x, weight, y, tile=tile)

                try:
                    us = timed(work, repeat=7) / len(weights) * 1e6
                except Exception as error:
                    print(json.dumps({"tile": str(tile), "error": str(error)[:60]}), flush=True)
                    continue
                found.append((round(us, 2), str(tile)))
        found.sort()
        print(json.dumps({"n": n, "k": k, "rows": rows, "gb_per_s": round(n * k / found[0][0] / 1e3),
                          "best": found[:6], "worst": found[-1]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
