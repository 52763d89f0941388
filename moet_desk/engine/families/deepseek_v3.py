"""DeepSeek-V3 family (V3, R1, V3.1, Kimi-K2 text, and the demo model): config keys and tensor
names.

MLA attention with interleaved rope; the first layers dense, the others with routed experts, a
sigmoid router with a selection bias, and one shared expert. The MTP head is one more layer after
the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.spec import (
    DenseFfn,
    Layer,
    Mla,
    MoeFfn,
    Rope,
    Router,
    Spec,
)
from moet_desk.kernels.kinds import RopeScaling, Score
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = frozenset(
    "vocab_size hidden_size num_hidden_layers first_k_dense_replace num_attention_heads"
    " num_key_value_heads qk_nope_head_dim qk_rope_head_dim qk_head_dim head_dim v_head_dim"
    " kv_lora_rank q_lora_rank n_routed_experts num_local_experts num_experts num_experts_per_tok"
    " n_shared_experts moe_intermediate_size intermediate_size n_group topk_group norm_topk_prob"
    " scoring_func topk_method routed_scaling_factor num_nextn_predict_layers hidden_act"
    " rms_norm_eps rope_theta rope_scaling rope_parameters rope_interleave"
    " max_position_embeddings tie_word_embeddings attention_bias moe_layer_freq".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""


def mtp_prefix(config: Mapping[str, Any]) -> str | None:
    """Where the MTP head's tensors would be: one layer behind the last."""
    n_layers = config.get("num_hidden_layers")
    return f"model.layers.{n_layers}." if isinstance(n_layers, int) else None


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("topk_method", "noaux_tc")
    keys.want("moe_layer_freq", 1)
    n_layers = keys.count("num_hidden_layers")
    n_dense = keys.count("first_k_dense_replace", default=0, least=0)
    mixer = _mixer(keys)
    dense = DenseFfn(keys.count("intermediate_size"))
    moe = _moe(keys)
    layers = tuple(Layer(i, mixer, dense if i < n_dense else moe) for i in range(n_layers))
    return Spec(
        model_type="deepseek_v3",
        vocab=keys.count("vocab_size"),
        hidden=keys.multiple("hidden_size", of=32),
        context=keys.count("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        tied_head=keys.flag("tie_word_embeddings", default=False),
        layers=layers,
        mtp=Layer(n_layers, mixer, moe) if has_mtp else None,
    )


def _mixer(keys: Keys) -> Mla:
    nope_dim, rope_dim = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    rope = Rope(
        dim=rope_dim,
        base=keys.rope_number("rope_theta", default=10000.0),
        interleaved=keys.flag("rope_interleave", default=True),
        yarn=_yarn(keys),
    )
    scale = (nope_dim + rope_dim) ** -0.5
    if rope.yarn is not None and rope.yarn.mscale_all_dim:
        # the released attention multiplies the softmax scale by mscale squared
        mscale = 0.1 * rope.yarn.mscale_all_dim * math.log(rope.yarn.factor) + 1.0
        scale *= mscale * mscale if rope.yarn.factor > 1 else 1.0
    return Mla(
        n_heads=keys.count("num_attention_heads"),
        q_rank=keys.count("q_lora_rank") if keys.get("q_lora_rank") is not None else None,
        kv_rank=keys.count("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=keys.count("v_head_dim"),
        softmax_scale=scale,
        latent_eps=keys.number("rms_norm_eps", default=1e-6),
        rope=rope,
    )


def _yarn(keys: Keys) -> RopeScaling | None:
    kind = keys.rope_kind()
    if kind == "default":
        return None
    if kind != "yarn":
        raise keys.wrong(f'rope type "{kind}" is not supported (default, yarn)')
    return RopeScaling(
        factor=keys.rope_number("factor"),
        original_context=int(keys.rope_number("original_max_position_embeddings")),
        beta_fast=keys.rope_number("beta_fast", default=32.0),
        beta_slow=keys.rope_number("beta_slow", default=1.0),
        mscale=keys.rope_optional("mscale"),
        mscale_all_dim=keys.rope_optional("mscale_all_dim"),
        attention_factor=keys.rope_optional("attention_factor"),
    )


def _moe(keys: Keys) -> MoeFfn:
    score = keys.choice("scoring_func", {"sigmoid": Score.SIGMOID}, default="sigmoid")
    n_experts = keys.count("n_routed_experts", aliases=("num_local_experts", "num_experts"))
    n_groups = keys.count("n_group", default=1)
    kept = keys.count("topk_group", default=1)
    if n_experts % n_groups or kept > n_groups:
        raise keys.wrong(f"{n_experts} experts in {n_groups} groups, {kept} kept, cannot be")
    top_k = keys.count("num_experts_per_tok")
    if top_k > n_experts * kept // n_groups:
        raise keys.wrong(f"{top_k} of {n_experts} experts per token cannot be")
    router = Router(
        n_experts=n_experts,
        top_k=top_k,
        score=score,
        selection_bias=True,
        n_groups=n_groups,
        kept_groups=kept,
        renormalize=keys.flag("norm_topk_prob", default=True),
        scale=keys.number("routed_scaling_factor", default=1.0),
    )
    inter = keys.multiple("moe_intermediate_size", of=32)
    shared = keys.count("n_shared_experts", default=0, least=0)
    return MoeFfn(router=router, inter=inter, shared_inter=shared * inter)


# -- tensor names ----------------------------------------------------------------------------


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    moe, ffn = spec.moe_layers, spec.moe_ffn
    expert = "model.layers.{layer}.mlp.experts.{expert}."
    ignored = ["model.rotary_emb."]
    if spec.mtp is not None:
        # copies of the main embedding and head that the released files carry
        head = f"model.layers.{spec.mtp.index}."
        ignored += [head + "embed_tokens", head + "shared_head.head"]
    if spec.tied_head:
        ignored.append("lm_head")
    return PackPlan(
        model_type=spec.model_type,
        hidden=spec.hidden,
        inter=ffn.inter,
        n_experts=ffn.router.n_experts,
        moe_layers=tuple(layer.index for layer in moe),
        gate=expert + "gate_proj",
        up=expert + "up_proj",
        down=expert + "down_proj",
        dense=dict(dense_shapes(spec)),
        ignored=tuple(ignored),
    )


def dense_shapes(spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that is not a routed expert, with its shape."""
    hidden = spec.hidden
    yield "model.embed_tokens", (spec.vocab, hidden)
    yield "model.norm", (hidden,)
    if not spec.tied_head:
        yield "lm_head", (spec.vocab, hidden)
    for layer in spec.layers:
        yield from _layer(layer, hidden)
    if spec.mtp is not None:
        name = f"model.layers.{spec.mtp.index}."
        yield name + "enorm", (hidden,)
        yield name + "hnorm", (hidden,)
        yield name + "eh_proj", (hidden, 2 * hidden)
        yield name + "shared_head.norm", (hidden,)
        yield from _layer(spec.mtp, hidden)


def _layer(layer: Layer, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    name, mixer, ffn = f"model.layers.{layer.index}.", layer.mixer, layer.ffn
    head_dim = mixer.nope_dim + mixer.rope_dim
    yield name + "input_layernorm", (hidden,)
    yield name + "post_attention_layernorm", (hidden,)
    attention = name + "self_attn."
    if mixer.q_rank is None:
        yield attention + "q_proj", (mixer.n_heads * head_dim, hidden)
    else:
        yield attention + "q_a_proj", (mixer.q_rank, hidden)
        yield attention + "q_a_layernorm", (mixer.q_rank,)
        yield attention + "q_b_proj", (mixer.n_heads * head_dim, mixer.q_rank)
    yield attention + "kv_a_proj_with_mqa", (mixer.kv_rank + mixer.rope_dim, hidden)
    yield attention + "kv_a_layernorm", (mixer.kv_rank,)
    up_rows = mixer.n_heads * (mixer.nope_dim + mixer.v_dim)
    yield attention + "kv_b_proj", (up_rows, mixer.kv_rank)
    yield attention + "o_proj", (hidden, mixer.n_heads * mixer.v_dim)
    if isinstance(ffn, DenseFfn):
        yield from _mlp(name + "mlp.", hidden, ffn.inter)
        return
    yield name + "mlp.gate", (ffn.router.n_experts, hidden)
    if ffn.router.selection_bias:
        yield name + "mlp.gate.e_score_correction_bias", (ffn.router.n_experts,)
    if ffn.shared_inter:
        yield from _mlp(name + "mlp.shared_experts.", hidden, ffn.shared_inter)


def _mlp(name: str, hidden: int, inter: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + "gate_proj", (inter, hidden)
    yield name + "up_proj", (inter, hidden)
    yield name + "down_proj", (hidden, inter)
