"""Kernels of DeepSeek-V4-Flash: residual streams, pooled entries, attention to them."""

from __future__ import annotations

from collections.abc import Iterator

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import pooled_key_bytes, shared_entry_bytes
from moet_desk.kernels.triton import (
    head_parts,
    pooled_keys,
    pooled_scores,
    pooling,
    route,
    seen,
    shared_attention,
    shared_prefill,
    streams,
)
from tests.kernels.triton.cases_attention import DECODE, DEVICE, ONE_STAGE, PARTS
from tests.kernels.triton.gate import Case

N, HIDDEN = 4, 4096
F32 = "*fp32"
EXACT = {"enable_fp_fusion": False}
TURNS = {"cos": F32, "sin": F32, "positions": "*i32"}


def _cases() -> Iterator[Case]:
    yield from _streams()
    for form in KvFormat:
        values = {
            **PARTS, **DEVICE, "N": 64, "D": 512, "W": 64, "PAGE": 1, "FORM": form.value,
            "ENTRY": shared_entry_bytes(form, 512, 64),
        }  # fmt: skip
        kernel = shared_attention._shared_decode_kernel
        types = {**DECODE, "q": F32, **TURNS, "eps": "fp32", "width": "i32"}
        for tile, once, card in ((32, True, None), (32, False, 90), (16, False, 120)):
            name = f"shared_decode {form.value} {tile}{' once' if once else ''}"
            own = {**values, "SHORTEST": 32, "TILE": tile, "ONCE": once}
            own["WORDS"] = form is KvFormat.NVFP4
            if form is KvFormat.F32 and tile == 32:
                continue
            warps = shared_attention._warps(form, once)
            yield Case(name, kernel, types, own, warps, ONE_STAGE, wants=("HMMA",), only=card)
    types = {
        **TURNS, "sums": F32, "stats": F32, "lengths": "*i32", "sink": F32, "out": F32,
        "group_stride": "i32", "row_stride": "i32",
    }  # fmt: skip
    values = {
        "D": 512, "DR": 64, "EACH": 8, "SPLITS": 64, "SHORTEST": 32, "B": 128, "AHEAD": 24,
        "COMPILED": True,
    }  # fmt: skip
    for few in (True, False):
        own = {**values, "FEW": few}
        kernel = shared_attention._join_back_kernel
        yield Case(f"join_back few={few}", kernel, types, own, 1, EXACT)
    for ratio, overlap, dim in ((4, True, 512), (4, True, 128), (128, False, 512)):
        types = {
            "joined": F32, "joined_stride": "i32", "places": F32, "positions": "*i32",
            "states": F32, "sources": "*i32", "targets": "*i32", "means": F32, "n_rows": "i32",
        }  # fmt: skip
        values = {"D": dim, "RATIO": ratio, "OVERLAP": overlap, "B": 64, "COMPILED": True}
        yield Case(f"pool {ratio} D={dim}", pooling._pool_kernel, types, values, 2, EXACT)
        types = {
            "joined": F32, "joined_stride": "i32", "places": F32, "start": "i32", "held": F32,
            "states": F32, "targets": "*i32", "means": F32, "n_rows": "i32",
        }  # fmt: skip
        name, values = f"pool_run {ratio} D={dim}", {**values, "KEPT": 16}
        yield Case(name, pooling._pool_run_kernel, types, values, 2, EXACT)
    for form in KvFormat:
        types = {
            "vectors": F32, "vectors_stride": "i32", "weight": F32, "eps": "fp32", "cos": F32,
            "sin": F32, "positions": "*i32", "pages": "*u8", "table": "*i32",
            "table_stride": "i32",
        }  # fmt: skip
        for ratio, page, spread, ring in ((4, 16, 1, 0), (128, 1, 2, 0), (1, 1, 1, 640)):
            values = {
                "D": 512, "W": 64, "RATIO": ratio, "PAGE": page, "SPREAD": spread, "RING": ring,
                "B": 8, "FORM": form.value, "ENTRY": shared_entry_bytes(form, 512, 64),
            }  # fmt: skip
            name = f"pool_finish {form.value} {ratio}"
            yield Case(name, pooling._entry_kernel, types, values, 4, EXACT)
    yield from _keys()
    yield from _lists()
    yield from _prompts()
    types = {
        "logits": F32, "table": "*i32", "tokens": "*i32", "ids": "*i32", "weights": F32,
        "scale": "fp32",
    }  # fmt: skip
    values = {"E": 256, "E2": 256, "K": 6, "K2": 8, "SCORE": 2, "RENORM": True, "PTX": True}
    yield Case("route_named", route._named_kernel, types, values, 2, EXACT)


def _streams() -> Iterator[Case]:
    """What stands around blocks."""
    made, first = 2 * N + N * N, {"made": None, "y": None, "part": None, "weights": None}
    types = {"streams": F32, "project": F32, "parts": F32}
    after, wide = {"made": F32, "y": F32}, {"maxnreg": 128}
    for rows, r, given, top_k in (
        (made, 32, {}, 0),
        (made, 32, after, 0),
        (made, 32, {**after, "part": F32, "weights": F32}, 6),
        (N, 4, {**after, "part": F32, "weights": F32}, 6),
    ):
        missing = {name: None for name in first if name not in given}
        line = rows + N * N + 4
        values = {"H": HIDDEN, "N": N, "K": top_k, "ROWS": rows, "R": r, "LINE": line, "C": 32}
        name = f"streams_advance rows={rows} K={top_k} {'behind' if given else 'first'}"
        kernel = streams._advance_kernel
        yield Case(name, kernel, {**types, **given}, {**values, **missing}, 4, wide)
    types["n_tokens"] = "i32"
    values = {
        "H": HIDDEN, "N": N, "ROWS": made, "R": 32, "LINE": made + N * N + 4, "EACH": 256, "B": 64,
        "C": 16,
    }  # fmt: skip
    yield Case("streams_many", streams._many_kernel, types, values, wants=("HMMA",), only=120)
    yield Case("streams_many", streams._many_kernel, types, values, wants=("HGMMA",), only=90)
    types = {
        "streams": F32, "parts": F32, "base": F32, "scale": F32, "made": F32, "out": F32,
        "eps": "fp32", "norm_eps": "fp32",
    }  # fmt: skip
    for rows, norm, codes, fine, first in (
        (made, True, "*i32", False, None),
        (made, True, "*i32", True, None),
        (made, True, None, False, None),
        (made, True, "*i8", True, 0),
        (made, True, "*i8", True, 1),
        (N, False, None, False, None),
    ):
        parts = 128 if first is None else 16
        values = {
            "H": HIDDEN, "N": N, "P": parts, "P2": parts, "ROWS": rows, "LINE": rows + N * N + 4,
            "STEPS": 20, "WIDE": HIDDEN if first else 128, "WHOLE": first is not None,
            "FIRST": first or 0, "PLAIN": codes == "*i8", "FINE": fine, "PTX": True,
        }  # fmt: skip
        more = {"weight": F32 if norm else None, "codes": codes, "scales": codes and F32}
        own = {**types, **{name: kind for name, kind in more.items() if kind}}
        values |= {name: None for name, kind in more.items() if not kind}
        name = f"streams_enter rows={rows} parts={parts} {codes} fine={fine} first={first}"
        warps = 8 if first else 1
        yield Case(name, streams._enter_kernel, own, values, warps, {**EXACT, **wide})
    types = {"streams": F32, "made": F32, "y": F32}
    values = {"H": HIDDEN, "N": N, "ROWS": made, "WIDE": 256}
    yield Case("streams_after", streams._after_kernel, types, values)


def _lists() -> Iterator[Case]:
    """Of what rows see."""
    i32 = "*i32"
    types = {
        "runs": i32, "runs_stride": "i32", "positions": i32, "sources": i32, "targets": i32,
        "rings": i32, "closed": i32, "held": i32, "n_rows": "i32",
    }  # fmt: skip
    values = {"KEPT": 16, "RING": 640, "RATIO": 4, "B": 64}
    yield Case("places", seen._places_kernel, types, values, 2)
    types = {
        "positions": i32, "rings": i32, "table": i32, "table_stride": "i32",
        "listed": i32, "listed_stride": "i32", "lengths": i32, "first": "i32",
    }  # fmt: skip
    for ratio, page, spread in ((0, 1, 1), (128, 1, 2)):
        values = {
            "WINDOW": 128, "RING": 640, "RATIO": ratio, "PAGE": page, "SPREAD": spread,
            "B": 256,
        }  # fmt: skip
        yield Case(f"seen {ratio}", seen._list_kernel, types, values, 2)


def _keys() -> Iterator[Case]:
    """The indexer's."""
    pages = {"pages": "*u8", "table": "*i32", "table_stride": "i32"}
    for form in (KvFormat.FP8, KvFormat.BF16, KvFormat.F32):
        size = {"PAGE": 16, "ENTRY": pooled_key_bytes(form, 128), "FORM": form.value}
        types = {**TURNS, **pages, "vectors": F32, "weight": "*bf16", "eps": "fp32"}
        values = {**size, "D": 128, "DR": 64, "RATIO": 4, "FACTOR": 128**-0.5}
        yield Case(f"pooled_key {form.value}", pooled_keys._key_kernel, types, values, 1, EXACT)
        query = "*bf16" if form is KvFormat.FP8 else F32
        types = {**TURNS, "q": F32, "q_out": query}
        values = {"D": 128, "DR": 64, "FACTOR": 128**-0.5, "ROUNDS": form is KvFormat.FP8}
        yield Case(f"pooled_query {form.value}", pooled_keys._query_kernel, types, values, 1, EXACT)
        types = {
            **pages, "q": query, "weights": F32, "weights_stride": "i32", "scale": "fp32",
            "table_size": "i32", "lengths": "*i32", "scores": F32, "scores_stride": "i32",
        }  # fmt: skip
        name, kernel = f"pooled_score {form.value}", pooled_keys._score_kernel
        shapes = {None: pooled_keys.CARD_SHAPE}
        if form is KvFormat.FP8:
            shapes = {90: pooled_keys.HOPPER_SHAPE, 120: pooled_keys.CARD_SHAPE}
        for card, (tile, heads, warps) in shapes.items():
            values = {**size, "N": 64, "D": 128, "TILE": tile, "BH": heads, "MMA": True}
            wants = ("HGMMA" if card == 90 else "HMMA",)
            yield Case(name, kernel, types, values, warps, ONE_STAGE, wants=wants, only=card)


def _prompts() -> Iterator[Case]:
    """Of a prompt's rows."""
    types = {
        "x": F32, "parts": "*bf16", "size": "i32", "cos": F32, "sin": F32, "positions": "*i32",
        "eps": "fp32",
    }  # fmt: skip
    values = {"N": 64, "D": 512, "DR": 64, "B": 512, "BH": 4}
    yield Case("run_parts", head_parts._parts_kernel, types, values, 4, EXACT)
    for form in (KvFormat.NVFP4, KvFormat.FP8, KvFormat.BF16):
        types = {
            "pages": "*u8", "base": "i32", "table": "*i32", "first": "i32", "entries": "*bf16",
            "count": "i32",
        }  # fmt: skip
        values = {
            "D": 512, "W": 64, "RING": 640, "PAGE": 16, "SPREAD": 1, "TILE": 32, "HARDWARE": True,
            "ENTRY": shared_entry_bytes(form, 512, 64), "FORM": form.value,
        }  # fmt: skip
        yield Case(f"run_decode {form.value}", shared_prefill._decode_kernel, types, values)
    types = {
        "parts": "*bf16", "entries": "*bf16", "chosen": "*i32", "counts": "*i32", "sink": "*bf16",
        "out": "*bf16", "cos": F32, "sin": F32, "scale": "fp32", "start": "i32", "size": "i32",
        "first_row": "i32", "rows": "i32",
    }  # fmt: skip
    for capability, tile in ((90, shared_prefill.HOPPER_TILE), (120, shared_prefill.CARD_TILE)):
        for ratio, top_k in ((0, 0), (4, 512), (128, 0)):
            values = {
                "N": 64, "D": 512, "DR": 64, "EACH": 8, "BH": tile.heads, "TILE": tile.entries,
                "CD": tile.chunk,
                "WINDOW": 128, "RING": 640, "RATIO": ratio, "TOP_K": top_k, "FORM": "fp8",
                "MMA": True,
            }  # fmt: skip
            yield Case(
                f"run_attention {ratio} {capability}", shared_prefill._run_attention_kernel, types,
                values, tile.warps, ONE_STAGE, wants=("HGMMA" if capability == 90 else "HMMA",),
                only=capability,
            )  # fmt: skip
    for form in (KvFormat.FP8, KvFormat.BF16):
        query = "*bf16" if form is KvFormat.FP8 else F32
        types = {"q": F32, "q_out": query, "cos": F32, "sin": F32, "positions": "*i32"}
        values = {
            "N": 64, "D": 128, "DR": 64, "BH": pooled_scores.QUERY_HEADS, "FACTOR": 128**-0.5,
            "ROUNDS": form is KvFormat.FP8, "MMA": True,
        }  # fmt: skip
        name = f"run_query {form.value}"
        kernel, warps = pooled_scores._query_run_kernel, pooled_scores.QUERY_WARPS
        yield Case(name, kernel, types, values, warps, EXACT)
        types = {
            "q": query, "weights": F32, "weights_stride": "i32", "scale": "fp32", "pages": "*u8",
            "table": "*i32", "lengths": "*i32", "scores": F32, "scores_stride": "i32",
            "rows": "i32",
        }  # fmt: skip
        rounded = form is KvFormat.FP8
        card = pooled_scores.CARD_SHAPE if rounded else pooled_scores.CARD_PARTS_SHAPE
        for capability, shape in ((90, pooled_scores.HOPPER_SHAPE), (120, card)):
            tile, heads_each, rows, warps = shape
            values = {
                "N": 64, "D": 128, "PAGE": 16, "ENTRY": pooled_key_bytes(form, 128), "TILE": tile,
                "BH": heads_each, "ROWS": rows, "FORM": form.value, "MMA": True,
            }  # fmt: skip
            yield Case(
                f"run_score {form.value} {capability}", pooled_scores._score_run_kernel, types,
                values, warps, ONE_STAGE, wants=("HGMMA" if capability == 90 else "HMMA",),
                only=capability,
            )  # fmt: skip


CASES = list(_cases())
