"""Attention of a step and of a prompt, at the shapes of the models we name."""

from __future__ import annotations

from collections.abc import Iterator

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton import attention, attention_parts, prefill_attention
from tests.kernels.triton.gate import Case

DECODE = {
    "pages": "*u8", "table": "*i32", "table_stride": "i32", "lengths": "*i32", "sums": "*fp32",
    "stats": "*fp32", "scale": "fp32",
}  # fmt: skip
PARTS = {"PAGE": 64, "SPLITS": 64, "SHORTEST": 64, "TILE": 32, "BH": 16}
DEVICE = {"MMA": True, "HARDWARE": True}
ONE_STAGE = {"num_stages": 1}
SHAPES = {90: prefill_attention.HOPPER_SHAPE, 120: prefill_attention.CARD_SHAPE}


def _mla(form: KvFormat, heads: int, r: int, dr: int) -> Case:
    types = {**DECODE, "q_latent": "*fp32", "q_rope": "*fp32"}
    values = {
        **PARTS, **DEVICE, "N": heads, "R": r, "DR": dr, "ENTRY": mla_entry_bytes(form, r, dr),
        "CHUNK": min(128, r), "BR": dr, "FORM": form.value,
    }  # fmt: skip
    name = f"mla_decode {form.value} N={heads} r={r}"
    kernel = attention._mla_decode_kernel
    return Case(name, kernel, types, values, 8, ONE_STAGE, wants=("HMMA",))


def _gqa(form: KvFormat, heads: int, keys: int, d: int) -> Case:
    types = {**DECODE, "q": "*fp32", "window": "i32"}
    values = {
        **PARTS, **DEVICE, "N": heads, "KEYS": keys, "D": d, "DV": d,
        "ENTRY": gqa_entry_bytes(form, keys, d, d), "CD": d, "CV": d, "FORM": form.value,
    }  # fmt: skip
    name = f"gqa_decode {form.value} N={heads} M={keys} D={d}"
    kernel = attention._gqa_decode_kernel
    return Case(name, kernel, types, values, 4, ONE_STAGE, wants=("HMMA",))


def _join(width: int, *, sink: bool) -> Case:
    types = {
        "sums": "*fp32", "stats": "*fp32", "lengths": "*i32", "window": "i32", "out": "*fp32",
    }  # fmt: skip
    values: dict[str, object] = {
        "WIDTH": width, "SPLITS": 64, "SHORTEST": 64, "BW": attention_parts._JOIN_FLOATS,
        "AHEAD": attention_parts._JOIN_AHEAD, "COMPILED": True,
    }  # fmt: skip
    if sink:
        types["sink"] = "*bf16"
    else:
        values["sink"] = None
    name = f"join width={width} sink={sink}"
    return Case(name, attention_parts._join_kernel, types, values, 1, {"enable_fp_fusion": False})


def _mla_prefill(dn: int, dv: int, capability: int) -> Case:
    shape = SHAPES[capability]
    if capability == 90 and dv <= 128:
        shape = prefill_attention.HOPPER_NARROW_SHAPE
    m, tile, warps, stages = shape
    types = {
        "q_nope": "*fp32", "q_stride": "i32", "q_pitch": "i32", "q_rope": "*fp32",
        "expanded": "*fp32", "ropes": "*fp32", "out": "*fp32", "scale": "fp32", "start": "i32",
        "M": "i32", "heads": "i32", "head0": "i32",
    }  # fmt: skip
    values = {
        "N": 64, "DN": dn, "DR": 64, "DV": dv, "BM": m, "TILE": tile,
        "CD": prefill_attention.chunk_of(dn), "BR": 64, "BV": dv, "MMA": True,
    }  # fmt: skip
    return Case(
        f"mla_prefill dn={dn} dv={dv} for {capability}", prefill_attention._mla_prefill_kernel,
        types, values, warps, {"num_stages": stages}, decode=False, only=capability,
        wants=("HGMMA",) if capability == 90 else ("HMMA",),
    )  # fmt: skip


def _gqa_prefill(
    form: KvFormat, capability: int, *, heads: int = 32, keys: int = 4, d: int = 128, sink: bool
) -> Case:
    m, tile, warps, stages = SHAPES[capability]
    types = {
        "q": "*fp32", "pages": "*u8", "table": "*i32", "out": "*fp32", "scale": "fp32",
        "window": "i32", "start": "i32", "M": "i32",
    }  # fmt: skip
    values = {
        **DEVICE, "N": heads, "KEYS": keys, "D": d, "DV": d, "PAGE": 64,
        "ENTRY": gqa_entry_bytes(form, keys, d, d), "BM": m, "TILE": tile, "CD": d, "CV": d,
        "FORM": form.value,
    }  # fmt: skip
    if sink:
        types["sink"] = "*fp32"
    else:
        values["sink"] = None
    name = f"gqa_prefill {form.value} d={d} sink={sink} for {capability}"
    return Case(
        name, prefill_attention._gqa_prefill_kernel,
        types, values, warps, {"num_stages": stages}, decode=False, only=capability,
    )  # fmt: skip


def _latents(form: KvFormat, *, parted: bool = False) -> Case:
    ropes = "*bf16" if parted else "*fp32"
    types = {"pages": "*u8", "table": "*i32", "parts": "*bf16", "ropes": ropes, "size": "i32"}
    values = {
        "R": 512, "DR": 64, "PAGE": 64, "ENTRY": mla_entry_bytes(form, 512, 64), "TILE": 32,
        "CHUNK": 128, "BR": 64, "FORM": form.value, "HARDWARE": True,
    }  # fmt: skip
    name = f"latents {form.value}{' in parts' if parted else ''}"
    return Case(name, prefill_attention._latents_kernel, types, values, 4)


def _cases() -> Iterator[Case]:
    for form in (KvFormat.NVFP4, KvFormat.FP8, KvFormat.BF16):
        yield _mla(form, 64, 512, 64)
        yield _mla(form, 128, 512, 64)
        yield _latents(form)
        yield _latents(form, parted=True)
    for form in KvFormat:
        yield _mla(form, 8, 128, 32)
        yield _gqa(form, 32, 4, 128)
        yield _gqa(form, 64, 8, 64)
    for width in (512, 128):
        yield _join(width, sink=False)
        yield _join(width, sink=True)
    for capability in SHAPES:
        yield _mla_prefill(128, 128, capability)
        yield _mla_prefill(192, 256, capability)
        yield _gqa_prefill(KvFormat.NVFP4, capability, sink=False)
        yield _gqa_prefill(KvFormat.FP8, capability, sink=False)
        # gpt-oss
        yield _gqa_prefill(KvFormat.BF16, capability, heads=64, keys=8, d=64, sink=True)


CASES = list(_cases())
