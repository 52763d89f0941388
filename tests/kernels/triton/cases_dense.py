"""Dense products, norms and what leads to attention, at the shapes of the models we name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton import dense, gemm, latent, norms, prepare
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.kernels.triton.gemv_tiles import tile_for, way_of
from tests.kernels.triton.gate import Case

EXACT = {"enable_fp_fusion": False}
POINTER = {
    WeightKind.F32: "*fp32", WeightKind.BF16: "*bf16", WeightKind.FP8: "*u8",
    WeightKind.INT8: "*i8",
}  # fmt: skip
TILES = {90: {4096: gemm.HOPPER_TILE, 8192: gemm.HOPPER_TILE_HIGH}, 120: {4096: gemm.CONSUMER_TILE}}


def scaled_weight(
    kind: WeightKind, *, by_row: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constexprs of a weight and its scales."""
    values: dict[str, Any] = {"KIND": kind.value, "HARDWARE": True}
    values["SCALE_ROWS"] = 1 if by_row or kind is WeightKind.INT8 else 128
    scales = {WeightKind.FP8: "*fp32", WeightKind.INT8: "*bf16"}
    if kind in scales:
        return {"weight": POINTER[kind], "scales": scales[kind]}, values
    return {"weight": POINTER[kind]}, {**values, "scales": None}


def _gemv(
    n: int, k: int, rows: int, kind: WeightKind, *, swiglu: bool = False, by_row: bool = False,
    normed: int = 0,
) -> Case:  # fmt: skip
    way = way_of(k, kind, rows, tile_for(n, k, kind, rows, gated=swiglu))
    types, values = scaled_weight(kind, by_row=by_row)
    types |= {"x": "*fp32", "x_stride": "i32", "out": "*fp32", "out_stride": "i32"}
    types |= {"width": "i32"}
    values |= {"K": k, "T": rows, "LANES": way.lanes, "AHEAD": way.ahead, "EAGER": way.eager}
    values |= {"PTX": True}
    if swiglu:
        values |= {"limit": None, "INTER": n // 2, "ROWS": way.rows // 2}
    else:
        types |= {"residual": "*fp32", "residual_stride": "i32"}
        values |= {"bias": None, "COUNT": n, "FIRST": 0, "PITCH": 0, "HEAD_X": 0}
        values |= {"ROWS": way.rows, "NORMED": normed, "BLOCK": max(normed, 1)}
        types |= {"eps": "fp32", "normed_stride": "i32"}
        if normed:
            types |= {"norm_weight": "*fp32", "normed": "*fp32", "arrived": "*i32"}
        else:
            values |= {"norm_weight": None, "normed": None, "arrived": None}
    own = "swiglu_gemv" if swiglu else "gemv"
    name = f"{own} {kind.value} {n}x{k} T={rows}{' by row' if by_row else ''}"
    name += f" normed {normed}" if normed else ""
    kernel = dense._swiglu_gemv_kernel if swiglu else dense._gemv_kernel
    # Weights come in by 16 bytes a thread, or the memory's speed is out of reach.
    wants = ("LDG.E.128", "FFMA")
    return Case(name, kernel, types, values, way.warps, EXACT, wants=wants)


def _absorb(
    heads: int, dn: int, dv: int, r: int, rows: int, kind: WeightKind, *, by_row: bool = False
) -> Case:
    types, values = scaled_weight(kind, by_row=by_row)
    types |= {"q": "*fp32", "q_stride": "i32", "q_pitch": "i32", "out": "*fp32"}
    values |= {"PITCH": dn + dv, "DN": dn, "R": r, "T": rows, "BD": 16, "BR": min(128, r)}
    values |= {"STAGES": 4}
    name = f"mla_absorb {kind.value} N={heads} dn={dn} T={rows}{' by row' if by_row else ''}"
    return Case(name, latent._absorb_kernel, types, values, 4, EXACT)


def _mla_prepare(form: KvFormat, n: int, nope: int, r: int, dr: int, *, rank: int | None) -> Case:
    types = {
        "joined": "*fp32", "stride": "i32", "weight": "*bf16", "eps": "fp32", "q_out": "*fp32",
        "cos": "*fp32", "sin": "*fp32", "positions": "*i32", "pages": "*u8", "table": "*i32",
        "table_stride": "i32",
    }  # fmt: skip
    q = n * (nope + dr) if rank is None else rank
    width = 16 if form is KvFormat.NVFP4 else 128
    values = {
        "Q": q, "N": n, "NOPE": nope, "R": r, "DR": dr, "PAGE": 64,
        "ENTRY": mla_entry_bytes(form, r, dr), "B": r // width, "W": width,
        "BQ": 1 << (-(-q // 128) - 1).bit_length(), "BH": min(16, n), "BR": dr,
        "INTERLEAVED": True, "FORM": form.value,
    }  # fmt: skip
    if rank is None:
        values["q_weight"] = None
    else:
        types["q_weight"] = "*bf16"
    name = f"mla_prepare {form.value} N={n} r={r} rank={rank}"
    return Case(name, prepare._mla_prepare_kernel, types, values, 4, EXACT)


def _gqa_prepare(form: KvFormat, n: int, keys: int, d: int) -> Case:
    types = {
        "joined": "*fp32", "stride": "i32", "q_weight": "*bf16", "k_weight": "*bf16",
        "eps": "fp32", "q_out": "*fp32", "cos": "*fp32", "sin": "*fp32", "positions": "*i32",
        "pages": "*u8", "table": "*i32", "table_stride": "i32",
    }  # fmt: skip
    width = 16 if form is KvFormat.NVFP4 else 128
    values = {
        "N": n, "KEYS": keys, "D": d, "DV": d, "DR": d, "PAGE": 64,
        "ENTRY": gqa_entry_bytes(form, keys, d, d), "B": -(-d // width), "W": width, "BD": d,
        "INTERLEAVED": False, "FORM": form.value,
    }  # fmt: skip
    name = f"gqa_prepare {form.value} N={n} D={d}"
    return Case(name, prepare._gqa_prepare_kernel, types, values, 1, EXACT)


def _norm(hidden: int) -> Case:
    types = {
        "x": "*fp32", "x_stride": "i32", "weight": "*bf16", "eps": "fp32", "out": "*fp32",
        "out_stride": "i32",
    }  # fmt: skip
    block = 1 << (hidden - 1).bit_length()
    values = {"H": hidden, "BLOCK": block, "PLUS_ONE": False}
    return Case(
        f"rms_norm H={hidden}", norms._rms_norm_kernel, types, values,
        max(1, min(16, block // 256)), EXACT,
    )  # fmt: skip


def _gemm(
    kind: WeightKind, capability: int, *, by_row: bool = False, small: bool = False,
    each: int = 4096, k: int = 4096, of_heads: bool = False,
) -> Case:  # fmt: skip
    tile = gemm.SMALL_TILE if small else TILES[capability][k]
    if kind is WeightKind.INT8:
        tile = replace(tile, k=32)
    types, values = scaled_weight(kind, by_row=by_row)
    types |= {"parts": "*bf16", "out": "*fp32", "out_stride": "i32", "M": "i32"}
    values |= {
        "bias": None, "residual": None, "N": each, "K": k, "BM": tile.m, "BN": tile.n,
        "BK": tile.k, "GROUP": 8, "INPUTS": 4096 // each, "FIRST": 0, "PITCH": each, "MMA": True,
    }  # fmt: skip
    own = " by row" if by_row else " small" if small else " in groups" if each < 4096 else ""
    if of_heads:  # GLM-5's values
        k, own = 512, " of heads"
        values |= {"N": 256, "K": 512, "INPUTS": 64, "FIRST": 192, "PITCH": 448}
    name = f"gemm {kind.value} K={k}{own} for {capability}"
    return Case(
        name, gemm._gemm_kernel, types, values, tile.warps,
        {"num_stages": tile.stages}, decode=False, only=capability,
        wants=("HGMMA",) if capability == 90 else ("HMMA",),
    )  # fmt: skip


def _cases() -> Iterator[Case]:
    for kind in (WeightKind.FP8, WeightKind.BF16):
        for rows in (1, 2, 4, 8):
            yield _gemv(4096, 4096, rows, kind)
        for n, k in ((2112, 7168), (1536, 4096), (512, 512)):
            yield _gemv(n, k, 1, kind)
            yield _gemv(n, k, 8, kind)
        for rows in (1, 3, 8):
            yield _gemv(4096, 4096, rows, kind, swiglu=True)
        for rows in (1, 8):
            yield _absorb(64, 128, 128, 512, rows, kind)
            yield _absorb(128, 192, 256, 512, rows, kind)
    for n, k, rows in ((32768, 1024, 1), (32768, 1024, 8), (4096, 8192, 1), (4096, 8192, 8)):
        yield _gemv(n, k, rows, WeightKind.FP8)
    yield _gemv(4096, 2048, 1, WeightKind.FP8)
    for rows in (1, 2, 8):
        yield _gemv(1536, 4096, rows, WeightKind.FP8, normed=1024)
    yield _gemv(256, 4096, 1, WeightKind.F32)
    yield _gemv(512, 512, 8, WeightKind.F32)
    for form in KvFormat:
        yield _mla_prepare(form, 64, 128, 512, 64, rank=1536)
        yield _mla_prepare(form, 8, 32, 128, 32, rank=None)
        yield _gqa_prepare(form, 32, 4, 128)
    for hidden in (512, 2048, 4096, 7168):
        yield _norm(hidden)
    for kind in WeightKind:
        for capability in TILES:
            yield _gemm(kind, capability, small=True)
            for k in TILES[capability]:
                yield _gemm(kind, capability, k=k)
    for rows in (1, 8):
        yield _gemv(4096, 4096, rows, WeightKind.FP8, by_row=True)
        yield _gemv(4096, 4096, rows, WeightKind.FP8, swiglu=True, by_row=True)
        yield _absorb(64, 128, 128, 512, rows, WeightKind.FP8, by_row=True)
        yield _gemv(6144, 16384, rows, WeightKind.INT8)
        yield _gemv(4096, 6144, rows, WeightKind.INT8, swiglu=True)
        yield _absorb(64, 192, 256, 512, rows, WeightKind.INT8)
    for capability in TILES:
        yield _gemm(WeightKind.FP8, capability, by_row=True)
        yield _gemm(WeightKind.FP8, capability, each=1024)
        for kind in (WeightKind.INT8, WeightKind.FP8, WeightKind.BF16):
            yield _gemm(kind, capability, of_heads=True)


CASES = list(_cases())
