"""The op table: each op's name, its plain-torch meaning, and how close another version must come.

Owns names and tolerances only. Read at load time by the engine, which binds the version it will
run; never looked into during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moet_desk.kernels import reference as ref


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    `exact` ops must agree bit for bit in every version; for the others `tolerance` bounds
    |difference| / RMS of the reference.
    """

    reference: Callable[..., Any]
    tolerance: float = 0.0
    exact: bool = False
    triton: Callable[..., Any] | None = None


def _exact(reference: Callable[..., Any]) -> Op:
    return Op(reference, exact=True)


OPS: Mapping[str, Op] = MappingProxyType(
    {
        "quantize_fp4": _exact(ref.quantize_fp4),
        "balance_zeros": _exact(ref.balance_zeros),
        "base_codes": _exact(ref.base_codes),
        "fine_digits": _exact(ref.fine_digits),
        "fp4_values": _exact(ref.fp4_values),
        "base_values": _exact(ref.base_values),
        "expand_base": _exact(ref.expand_base),
        "expand_fine": _exact(ref.expand_fine),
        "quantize_activations": _exact(ref.quantize_activations),
        "quantize_dense": _exact(ref.quantize_dense),
        "dense_values": _exact(ref.dense_values),
        "expert_mlp": Op(ref.expert_mlp, tolerance=1e-5),
        "expert_rows": Op(ref.expert_rows, tolerance=1e-5),
        "expert_mlp_float": Op(ref.expert_mlp_float, tolerance=1e-5),
        "swiglu": Op(ref.swiglu, tolerance=1e-6),
        "gated": Op(ref.gated, tolerance=1e-6),
        "combine": _exact(ref.combine),
        "route": Op(ref.route, tolerance=1e-6),
        "lookup": _exact(ref.lookup),
        "claim": _exact(ref.claim),
        "release": _exact(ref.release),
        "rms_norm": Op(ref.rms_norm, tolerance=1e-6),
        "layer_norm": Op(ref.layer_norm, tolerance=1e-6),
        "rope_tables": Op(ref.rope_tables, tolerance=1e-6),
        "rotate": Op(ref.rotate, tolerance=1e-6),
        "apply_rope": Op(ref.apply_rope, tolerance=1e-6),
        "mla_absorbed": Op(ref.mla_absorbed, tolerance=1e-5),
        "mla_plain": Op(ref.mla_plain, tolerance=1e-5),
        "causal_conv": Op(ref.causal_conv, tolerance=1e-6),
        "delta_unit": Op(ref.delta_unit, tolerance=1e-6),
        "delta_decay": Op(ref.delta_decay, tolerance=1e-6),
        "delta_step": Op(ref.delta_step, tolerance=1e-5),
        "delta_chunk": Op(ref.delta_chunk, tolerance=1e-4),
        "gqa": Op(ref.gqa, tolerance=1e-5),
        "index_scores": Op(ref.index_scores, tolerance=1e-5),
        "choose": _exact(ref.choose),
        "mla_write": _exact(ref.mla_write),
        "mla_read": _exact(ref.mla_read),
        "gqa_write": _exact(ref.gqa_write),
        "gqa_read": _exact(ref.gqa_read),
        "index_write": _exact(ref.index_write),
        "index_read": _exact(ref.index_read),
        "shared_attention": Op(ref.shared_attention, tolerance=1e-5),
        "grouped_output": Op(ref.grouped_output, tolerance=1e-5),
        "seen_entries": _exact(ref.seen_entries),
        "unit": Op(ref.unit, tolerance=1e-6),
        "shared_write": _exact(ref.shared_write),
        "shared_read": _exact(ref.shared_read),
        "pooled_key_write": Op(ref.pooled_key_write, tolerance=1e-5),
        "pooled_key_read": _exact(ref.pooled_key_read),
        "index_rounded": Op(ref.index_rounded, tolerance=1e-5),
        "connections": Op(ref.connections, tolerance=1e-5),
        "collapse": Op(ref.collapse, tolerance=1e-5),
        "weights_of": Op(ref.weights_of, tolerance=1e-6),
        "sample": _exact(ref.sample),
        "linear": Op(ref.linear, tolerance=1e-5),
        "linear_row": Op(ref.linear_row, tolerance=1e-5),
    }
)
"""Every op by name."""
