"""What GGUF architectures are called elsewhere: config.json keys and tensor names.

A new one is a row of `ARCHS`: its model_type, a function from fields to config keys, and tables of
names. Names are those of GGUF without "blk.N." and ".weight" on the left, those of the family
without "model.layers.N." on the right. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from moet_desk.errors import fail
from moet_desk.store.gguf.fields import Fields

Config = dict[str, Any]
Names = Container[str]
"""Of the stored tensors: some files say only by them what a model has."""

HARMLESS = frozenset(
    "vocab_size rope.scaling.finetuned attention.key_length attention.value_length"
    " attention.head_count_kv expert_feed_forward_length feed_forward_length".split()
)
"""Fields of an architecture that say nothing or what others say too."""

_SOFTMAX, _SIGMOID = 1, 2
_SCORES = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
_NO_TEXT = ("clip",)  # the picture side of a model


class Change(Enum):
    """What the converter did to a tensor and is undone here."""

    NONE = "none"
    KEY_UP = "key_up"  # the key half of kv_b_proj, transposed per head
    VALUE_UP = "value_up"  # the value half
    QUERY_ROWS = "query_rows"  # rows of each head interleaved for another kind of rope
    KEY_ROWS = "key_rows"
    GATE_BIAS = "gate_bias"  # a half of the biases that are stored in turn: gate, up, gate, ...
    UP_BIAS = "up_bias"
    NORM = "norm"  # 1 is added to a norm's weight
    DECAY = "decay"  # A_log is stored as -exp(A_log)
    ROW = "row"  # a matrix of one row may be a vector
    CONV = "conv"  # [C, 1, K] without its middle
    IN = "in"  # queries, keys and values of a DeltaNet's fused product, of all heads
    GATES = "gates"  # its gates
    VALUES = "values"  # rows that are heads of values are dealt out
    VALUES_DECAY = "values_decay"  # and DECAY
    VALUES_BEHIND = "values_behind"  # likewise the rows behind those of queries and keys
    VALUES_CONV = "values_conv"  # and CONV
    VALUES_COLUMNS = "values_columns"  # likewise columns


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture.

    Attributes:
        config: fields and tensor names to config.json, without what all have in common.
        layer: names of a layer's tensors; a name with `{expert}` is a stack of experts, "a|b" one
            whose matrices are two halves of rows.
        top: names outside of layers.
        changes: what is undone, by GGUF name.
    """

    model_type: str
    config: Callable[[Fields, Names], Config]
    layer: Mapping[str, str]
    top: Mapping[str, str]
    changes: Mapping[str, Change] = field(default_factory=dict)


def arch_of(fields: Fields) -> Arch:
    """The architecture of a file.

    Raises:
        MoetError: MD-GGUF-02 it is no mixture of experts, MD-GGUF-03 nobody wrote it down here,
            MD-GGUF-05 a field is wrong.
    """
    found = ARCHS.get(fields.arch)
    if fields.arch not in _NO_TEXT and fields.count("expert_count", 0) == 0:
        raise fail("MD-GGUF-02", arch=fields.arch, file=fields.file)
    if found is None:
        raise fail("MD-GGUF-03", arch=fields.arch, file=fields.file, supported=", ".join(ARCHS))
    return found


def config_of(
    fields: Fields, arch: Arch, *, names: Container[str], vocab: int, tied_head: bool
) -> Config:
    """The keys of config.json.

    Args:
        fields: the file's.
        arch: its architecture.
        names: of the stored tensors.
        vocab: rows of its embedding.
        tied_head: whether it has no output matrix of its own.

    Raises:
        MoetError: MD-GGUF-05 a field is missing or wrong, or may change the maths and is not known.
    """
    n_mtp = fields.count("nextn_predict_layers", 0)
    n_layers = fields.count("block_count") - n_mtp
    common: Config = {
        "model_type": arch.model_type,
        "vocab_size": vocab,
        "hidden_size": fields.count("embedding_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": fields.count("attention.head_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.count("context_length"),
        "tie_word_embeddings": tied_head,
        "hidden_act": "silu",
    }
    config = common | _rope(fields) | arch.config(fields, names)
    fields.refuse_unread(HARMLESS)
    return config


def _rope(fields: Fields) -> Config:
    rope: Config = {"rope_theta": fields.number("rope.freq_base", 10000.0)}
    kind = fields.text(f"{fields.arch}.rope.scaling.type", "none")
    if kind == "none":
        return rope
    rope["rope_scaling"] = {
        "rope_type": kind,
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.count(
            "rope.scaling.original_context_length", fields.count("context_length")
        ),
        **_yarn(fields),
    }
    return rope


def _yarn(fields: Fields) -> Config:
    named = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    found: Config = {name: fields.number(key) for name, key in named.items() if fields.has(key)}
    if fields.has("rope.scaling.yarn_log_multiplier"):
        # stored as 0.1 * mscale_all_dim; programs that read it take both scales as equal
        scale = round(10 * fields.number("rope.scaling.yarn_log_multiplier"), 6)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


# -- names that many share ---------------------------------------------------------------------

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_DENSE_FFN = {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERT = "mlp.experts.{expert}."
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": _EXPERT + "gate_proj",
    "ffn_up_exps": _EXPERT + "up_proj", "ffn_down_exps": _EXPERT + "down_proj",
    "ffn_gate_up_exps": f"{_EXPERT}gate_proj|{_EXPERT}up_proj",
}  # fmt: skip
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
_MTP = {
    "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm", "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}  # fmt: skip


# -- one architecture each ---------------------------------------------------------------------


def _deepseek2(fields: Fields, names: Names) -> Config:
    """DeepSeek-V3, R1, Kimi-K2 text; older files hold the head widths of expanded attention."""
    rope_dim = fields.count("rope.dimension_count")
    suffix = "_mla" if fields.has("attention.key_length_mla") else ""
    key_dim = fields.count(f"attention.key_length{suffix}")
    return {
        "num_key_value_heads": fields.count("attention.head_count"),
        "q_lora_rank": fields.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": max(0, key_dim - rope_dim),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": fields.count(f"attention.value_length{suffix}"),
        "intermediate_size": fields.count("feed_forward_length"),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0),
        "n_routed_experts": fields.count("expert_count"),
        "num_nextn_predict_layers": fields.count("nextn_predict_layers", 0),
        # files of before this field are DeepSeek-V2's, whose router is another one
        "scoring_func": _score_name(fields.count("expert_gating_func", _SOFTMAX)),
        **_routed(fields),
    }


def _score_name(score: int) -> str:
    return _SCORES.get(score, f"number {score} of llama.cpp")


def _routed(fields: Fields) -> Config:
    """Experts as DeepSeek-V3 and those after it have them. No groups said: one."""
    return {
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "n_shared_experts": fields.count("expert_shared_count", 0),
        "n_group": fields.count("expert_group_count", 1) or 1,
        "topk_group": fields.count("expert_group_used_count", 1) or 1,
        "norm_topk_prob": fields.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
    }


_DEEPSEEK_NAMES = {
    **_NORMS, **_DENSE_FFN, **_EXPERTS, **_SHARED, **_MTP,
    "attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj", "attn_v_b": "self_attn.kv_b_proj",
}  # fmt: skip


def _glm4moe(fields: Fields, names: Names) -> Config:
    """GLM-4.5, 4.5-Air, 4.6, 4.7. Biases and norms of heads show in the tensors alone."""
    score = fields.count("expert_gating_func", _SIGMOID)
    if score != _SIGMOID:
        raise fields.wrong(f"its router is {_score_name(score)}, sigmoid was expected")
    return {
        **_grouped_heads(fields),
        "partial_rotary_factor": fields.count("rope.dimension_count") / _head_dim(fields),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "intermediate_size": fields.count("feed_forward_length"),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0),
        "n_routed_experts": fields.count("expert_count"),
        "num_nextn_predict_layers": fields.count("nextn_predict_layers", 0),
        **_routed(fields),
    }


def _qwen3moe(fields: Fields, names: Names) -> Config:
    """Qwen3 with experts; the files do not say that the weights of chosen experts add up to one."""
    return {
        **_whole_rope(fields),
        "intermediate_size": fields.count("feed_forward_length"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "num_experts": fields.count("expert_count"),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=True),
    }


def _olmoe(fields: Fields, names: Names) -> Config:
    """OLMoE; its feed-forward width is that of an expert."""
    clip = fields.number("attention.clamp_kqv", 0.0)
    return {
        **_whole_rope(fields),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_experts": fields.count("expert_count"),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=False),
        **({"clip_qkv": clip} if clip else {}),
    }


def _llama(fields: Fields, names: Names) -> Config:
    """Mixtral; a dense llama does not come here."""
    return {
        **_whole_rope(fields),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_local_experts": fields.count("expert_count"),
    }


def _minimax(fields: Fields, names: Names) -> Config:
    """MiniMax-M2 to M2.7; the weights of chosen experts always add up to one."""
    score = fields.count("expert_gating_func", _SIGMOID)
    return {
        **_grouped_heads(fields),
        "rotary_dim": fields.count("rope.dimension_count"),
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "num_local_experts": fields.count("expert_count"),
        "scoring_func": _score_name(score),
    }


def _gpt_oss(fields: Fields, names: Names) -> Config:
    """gpt-oss; limit and alpha of its GLU, and which layers have windows, are in no field."""
    rope = _rope(fields)
    if "rope_scaling" in rope:  # all published ones have it; files cannot say it
        rope["rope_scaling"]["truncate"] = False
    return {
        **_whole_rope(fields),
        **rope,
        "attention_bias": True,
        "sliding_window": fields.count("attention.sliding_window"),
        "intermediate_size": fields.count("expert_feed_forward_length"),
        "num_local_experts": fields.count("expert_count"),
    }


def _qwen3next(fields: Fields, names: Names) -> Config:
    """Qwen3-Next; weights of chosen experts add up to one, which files need not say."""
    n_values = max(1, fields.count("ssm.time_step_rank"))
    return {
        **_grouped_heads(fields),
        "partial_rotary_factor": fields.count("rope.dimension_count") / _head_dim(fields),
        "full_attention_interval": fields.count("full_attention_interval", 4),
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_num_key_heads": fields.count("ssm.group_count"),
        "linear_num_value_heads": n_values,
        "linear_value_head_dim": fields.count("ssm.inner_size") // n_values,
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length"),
        "num_experts": fields.count("expert_count"),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=True),
    }


def _qwen35moe(fields: Fields, names: Names) -> Config:
    """The text part of Qwen3.5 and 3.6; a place in a picture turns heads in sections, which are one
    for text.
    """
    fields.ignore("rope.dimension_sections")
    return _qwen3next(fields, names)


def _whole_rope(fields: Fields) -> Config:
    """Grouped heads whose rope turns all of each."""
    heads = _grouped_heads(fields)
    if fields.count("rope.dimension_count", heads["head_dim"]) != heads["head_dim"]:
        raise fields.wrong("its rope turns a part of each head, all was expected")
    return heads


def _grouped_heads(fields: Fields) -> Config:
    heads = fields.count("attention.head_count")
    return {
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": _head_dim(fields),
    }


def _head_dim(fields: Fields) -> int:
    heads = fields.count("attention.head_count")
    width = fields.count("attention.key_length", fields.count("embedding_length") // max(heads, 1))
    if not width or width != fields.count("attention.value_length", width):
        raise fields.wrong("its keys and values differ in width, or have none")
    return width


_QWEN_NAMES = {**_NORMS, **_ATTENTION, **_EXPERTS}
_GLM_NAMES = {
    **_NORMS, **_ATTENTION, **_DENSE_FFN, **_EXPERTS, **_SHARED, **_MTP,
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_W1, _W3, _W2 = (f"block_sparse_moe.experts.{{expert}}.w{n}" for n in (1, 3, 2))
_MIXTRAL_NAMES = {
    **_NORMS, **_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": _W1,
    "ffn_up_exps": _W3, "ffn_down_exps": _W2, "ffn_gate_up_exps": f"{_W1}|{_W3}",
}  # fmt: skip
_MINIMAX_NAMES = {
    **_MIXTRAL_NAMES, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}  # fmt: skip
_OSS_NAMES = {
    **_NORMS, **_ATTENTION, **_EXPERTS,
    "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip

_NEXT_NAMES = {
    **_ATTENTION, **_EXPERTS, **_MTP, "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
    "attn_qkv": "linear_attn.in_proj_qkvz", "attn_gate": "linear_attn.in_proj_qkvz",
}  # fmt: skip
_QWEN35_NAMES = {
    **{name: target for name, target in _NEXT_NAMES.items() if name not in ("ssm_in", "ssm_ba")},
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
}  # fmt: skip
_NORM_NAMES = (
    "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm", "nextn.enorm",
    "nextn.hnorm", "nextn.shared_head_norm",
)  # fmt: skip
_NEXT_CHANGES = {
    **dict.fromkeys(_NORM_NAMES, Change.NORM), "ffn_gate_inp_shexp": Change.ROW,
    "ssm_conv1d": Change.CONV, "ssm_a": Change.DECAY,
    "attn_qkv": Change.IN, "attn_gate": Change.GATES,
}  # fmt: skip
_QWEN35_CHANGES = {
    **_NEXT_CHANGES, "ssm_conv1d": Change.VALUES_CONV, "ssm_a": Change.VALUES_DECAY,
    "attn_qkv": Change.VALUES_BEHIND, "ssm_out": Change.VALUES_COLUMNS,
    **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt.bias"), Change.VALUES),
}  # fmt: skip

ARCHS: Mapping[str, Arch] = {
    "deepseek2": Arch(
        "deepseek_v3", _deepseek2, _DEEPSEEK_NAMES, _TOP,
        {"attn_k_b": Change.KEY_UP, "attn_v_b": Change.VALUE_UP},
    ),
    "glm4moe": Arch("glm4_moe", _glm4moe, _GLM_NAMES, _TOP),
    "qwen3moe": Arch("qwen3_moe", _qwen3moe, _QWEN_NAMES, _TOP),
    "qwen3next": Arch("qwen3_next", _qwen3next, _NEXT_NAMES, _TOP, _NEXT_CHANGES),
    "qwen35moe": Arch("qwen3_5_moe", _qwen35moe, _QWEN35_NAMES, _TOP, _QWEN35_CHANGES),
    "olmoe": Arch("olmoe", _olmoe, _QWEN_NAMES, _TOP),
    "minimax-m2": Arch("minimax_m2", _minimax, _MINIMAX_NAMES, _TOP),
    "gpt-oss": Arch(
        "gpt_oss", _gpt_oss, _OSS_NAMES, _TOP,
        {"ffn_gate_exps.bias": Change.GATE_BIAS, "ffn_up_exps.bias": Change.UP_BIAS},
    ),
    "llama": Arch(
        "mixtral", _llama, _MIXTRAL_NAMES, _TOP,
        {"attn_q": Change.QUERY_ROWS, "attn_k": Change.KEY_ROWS},
    ),
}  # fmt: skip
"""general.architecture -> what it is called here."""
