"""Times of attention on a GPU, one JSON line each: a step's, and a prompt chunk's.

    python -m bench.kernels_attention [mla|gqa|prepare|prompts|chosen ...] [--sweep]

Without names all parts run; --sweep tries other tiles of the prompt's kernels on Hopper. "chosen" is of
GLM-5.2's sizes: 512 rows of a prompt that see 2,048 of 8,192 entries, and the step's kernels for 8 of them.

Every figure is the median of CUDA-graph replays, per layer. Pages rotate through several layers'
worth. Needs a CUDA device; writes nothing.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from bench.timing import DEVICE, report
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import index_form, index_key_bytes
from moet_desk.kernels.reference import quantize_dense
from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton import chosen_prefill, gemm, prefill_attention
from moet_desk.kernels.triton.attention import gqa_decode, mla_decode
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.choose import choose
from moet_desk.kernels.triton.chosen_prefill import ChosenTile
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.indexer import chosen_pages, index_scores
from moet_desk.kernels.triton.kv_entries import KvPages, mla_write
from moet_desk.kernels.triton.latent import LatentWeight, mla_absorb, mla_out
from moet_desk.kernels.triton.prefill_attention import PrefillScratch, gqa_prefill, mla_prefill
from moet_desk.kernels.triton.prepare import Rotation, mla_prepare, rotate_queries

PAGE = 64
CHOSEN_TILES = [
    ChosenTile(heads, entries, 128, warps, stages, held=True)
    for heads, entries, warps, stages in (
        (32, 64, 8, 3), (32, 64, 8, 2), (32, 64, 8, 1), (32, 128, 8, 1), (64, 64, 8, 1),
        (16, 64, 4, 1),
    )
]  # fmt: skip
SHAPES = [(128, 64, 8, 1), (128, 32, 8, 1), (128, 32, 8, 2), (64, 64, 4, 1), (64, 32, 4, 1)]


def pages_of(form: KvFormat, entry_bytes: int, entries: int, rows: int) -> KvPages:
    """Pages of zeros: times do not depend on values."""
    each = -(-entries // PAGE)
    shape = (each * rows, PAGE, entry_bytes)
    table = torch.arange(each * rows, dtype=torch.int32, device=DEVICE).view(rows, each)
    return KvPages(torch.zeros(shape, dtype=torch.uint8, device=DEVICE), table, form)


def mla_steps() -> None:
    for form in (KvFormat.NVFP4, KvFormat.FP8, KvFormat.BF16):
        for heads in (64, 128):
            for context in (1024, 4096, 32768):
                for rows in (1, 3):
                    size = mla_entry_bytes(form, 512, 64)
                    layers = [pages_of(form, size, context, rows) for _ in range(4)]
                    q = torch.randn(rows, heads, 512, device=DEVICE)
                    rope = torch.randn(rows, heads, 64, device=DEVICE)
                    seen = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
                    out = torch.empty_like(q)
                    scratch = DecodeScratch.make(rows, heads, 512, device=DEVICE)
                    report(
                        "mla_decode",
                        [
                            partial(mla_decode, q, rope, kv, seen, out, scale=0.05, scratch=scratch)
                            for kv in layers
                        ],
                        moved=rows * context * size,
                        form=form.value,
                        heads=heads,
                        context=context,
                        rows=rows,
                    )


def gqa_steps() -> None:
    for form in (KvFormat.NVFP4, KvFormat.FP8, KvFormat.BF16):
        for heads, keys, d, window in ((32, 4, 128, None), (64, 8, 64, 128)):
            for context in (4096, 32768):
                size = gqa_entry_bytes(form, keys, d, d)
                layers = [pages_of(form, size, context, 1) for _ in range(4)]
                q = torch.randn(1, heads, d, device=DEVICE)
                seen = torch.full((1,), context, dtype=torch.int32, device=DEVICE)
                out, scratch = torch.empty_like(q), DecodeScratch.make(1, heads, d, device=DEVICE)
                report(
                    "gqa_decode",
                    [
                        partial(
                            gqa_decode,
                            q,
                            kv,
                            seen,
                            out,
                            n_keys=keys,
                            scale=0.1,
                            scratch=scratch,
                            window=window,
                        )
                        for kv in layers
                    ],
                    moved=min(context, window or context) * size,
                    form=form.value,
                    heads=heads,
                    context=context,
                    window=window,
                )


def preparing() -> None:
    form = KvFormat.NVFP4
    kv = pages_of(form, mla_entry_bytes(form, 512, 64), 4096, 1)
    angles = torch.randn(4096, 32, device=DEVICE)
    at = torch.tensor([4000], dtype=torch.int32, device=DEVICE)
    by = Rotation(at, angles.cos(), angles.sin(), interleaved=True)
    joined = torch.randn(1, 1536 + 576, device=DEVICE)
    w, q_w = torch.randn(512, device=DEVICE), torch.randn(1536, device=DEVICE)
    q_latent = torch.empty(1, 1536, device=DEVICE)
    run = partial(mla_prepare, joined, w, 1e-6, rotation=by, kv=kv, q_out=q_latent, q_weight=q_w)
    report("mla_prepare", [run])
    q, rope = torch.randn(1, 64, 192, device=DEVICE), torch.empty(1, 64, 64, device=DEVICE)
    report("rotate_queries", [partial(rotate_queries, q, rope, rotation=by)])
    latent, k = torch.randn(1, 512, device=DEVICE), torch.randn(1, 64, device=DEVICE)
    report("mla_write", [partial(mla_write, latent, k, kv, at)])


def mla_prompt(heads: int, dn: int, dv: int, count: int, start: int, shape: str) -> None:
    form, seen = KvFormat.NVFP4, start + count
    kv = pages_of(form, mla_entry_bytes(form, 512, 64), seen, 1)
    values = torch.randn(heads * (dn + dv), 512, device=DEVICE).bfloat16()
    up = LatentWeight(DenseWeight(values), heads, dn, dv)
    q = torch.randn(count, heads, dn + 64, device=DEVICE)
    rope, out = q[..., dn:].contiguous(), torch.empty(count, heads * dv, device=DEVICE)
    per_entry = 16 * (dn + dv)
    scratch = PrefillScratch.make(seen, 512, 64, per_entry=per_entry, device=DEVICE)
    run = partial(
        mla_prefill, q[..., :dn], rope, kv, up, out, start=start, scale=0.07, scratch=scratch
    )
    pairs = count * start + count * (count + 1) // 2
    report(
        "mla_prefill",
        [run],
        flops=2 * pairs * heads * (dn + 64 + dv),
        heads=heads,
        dims=f"{dn}+64, {dv}",
        rows=count,
        start=start,
        tile=shape,
        repeats=5,
    )


def gqa_prompt(count: int, start: int, shape: str) -> None:
    form, seen = KvFormat.NVFP4, start + count
    kv = pages_of(form, gqa_entry_bytes(form, 4, 128, 128), seen, 1)
    q = torch.randn(count, 32, 128, device=DEVICE)
    run = partial(gqa_prefill, q, kv, torch.empty_like(q), n_keys=4, start=start, scale=0.09)
    pairs = count * start + count * (count + 1) // 2
    report(
        "gqa_prefill",
        [run],
        flops=2 * pairs * 32 * 256,
        rows=count,
        start=start,
        tile=shape,
        repeats=5,
    )


def prompts(sweep: bool) -> None:
    for shape in SHAPES if sweep else [prefill_attention.HOPPER_SHAPE]:
        prefill_attention.HOPPER_SHAPE = shape
        mla_prompt(64, 128, 128, 4096, 4096, str(shape))
        if shape[:2] != (128, 64) or not sweep:
            mla_prompt(64, 192, 256, 2048, 2048, str(shape))
        gqa_prompt(4096, 4096, str(shape))


def chosen(sweep: bool) -> None:
    heads, dn, dv, r, dr, rows, top_k, seen = 64, 192, 256, 512, 64, 512, 2048, 8192
    form = KvFormat.NVFP4
    kv = pages_of(form, mla_entry_bytes(form, r, dr), seen, 1)
    q = torch.randn(rows, heads, dn + dr, device=DEVICE)
    rope, out = q[..., dn:].contiguous(), torch.empty(rows, heads * dv, device=DEVICE)
    scores = torch.rand(rows, seen, device=DEVICE)
    places = scores.topk(top_k).indices.sort(1).values.int()
    counts = torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE)
    scratch = PrefillScratch.make(seen, r, dr, per_entry=16 * (dn + dv), device=DEVICE)
    decode = partial(prefill_attention.decode_latents, kv, seen, r, dr, scratch)
    latents, ropes = decode()
    parts = torch.empty(2, rows, heads, r + dr, dtype=torch.bfloat16, device=DEVICE)
    mixed = torch.empty(2, heads, rows, r, dtype=torch.bfloat16, device=DEVICE)
    values = torch.randn(heads * (dn + dv), r)
    weight = DenseWeight(*(x.to(DEVICE) for x in quantize_dense(values)))
    up, nope = LatentWeight(weight, heads, dn, dv), q[..., :dn]
    line = partial(report, rows=rows, repeats=5)
    for asking in (rows, 8):
        choosing(asking)
    line("decode_latents", [decode])
    flops = 2 * rows * heads * r
    absorb = partial(chosen_prefill.absorb_rows, nope, rope, up, parts)
    line("absorb_rows", [absorb], flops=flops * dn)
    kept = chosen_prefill.HOPPER_TILE
    for tile in CHOSEN_TILES if sweep else [kept]:
        chosen_prefill.HOPPER_TILE = tile
        attend = partial(
            chosen_prefill.attend_chosen, parts, latents, ropes, places, counts, mixed,
            scale=0.06, form=form,
        )  # fmt: skip
        line("attend_chosen", [attend], flops=flops // r * top_k * (2 * r + dr), tile=str(tile))
    chosen_prefill.HOPPER_TILE = kept
    product = partial(gemm.gemm_of_heads, mixed, weight, out, first=dn, count=dv)
    line("gemm_of_heads", [product], flops=flops * dv)
    whole = partial(
        chosen_prefill.chosen_prefill, nope, rope, kv, up, places, counts, out,
        entries=seen, scale=0.06, scratch=scratch,
    )  # fmt: skip
    line("chosen_prefill", [whole])
    few = slice(0, 8)
    pages = chosen_pages(kv, places[few])  # pages lie in the order of the sequence
    room = DecodeScratch.make(8, heads, r, device=DEVICE)
    absorbed, back = (torch.empty(8, heads, r, device=DEVICE) for _ in range(2))

    def step() -> None:
        mla_absorb(nope[few], up, absorbed)
        mla_decode(absorbed, rope[few], pages, counts[few], back, scale=0.06, scratch=room)
        mla_out(back, up, out[few])

    report("a step's launches", [step], rows=8, repeats=5)


def choosing(rows: int) -> None:
    """An indexer's two launches for rows that see 8,192 entries, as GLM-5.2 has them."""
    form, seen = KvFormat.NVFP4, 8192
    own = pages_of(index_form(form), index_key_bytes(form, 128), seen, 1)
    keys = KvPages(own.pages, own.table.expand(rows, -1), own.form)
    q, weights = torch.randn(rows, 32, 128, device=DEVICE), torch.randn(rows, 32, device=DEVICE)
    lengths = torch.full((rows,), seen, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(rows, seen, device=DEVICE)
    named = torch.zeros(rows, 2048, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    score = partial(index_scores, q, weights, keys, lengths, scores, scale=0.01)
    report("index_scores", [score], rows=rows, repeats=5)
    scores.normal_()
    report("choose", [partial(choose, scores, lengths, None, named, counts)], rows=rows, repeats=5)


def main() -> None:
    parts = {
        "mla": lambda _: mla_steps(),
        "gqa": lambda _: gqa_steps(),
        "prepare": lambda _: preparing(),
        "prompts": prompts,
        "chosen": chosen,
    }
    parser = argparse.ArgumentParser(description="Times of attention, one JSON line each.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default all")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    for name in args.parts or parts:
        parts[name](args.sweep)


if __name__ == "__main__":
    main()
