"""The kernels of a step as launches that begin early, with what they may touch before they wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moet_desk.kernels.triton import dense, prepare
from tests.kernels.triton import cases_attention, cases_dense, cases_moe
from tests.kernels.triton.gate import Case

EARLY: dict[str, tuple[str, ...]] = {
    "add_rms_norm H=4096": ("weight",),
    "gemv fp8 4096x4096 T=1": ("weight",),
    "gemv fp8 4096x4096 T=8": ("weight",),
    "gemv fp8 1536x4096 T=1": ("weight",),
    "gemv bf16 4096x4096 T=1": ("weight",),
    "gemv f32 512x512 T=8": ("weight",),
    "swiglu_gemv fp8 4096x4096 T=1": ("weight",),
    "swiglu_gemv fp8 4096x4096 T=3": ("weight",),
    "swiglu_gemv bf16 4096x4096 T=8": ("weight",),
    "mla_absorb fp8 N=64 dn=128 T=1": ("weight",),
    "mla_absorb bf16 N=128 dn=192 T=8": ("weight",),
    "mla_prepare nvfp4 N=64 r=512 rank=1536": (),
    "mla_prepare nvfp4 N=8 r=128 rank=None": (),
    "mla_decode nvfp4 N=64 r=512": (),
    "mla_decode fp8 N=128 r=512": (),
    "join width=512 sink=False": (),
    "rms_norm_quantize": ("weight",),
    "rms_norm_quantize wide": ("weight",),
    "route E=256 K=6 groups=1": (),
    "route E=256 K=8 groups=8": (),
    "lookup T=1 K=6": (),
    "lookup T=8 K=8": (),
    "experts_gate_up 2bit H=4096 I=2048 T=1": (),
    "experts_gate_up FP4 H=4096 I=2048 T=8": (),
    "quantize_rows": (),
    "experts_down 2bit H=4096 I=2048 T=1": (),
    "experts_down FP4 H=4096 I=2048 T=8": (),
    "combine": (),
}
"""Case -> arguments that it may touch early: weights that nobody writes during a step."""


def _rotate_queries() -> Case:
    types = {
        "q": "*fp32", "stride": "i32", "q_rope": "*fp32", "cos": "*fp32", "sin": "*fp32",
        "positions": "*i32",
    }  # fmt: skip
    values = {"NOPE": 128, "N": 64, "DR": 64, "BH": 16, "BR": 64, "INTERLEAVED": True}
    options = {"enable_fp_fusion": False}
    return Case("rotate_queries", prepare._rotate_queries_kernel, types, values, 4, options)


def _embed() -> Case:
    types = {"ids": "*i32", "table": "*bf16", "out": "*fp32"}
    return Case("embed", dense._embed_kernel, types, {"H": 4096, "BLOCK": 1024}, 4)


def _overlapping(case: Case, early: tuple[str, ...]) -> Case:
    return replace(
        case,
        name=f"pdl {case.name}",
        constexprs={**case.constexprs, "PDL": True},
        wants=(*case.wants, "ACQBULK", "PREEXIT"),
        early=early,
    )


def _cases() -> Iterator[Case]:
    plain = {
        case.name: case
        for module in (cases_dense, cases_attention, cases_moe)
        for case in module.CASES
    }
    for name, early in EARLY.items():
        yield _overlapping(plain[name], early)
    yield _overlapping(_rotate_queries(), ())
    yield _overlapping(_embed(), ())


CASES = list(_cases())
