"""Every op in plain torch, float32 inside: the meaning of each op and the engine's CPU path.

Split by concern; this module gives all of them under one roof. Triton twins carry the same names
and argument orders. Owns no state; any thread may call it, the engine thread does.
"""

from moet_desk.kernels.layouts import base_codes, fine_digits
from moet_desk.kernels.reference.attention import gqa, mla_absorbed, mla_plain
from moet_desk.kernels.reference.cache import CacheTables, LookupResult, claim, lookup, release
from moet_desk.kernels.reference.delta import (
    causal_conv,
    delta_chunk,
    delta_decay,
    delta_step,
    delta_unit,
)
from moet_desk.kernels.reference.dense import linear, linear_row
from moet_desk.kernels.reference.expand import expand_base, expand_fine
from moet_desk.kernels.reference.experts import (
    ExpertBias,
    combine,
    expert_mlp,
    expert_mlp_float,
    expert_rows,
    gated,
    swiglu,
)
from moet_desk.kernels.reference.indexer import choose, index_scores
from moet_desk.kernels.reference.kv_formats import (
    gqa_entry_bytes,
    gqa_read,
    gqa_write,
    index_read,
    index_write,
    mla_entry_bytes,
    mla_read,
    mla_write,
)
from moet_desk.kernels.reference.norms import (
    apply_rope,
    layer_norm,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    yarn_mscale,
)
from moet_desk.kernels.reference.pooled_entries import (
    index_rounded,
    pooled_key_read,
    pooled_key_write,
    shared_read,
    shared_write,
)
from moet_desk.kernels.reference.pooling import OpenWindow, Running
from moet_desk.kernels.reference.quant import (
    balance_zeros,
    base_values,
    dense_values,
    fp4_values,
    quantize_activations,
    quantize_dense,
    quantize_fp4,
)
from moet_desk.kernels.reference.routing import route, weights_of
from moet_desk.kernels.reference.sampling import sample
from moet_desk.kernels.reference.shared_attention import (
    grouped_output,
    seen_entries,
    shared_attention,
    unit,
)
from moet_desk.kernels.reference.streams import (
    Connections,
    StreamWeights,
    collapse,
    connections,
)

__all__ = [
    "CacheTables",
    "Connections",
    "ExpertBias",
    "LookupResult",
    "OpenWindow",
    "Running",
    "StreamWeights",
    "apply_rope",
    "balance_zeros",
    "base_codes",
    "base_values",
    "causal_conv",
    "choose",
    "claim",
    "collapse",
    "combine",
    "connections",
    "delta_chunk",
    "delta_decay",
    "delta_step",
    "delta_unit",
    "dense_values",
    "expand_base",
    "expand_fine",
    "expert_mlp",
    "expert_mlp_float",
    "expert_rows",
    "fine_digits",
    "fp4_values",
    "gated",
    "gqa",
    "gqa_entry_bytes",
    "gqa_read",
    "gqa_write",
    "grouped_output",
    "index_read",
    "index_rounded",
    "index_scores",
    "index_write",
    "layer_norm",
    "linear",
    "linear_row",
    "lookup",
    "mla_absorbed",
    "mla_entry_bytes",
    "mla_plain",
    "mla_read",
    "mla_write",
    "pooled_key_read",
    "pooled_key_write",
    "quantize_activations",
    "quantize_dense",
    "quantize_fp4",
    "release",
    "rms_norm",
    "rope_frequencies",
    "rope_tables",
    "rotate",
    "route",
    "sample",
    "seen_entries",
    "shared_attention",
    "shared_read",
    "shared_write",
    "swiglu",
    "unit",
    "weights_of",
    "yarn_mscale",
]
