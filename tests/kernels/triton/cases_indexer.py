"""An indexer's kernels at the shapes of GLM-5 and DeepSeek-V3.2, and attention to its choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import index_key_bytes, mla_entry_bytes
from moet_desk.kernels.triton import attention, choose, chosen_prefill, indexer
from moet_desk.kernels.triton.dense import WeightKind
from tests.kernels.triton.cases_attention import DECODE, DEVICE, ONE_STAGE, PARTS
from tests.kernels.triton.cases_dense import scaled_weight
from tests.kernels.triton.gate import Case

D = 128
TILES = {
    90: (chosen_prefill.HOPPER_TILE, chosen_prefill.HOPPER_PARTS_TILE),
    120: (chosen_prefill.CARD_TILE, chosen_prefill.CARD_PARTS_TILE),
}
PAGES = {"pages": "*u8", "table": "*i32", "table_stride": "i32"}


def _prepare(form: KvFormat, heads: int, *, interleaved: bool) -> Case:
    types = {
        **PAGES, "key": "*fp32", "weight": "*bf16", "bias": "*bf16", "eps": "fp32", "q": "*fp32",
        "q_out": "*fp32", "cos": "*fp32", "sin": "*fp32", "positions": "*i32",
    }  # fmt: skip
    values = {
        "N": heads, "D": D, "DR": 64, "PAGE": 64, "ENTRY": index_key_bytes(form, D), "B": 1,
        "W": 128, "BD": D, "BH": 8, "INTERLEAVED": interleaved, "FORM": form.value,
    }  # fmt: skip
    name = f"index_prepare {form.value} N={heads}"
    return Case(name, indexer._prepare_kernel, types, values, 4, {"enable_fp_fusion": False})


def _scores(form: KvFormat, heads: int) -> Case:
    types = {
        **PAGES, "q": "*fp32", "weights": "*fp32", "scale": "fp32", "lengths": "*i32",
        "scores": "*fp32", "scores_stride": "i32",
    }  # fmt: skip
    values = {
        **DEVICE, "N": heads, "D": D, "PAGE": 64, "ENTRY": index_key_bytes(form, D),
        "TILE": indexer._TILE, "BH": indexer._HEADS_SCORED, "BD": D, "FORM": form.value,
    }  # fmt: skip
    name = f"index_scores {form.value} N={heads}"
    return Case(name, indexer._scores_kernel, types, values, 4, ONE_STAGE, wants=("HMMA",))


def _choose(top_k: int, most: int, *, near: bool = False, places: bool = False) -> Case:
    """Of rows of up to `most` scores; with `near`, behind the entries of a window; with `places`,
    those in the sequence.
    """
    types = {
        "scores": "*fp32", "scores_stride": "i32", "size": "i32", "lengths": "*i32",
        "table": "*i32", "table_stride": "i32", "table_size": "i32", "first": "i32",
        "chosen": "*i32", "chosen_stride": "i32", "counts": "*i32",
    }  # fmt: skip
    short = choose._SHORT if top_k < choose._SHORT else choose._LONG
    warps = min(choose._MOST_WARPS, min(most, choose._LONG) // (32 * choose._RUN))
    values = {
        "TOP_K": top_k, "PAGE": 64, "WINDOW": 128, "RING": 640, "BK": top_k, "BW": 128,
        "SHORT": short, "LONG": choose._LONG, "LANES": 32 * warps,
        "MOST": most, "ALIGNED": True, "COMPILED": True, "positions": None, "rings": None,
    }  # fmt: skip
    if near:
        types |= {"positions": "*i32", "rings": "*i32"}
        del values["positions"], values["rings"]
    if places:
        del types["table"]
        values |= {"table": None, "PAGE": 1}
    name = f"choose {top_k} of {most}{' places' if places else ''}"
    return Case(name, choose._choose_kernel, types, values, warps)


def _chosen_decode(form: KvFormat) -> Case:
    """`mla_decode` over pages of one entry."""
    types = {**DECODE, "q_latent": "*fp32", "q_rope": "*fp32"}
    values = {
        **PARTS, **DEVICE, "N": 64, "R": 512, "DR": 64, "ENTRY": mla_entry_bytes(form, 512, 64),
        "CHUNK": 128, "BR": 64, "FORM": form.value,
    }  # fmt: skip
    name, kernel = f"mla_decode {form.value} of chosen entries", attention._mla_decode_kernel
    case = Case(name, kernel, types, values, 8, ONE_STAGE, wants=("HMMA",))
    return replace(case, constexprs={**values, "PAGE": 1})


GLM, V3 = (64, 192, 256), (128, 128, 128)
"""Heads, their numbers that are not rotated, and their values, of latents of 512 + 64."""


def _absorb_rows(
    sizes: tuple[int, int, int], kind: WeightKind, capability: int, *, by_row: bool = False
) -> Case:
    heads, dn, dv = sizes
    tile = chosen_prefill.ABSORB_TILE
    types, values = scaled_weight(kind, by_row=by_row)
    types |= {
        "q": "*fp32", "q_stride": "i32", "q_pitch": "i32", "q_rope": "*fp32", "parts": "*bf16",
        "rows": "i32",
    }  # fmt: skip
    values |= {
        **DEVICE, "N": heads, "PITCH": dn + dv, "DN": dn, "DR": 64, "R": 512, "BM": tile.rows,
        "BD": tile.inputs, "BR": tile.columns, "BT": 64,
    }  # fmt: skip
    own = " by row" if by_row else ""
    name = f"chosen_absorb {kind.value} N={heads} dn={dn}{own} for {capability}"
    return Case(
        name, chosen_prefill._absorb_rows_kernel, types, values, tile.warps, ONE_STAGE,
        only=capability, wants=("HGMMA" if capability == 90 else "HMMA",),
    )  # fmt: skip


def _chosen(heads: int, capability: int, *, exact: bool) -> Case:
    tile = TILES[capability][0 if exact else 1]
    types = {
        "parts": "*bf16", "latents": "*bf16", "ropes": "*bf16", "chosen": "*i32",
        "counts": "*i32", "out": "*bf16", "scale": "fp32", "size": "i32", "rows": "i32",
    }  # fmt: skip
    values = {
        "N": heads, "R": 512, "DR": 64, "TOP_K": 2048, "BH": tile.heads, "TILE": tile.entries,
        "CD": tile.chunk, "BT": 64, "EXACT": exact, "HELD": tile.held, "MMA": True,
    }  # fmt: skip
    name = f"chosen_attend N={heads} exact={exact} for {capability}"
    return Case(
        name, chosen_prefill._chosen_kernel, types, values, tile.warps,
        {"num_stages": tile.stages}, only=capability,
        wants=("HGMMA" if capability == 90 else "HMMA",),
    )  # fmt: skip


def _prompts() -> Iterator[Case]:
    """Of a prompt's rows."""
    for capability in TILES:
        for sizes in (GLM, V3):
            for exact in (True, False):
                yield _chosen(sizes[0], capability, exact=exact)
            for kind in (WeightKind.BF16, WeightKind.FP8, WeightKind.INT8):
                yield _absorb_rows(sizes, kind, capability)
        yield _absorb_rows(V3, WeightKind.FP8, capability, by_row=True)


def _cases() -> Iterator[Case]:
    for form in (KvFormat.FP8, KvFormat.BF16, KvFormat.F32):
        yield _prepare(form, 32, interleaved=True)
        yield _prepare(form, 64, interleaved=False)
        yield _scores(form, 32)
        yield _scores(form, 64)
    yield _choose(512, 2048, near=True)
    yield _choose(512, 32768, near=True)
    yield _choose(2048, 32768)
    yield _choose(2048, 32768, places=True)
    yield from _prompts()
    for form in (KvFormat.NVFP4, KvFormat.FP8, KvFormat.BF16):
        yield _chosen_decode(form)


CASES = list(_cases())
