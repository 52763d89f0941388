"""The MoE kernels as the engine launches them, for the gate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import Any

import triton

from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton import (
    cache,
    experts,
    fetch,
    grouped,
    lookahead,
    quant,
    route,
    routed_lookup,
    tile_table,
)
from tests.kernels.triton.gate import CAPABILITIES, Case

SHAPES = {
    "ds4": (4096, 2048),
    "glm": (6144, 2048),
    "qwen3": (2048, 768),
    "gpt-oss": (2880, 2880),
    "demo": (512, 128),
}
CATALOGUE = {
    "deepseek-v3": (7168, 2048), "glm-4.5-air": (4096, 1408), "glm-4.7": (5120, 1536),
    "glm-4.7-flash": (2048, 1536), "minimax-m2": (3072, 1536), "olmoe": (2048, 1024),
    "mixtral": (4096, 14336), "qwen3-235b": (4096, 1536), "qwen3-coder": (6144, 2560),
    "qwen3-next": (2048, 512),
}  # fmt: skip
"""Further expert shapes of the catalogue: their tiles, for one token."""

NO_FUSION = {"enable_fp_fusion": False}

FUSED_IN_LOGS = 88
"""Of a token with 256 experts, 8 of them per lane: the device library's logarithm has eleven."""


def pointers(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def expert_cases(
    name: str,
    hidden: int,
    inter: int,
    n_tokens: int,
    *,
    fine: bool,
    tiles: experts.ExpertTiles | None = None,
    only: int | None = None,
) -> Iterator[Case]:
    layout, measured = ExpertLayout(hidden, inter), tiles is not None
    tiles = tiles or experts.tiles_for(layout, fine=fine)
    label = f"{'FP4' if fine else '2bit'} H={hidden} I={inter} T={n_tokens}"
    tables = pointers("*u8", "base fine") | pointers("*i32", "uniq_slot fine_slot uniq_pair codes")
    tables["scales"] = "*fp32"
    # gpt-oss alone has biases and its own GLU
    oss = name == "gpt-oss"
    tables |= {"ids": "*i32", "bias": "*bf16"} if oss else {}
    shape: dict[str, Any] = {} if oss else {"ids": None, "bias": None}
    shape |= {
        "H": hidden,
        "I": inter,
        "T": n_tokens,
        "BASE_STRIDE": layout.base_stride,
        "FINE_STRIDE": layout.fine_stride,
        "FINE": fine,
        "PTX": True,
    }
    gate_up = {"out": "*fp32", "out_codes": "*i32", "out_scales": "*fp32", "limit": "fp32"}
    for tile in {tiles.gate_up, experts.Tile(32, 8)} if name == "ds4" else {tiles.gate_up}:
        quantize = tile.rows % 32 == 0
        own = {"B": tile.rows, "C": experts._lanes(hidden), "QUANTIZE": quantize}
        own |= {"LIMITED": True, "ALPHA": 1.702 if oss else 1.0, "SHIFT": float(oss)}
        yield Case(
            f"experts_gate_up {label}{' quantising' if quantize else ''}",
            experts._gate_up_kernel,
            tables | gate_up,
            shape | own,
            tile.warps,
            NO_FUSION,
            decode=measured or not (quantize and fine),  # a tile that the rule does not give
            wants=("IDP.4A", "PRMT"),
            only=only,
        )
    down = {
        "BASE_OFFSET": layout.gate_up.base_bytes,
        "FINE_OFFSET": layout.gate_up.fine_bytes,
        "B": tiles.down.rows,
        "C": experts._lanes(inter),
    }
    yield Case(
        f"experts_down {label}",
        experts._down_kernel,
        tables | {"part": "*fp32"},
        shape | down,
        tiles.down.warps,
        NO_FUSION,
        wants=("IDP.4A", "PRMT"),
        fused=0,
        only=only,
    )


def all_expert_cases() -> Iterator[Case]:
    for name, (hidden, inter) in SHAPES.items():
        for n_tokens in (1, 3, 8) if name in ("ds4", "glm") else (1, 3):
            for fine in (False, True):
                yield from expert_cases(name, hidden, inter, n_tokens, fine=fine)


def catalogue_cases() -> Iterator[Case]:
    for name, (hidden, inter) in CATALOGUE.items():
        for fine in (False, True):
            yield from expert_cases(name, hidden, inter, 1, fine=fine)


def table_cases() -> Iterator[Case]:
    """Tiles that were measured, each for its card."""
    for capability, card in tile_table.load().items():
        number = int(capability.replace(".", ""))
        for row in card.decode if number in CAPABILITIES else ():
            tiles = experts.ExpertTiles(row.gate_up, row.down)
            yield from expert_cases(
                "gpt-oss" if row.hidden == 2880 else "", row.hidden, row.inter, row.tokens,
                fine=row.fine, tiles=tiles, only=number,
            )  # fmt: skip
        for full in card.grouped if number in CAPABILITIES else ():
            layout = ExpertLayout(full.hidden, full.inter)
            for gated in (True, False):
                tile = full.gate_up if gated else full.down
                yield grouped_case(
                    layout, tile, gated=gated, wide=full.wide, pairs=128, only=number
                )


def combine_case(*, with_identity: bool = False) -> Case:
    constexprs: dict[str, Any] = {"H": 4096, "K": 6, "B": 512, "SHARED": True, "PTX": True}
    signature = pointers("*fp32", "part weights base residual out")
    name = "combine with identity experts" if with_identity else "combine"
    if with_identity:
        signature["ids"] = "*i32"
    else:
        constexprs["ids"] = None
    return Case(name, experts._combine_kernel, signature, constexprs, 4, NO_FUSION, fused=0)


def quant_cases() -> Iterator[Case]:
    signature = {"x": "*fp32", "codes": "*i32", "scales": "*fp32"}
    for wide in (False, True):
        common = {"G": 128, "PLAIN": False, "WIDE": wide, "PTX": True}
        label = " wide" if wide else ""
        yield Case(
            f"quantize_rows{label}",
            quant._quantize_kernel,
            signature,
            common | {"B": 16},
            2,
            NO_FUSION,
        )
        yield Case(
            f"rms_norm_quantize{label}",
            quant._norm_kernel,
            signature | {"weight": "*fp32", "eps": "fp32", "out": "*fp32"},
            common | {"B": 128, "PLUS_ONE": False},
            8,
            NO_FUSION,
        )


def lookup_case(n_tokens: int, top_k: int) -> Case:
    tables = "slot_of owner last_used free n_free hand clock counters limit"
    outputs = "uniq_slot uniq_pair n_uniq miss_n miss_row miss_slot"
    pairs = triton.next_power_of_2(n_tokens * top_k)
    constexprs: dict[str, Any] = {
        "L": 43,
        "E": 256,
        "PER_USE": 1 / (16 * 43),
        "T": n_tokens,
        "K": top_k,
        "PAIRS": pairs,
        "CELLS": triton.next_power_of_2(n_tokens * n_tokens * top_k),
        "ADVANCE": True,
        "PTX": True,
    }
    return Case(
        f"lookup T={n_tokens} K={top_k}",
        cache._lookup_kernel,
        pointers("*i32", f"ids {tables} {outputs}")
        | {"warmth": "*fp32", "layer": "i32", "before": "i32"},
        constexprs,
        1 if pairs <= 16 else 4,
        NO_FUSION | {"maxnreg": 128},
        fused=0,
    )


def look_ahead_case(n_tokens: int, top_k: int) -> Case:
    tables = "slot_of owner last_used free n_free hand clock limit counters ahead"
    others = "ids most chosen before_n before_row miss_n miss_row miss_slot"
    pairs = triton.next_power_of_2(n_tokens * top_k)
    constexprs: dict[str, Any] = {"L": 43, "E": 256, "T": n_tokens, "K": top_k, "PAIRS": pairs}
    return Case(
        f"look_ahead T={n_tokens} K={top_k}",
        lookahead._look_ahead_kernel,
        pointers("*i32", f"{tables} {others}") | {"warmth": "*fp32", "layer": "i32"},
        constexprs,
        1 if pairs <= 16 else 4,
        {"maxnreg": 128},
        fused=0,
    )


def fetch_cases() -> Iterator[Case]:
    misses = pointers("*i32", "place_of miss_n miss_row miss_slot")
    late = pointers("*i32", "sequence late_n late_row late_slot error")
    yield Case(
        "fetch",
        fetch._fetch_kernel,
        misses | {"pool": "*u8", "arena": "i64"},
        {"STRIDE": 7077888, "WORDS": 1024},
        8,
        wants=("LDG.E.128", "STG.E.128"),
    )
    yield Case(
        "post",
        fetch._post_kernel,
        misses | late | {"box": "i64", "layer": "i32", "waited": "*i64"},
        {"PLANE": 0, "PAIRS": 8, "PTX": True},
        1,
        wants=("MEMBAR",),
    )
    yield Case(
        "wait",
        fetch._wait_kernel,
        late
        | pointers("*i32", "place_of slot_of owner last_used free n_free")
        | {"box": "i64", "waited": "*i64"},
        {"LIMIT": fetch.WAIT_LIMIT_NS, "POLLS": 65536, "PAIRS": 64, "PTX": True},
        1,
        wants=("LDG.E.STRONG.SYS",),
    )


def route_case(
    n_experts: int, top_k: int, score: int, groups: int, *, n_real: int | None = None
) -> Case:
    constexprs = {
        "E": n_experts,
        "E2": triton.next_power_of_2(n_experts),
        "K": top_k,
        "K2": triton.next_power_of_2(top_k),
        "SCORE": score,
        "BIASED": True,
        "GROUPS": groups,
        "KEPT": max(1, groups // 2),
        "GROUPS2": triton.next_power_of_2(groups),
        "RENORM": True,
        "REAL": n_experts if n_real is None else n_real,
        "PTX": True,
    }
    return Case(
        f"route E={n_experts} K={top_k} groups={groups}",
        route._route_kernel,
        pointers("*fp32", "logits bias weights share")
        | {"ids": "*i32", "scale": "fp32", "n_rounds": "i32"},
        constexprs,
        1 if n_experts <= 256 else 2 if n_experts <= 512 else 4,
        NO_FUSION,
        fused=FUSED_IN_LOGS if score == 2 else None,
    )


def routed_lookup_case(n_tokens: int, top_k: int, *, fetches: bool) -> Case:
    alone, chosen = lookup_case(n_tokens, top_k), route_case(256, top_k, 2, 1)
    types = {**alone.signature, **pointers("*fp32", "logits bias weights")}
    types |= {"scale": "fp32", "n_rounds": "i32"}
    helps: dict[str, Any] = {}
    if fetches:
        types |= {"arena": "i64", "waiting": "*i32", "pool": "*u8", "place_of": "*i32"}
        helps = {"WAITING": 132, "STRIDE": 7077888, "WORDS": 1024}
    return Case(
        f"{'routed_fetch' if fetches else 'routed_lookup'} T={n_tokens} K={top_k}",
        routed_lookup._routed_fetch_kernel if fetches else routed_lookup._routed_lookup_kernel,
        types,
        {name: v for name, v in chosen.constexprs.items() if name != "REAL"}
        | {**alone.constexprs, **helps},
        1,
        NO_FUSION | {"maxnreg": 128},
        wants=("LDG.E.128", "STG.E.128") if fetches else ("LDG.E.128",),
        fused=FUSED_IN_LOGS * n_tokens,
    )


def grouped_cases() -> Iterator[Case]:
    layout = ExpertLayout(4096, 2048)
    for fine in (False, True):
        yield Case(
            f"expand {'FP4' if fine else '2bit'}",
            grouped._expand_kernel,
            pointers("*i64", "base fine") | pointers("*i32", "experts out"),
            {
                "BLOCKS": layout.gate_up.n * layout.gate_up.groups,
                "BASE_OFFSET": 0,
                "FINE_OFFSET": 0,
                "OUT_OFFSET": 0,
                "OUT_STRIDE": layout.slot_floats // 4,
                "B": 256,
                "FINE": fine,
                "PTX": True,
            },
            8,
            wants=("STG.E.128",),
        )
    for gated, wide, pairs in product((True, False), (False, True), (16, 32, 64, 128)):
        tile = grouped.grouped_tile(layout, pairs=pairs, wide=wide, has_gate=gated)
        yield grouped_case(layout, tile, gated=gated, wide=wide, pairs=pairs)


def grouped_case(
    layout: ExpertLayout,
    tile: tile_table.GroupedTile,
    *,
    gated: bool,
    wide: bool,
    pairs: int,
    only: int | None = None,
) -> Case:
    matrix = layout.gate_up if gated else layout.down
    of = "" if only is None else f" H={layout.hidden} I={layout.inter}"
    return Case(
        f"grouped_{'gate_up' if gated else 'down'}{' wide' if wide else ''} pairs={pairs}{of}",
        grouped._grouped_kernel,
        pointers("*i8", "weights codes")
        | pointers("*i32", "tiles tokens")
        | pointers("*fp32", "scales out")
        | {"base": "*i64", "limit": "fp32", "shift": "i32"},
        {
            "N": layout.inter if gated else layout.hidden,
            "G": matrix.groups,
            "STRIDE": layout.slot_floats,
            "OFFSET": 0,
            "SCALE_OFFSET": 0,
            "B": tile.rows,
            "P": pairs,
            "FINE": wide,
            "WIDE": wide,
            "GATED": gated,
            "LIMITED": False,
            "ALPHA": 1.0,
            "SHIFT": 0.0,
            "bias": None,
            "UNROLL": gcd(matrix.groups, grouped._UNROLL),
        },
        tile.warps,
        {"num_stages": tile.stages},
        decode=False,
        only=only,
    )


CASES = [
    *all_expert_cases(),
    *catalogue_cases(),
    *table_cases(),
    combine_case(),
    combine_case(with_identity=True),
    *quant_cases(),
    lookup_case(1, 6),
    lookup_case(3, 8),
    lookup_case(8, 8),
    *(routed_lookup_case(*size, fetches=f) for size in ((1, 6), (2, 8)) for f in (False, True)),
    look_ahead_case(1, 6),
    look_ahead_case(8, 8),
    *fetch_cases(),
    route_case(256, 6, 2, 1),
    route_case(256, 8, 1, 8),
    route_case(512, 10, 0, 1),
    route_case(768, 12, 0, 1, n_real=512),
    *grouped_cases(),
]
