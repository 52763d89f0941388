"""Parts of a spec that several families read from their config the same way.

Each function takes the keys of one config.json and raises MD-SRC-07 for what is wrong in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.spec import (
    DenseFfn,
    Gdn,
    Gqa,
    Layer,
    Mixer,
    Mla,
    MoeFfn,
    QkNorm,
    Rope,
    Router,
    Spec,
)
from moet_desk.kernels.kinds import RopeScaling, Score

_HEAD_BLOCK = 16
"""Numbers that share a scale in the smallest KV format."""

_PLAIN_ROPE = frozenset("rope_type type rope_theta partial_rotary_factor".split())
_YARN_ROPE = _PLAIN_ROPE | frozenset(
    "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
    " attention_factor truncate".split()
)

COMMON_KEYS = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    " hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings"
    " tie_word_embeddings num_experts_per_tok n_routed_experts num_local_experts"
    " num_experts".split()
)
"""Keys that every family here reads or checks."""


def head_behind_last(config: Mapping[str, Any]) -> str | None:
    """The name under which an MTP head's tensors would lie: one layer behind the last."""
    n_layers = config.get("num_hidden_layers")
    return f"model.layers.{n_layers}." if isinstance(n_layers, int) else None


def no_head(config: Mapping[str, Any]) -> str | None:
    """A family without MTP heads."""
    return None


def spec_of(
    keys: Keys,
    layers: Iterable[Layer],
    *,
    model_type: str,
    mtp: Layer | None = None,
    norm_eps: float = 1e-6,
) -> Spec:
    """The whole from its layers; `norm_eps` if the file does not say it."""
    return Spec(
        model_type=model_type,
        vocab=keys.count("vocab_size"),
        hidden=keys.multiple("hidden_size", of=32),
        context=keys.count("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", default=norm_eps),
        tied_head=keys.flag("tie_word_embeddings", default=False),
        layers=tuple(layers),
        mtp=mtp,
    )


def dense_first(
    keys: Keys, mixer: Mixer, moe: MoeFfn, *, has_mtp: bool, n_dense: int = 0
) -> tuple[list[Layer], Layer | None]:
    """Layers of which the first `first_k_dense_replace` are dense (`n_dense` if the file does not
    say it), and the MTP head's layer, which comes behind the last.
    """
    n_layers = keys.count("num_hidden_layers")
    n_dense = keys.count("first_k_dense_replace", default=n_dense, least=0)
    dense = DenseFfn(keys.count("intermediate_size"))
    layers = [Layer(i, mixer, dense if i < n_dense else moe) for i in range(n_layers)]
    return layers, Layer(n_layers, mixer, moe) if has_mtp else None


# -- attention ---------------------------------------------------------------------------------


def gqa(
    keys: Keys,
    *,
    qk_norm: QkNorm,
    has_bias: bool = False,
    rotary_share: float = 1.0,
    rope_base: float = 10000.0,
    norm_eps: float = 1e-6,
    rope_keys: frozenset[str] = frozenset(),
) -> Gqa:
    """Grouped-query attention with rope on halves. The numbers are what the family has if its file
    does not say them.
    """
    n_heads = keys.count("num_attention_heads")
    n_keys = keys.count("num_key_value_heads", default=n_heads)
    if n_heads % n_keys:
        raise keys.wrong(f"{n_heads} heads cannot share {n_keys} heads of keys")
    hidden = keys.count("hidden_size")
    head_dim = keys.count("head_dim", default=hidden // n_heads)
    if head_dim % _HEAD_BLOCK:
        raise keys.wrong(f"heads have {head_dim} numbers, a multiple of {_HEAD_BLOCK} is needed")
    share = keys.rope_number("partial_rotary_factor", default=rotary_share)
    rotary = int(head_dim * share)
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise keys.wrong(f"partial_rotary_factor {share} of {head_dim} numbers cannot be")
    return Gqa(
        n_heads=n_heads,
        n_keys=n_keys,
        head_dim=head_dim,
        has_bias=has_bias,
        qk_norm=qk_norm,
        norm_eps=keys.number("rms_norm_eps", default=norm_eps),
        softmax_scale=head_dim**-0.5,
        rope=rope(keys, rotary, interleaved=False, base=rope_base, known=rope_keys),
    )


def mla(keys: Keys, *, norm_eps: float = 1e-6) -> Mla:
    """Latent attention with the keys of DeepSeek-V3; `norm_eps` if the file does not say it."""
    nope_dim, rope_dim = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    interleaved = keys.flag("rope_interleave", default=True)
    turns = rope(keys, rope_dim, interleaved=interleaved)
    scale = (nope_dim + rope_dim) ** -0.5
    if turns.yarn is not None and turns.yarn.mscale_all_dim:
        # the released attention multiplies the softmax scale by mscale squared
        mscale = 0.1 * turns.yarn.mscale_all_dim * math.log(turns.yarn.factor) + 1.0
        scale *= mscale * mscale if turns.yarn.factor > 1 else 1.0
    return Mla(
        n_heads=keys.count("num_attention_heads"),
        q_rank=keys.count("q_lora_rank") if keys.get("q_lora_rank") is not None else None,
        kv_rank=keys.count("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=keys.count("v_head_dim"),
        softmax_scale=scale,
        latent_eps=keys.number("rms_norm_eps", default=norm_eps),
        rope=turns,
    )


def gdn(keys: Keys, *, fused: bool, norm_eps: float = 1e-6) -> Gdn:
    """Gated DeltaNet; `fused` says how files hold the products of its input."""
    n_keys, n_values = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
    if n_values % n_keys:
        raise keys.wrong(f"{n_values} heads of values cannot share {n_keys} heads of keys")
    return Gdn(
        n_keys=n_keys,
        n_values=n_values,
        key_dim=keys.count("linear_key_head_dim"),
        value_dim=keys.count("linear_value_head_dim"),
        kernel=keys.count("linear_conv_kernel_dim", default=4, least=2),
        norm_eps=keys.number("rms_norm_eps", default=norm_eps),
        fused=fused,
    )


def rope(
    keys: Keys,
    dim: int,
    *,
    interleaved: bool,
    base: float = 10000.0,
    known: frozenset[str] = frozenset(),
) -> Rope:
    """Rope over `dim` numbers; `base` if the file does not say it. `known`: parameters that mean
    nothing here.
    """
    theta = keys.rope_number("rope_theta", default=base)
    return Rope(dim=dim, base=theta, interleaved=interleaved, yarn=_yarn(keys, known))


def _yarn(keys: Keys, known: frozenset[str]) -> RopeScaling | None:
    kind = keys.rope_kind()
    if kind not in ("default", "yarn"):
        raise keys.wrong(f'rope type "{kind}" is not supported (default, yarn)')
    keys.refuse_unknown_rope(known | (_PLAIN_ROPE if kind == "default" else _YARN_ROPE))
    if kind == "default":
        return None
    return RopeScaling(
        factor=keys.rope_number("factor"),
        original_context=int(keys.rope_number("original_max_position_embeddings")),
        beta_fast=keys.rope_number("beta_fast", default=32.0),
        beta_slow=keys.rope_number("beta_slow", default=1.0),
        mscale=keys.rope_optional("mscale"),
        mscale_all_dim=keys.rope_optional("mscale_all_dim"),
        attention_factor=keys.rope_optional("attention_factor"),
        truncate=keys.rope_flag("truncate", default=True),
    )


# -- experts -----------------------------------------------------------------------------------


def sigmoid_moe(keys: Keys) -> MoeFfn:
    """A sigmoid router with a selection bias and groups, and a shared expert."""
    keys.want("topk_method", "noaux_tc")
    keys.want("moe_router_dtype", "float32")
    router = sigmoid_router(keys, renormalize=keys.flag("norm_topk_prob", default=True))
    inter = keys.multiple("moe_intermediate_size", of=32)
    shared = keys.count("n_shared_experts", default=0, least=0)
    return MoeFfn(router=router, inter=inter, shared_inter=shared * inter)


def sigmoid_router(keys: Keys, *, renormalize: bool) -> Router:
    """The router of `sigmoid_moe`."""
    score = keys.choice("scoring_func", {"sigmoid": Score.SIGMOID}, default="sigmoid")
    n_experts, top_k = _counts(keys)
    n_groups = keys.count("n_group", default=1)
    kept = keys.count("topk_group", default=1)
    if n_experts % n_groups or kept > n_groups:
        raise keys.wrong(f"{n_experts} experts in {n_groups} groups, {kept} kept, cannot be")
    if top_k > n_experts * kept // n_groups:
        raise keys.wrong(f"{top_k} of {n_experts} experts per token cannot be")
    return Router(
        n_experts=n_experts,
        top_k=top_k,
        score=score,
        selection_bias=True,
        n_groups=n_groups,
        kept_groups=kept,
        renormalize=renormalize,
        scale=keys.number("routed_scaling_factor", default=1.0),
    )


def softmax_moe(keys: Keys, *, inter: str, renormalize: bool, name: str = "mlp.") -> MoeFfn:
    """A softmax router over experts alone.

    Args:
        keys: of the config.
        inter: the key of the experts' width.
        renormalize: whether the chosen experts' weights add up to one.
        name: of the tensors, below the layer.
    """
    router = softmax_router(keys, *_counts(keys), renormalize=renormalize)
    return MoeFfn(router=router, inter=keys.multiple(inter, of=32), shared_inter=0, name=name)


def softmax_router(keys: Keys, n_experts: int, top_k: int, *, renormalize: bool) -> Router:
    """The router of `softmax_moe`: no groups, no bias, no scale."""
    if top_k > n_experts:
        raise keys.wrong(f"{top_k} of {n_experts} experts per token cannot be")
    return Router(
        n_experts=n_experts,
        top_k=top_k,
        score=Score.SOFTMAX,
        selection_bias=False,
        n_groups=1,
        kept_groups=1,
        renormalize=renormalize,
        scale=1.0,
    )


def _counts(keys: Keys) -> tuple[int, int]:
    """Experts of a layer, and those of a token. Files spell the first in three ways."""
    n_experts = keys.count("n_routed_experts", aliases=("num_local_experts", "num_experts"))
    return n_experts, keys.count("num_experts_per_tok")
