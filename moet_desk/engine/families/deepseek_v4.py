"""DeepSeek-V4-Flash: config keys and tensor names.

One key-value head for all query heads, a short window and pooled entries behind it; four residual
streams; the first layers' experts come from a table of token ids. The MTP head is a layer with a
window alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, rope, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import (
    Layer,
    MoeFfn,
    Pool,
    PooledAttention,
    PoolIndexer,
    Router,
    Spec,
    Streams,
)
from moet_desk.kernels.kinds import Glu, Score
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "qk_rope_head_dim q_lora_rank o_groups o_lora_rank moe_intermediate_size n_shared_experts"
    " index_n_heads index_head_dim index_topk sliding_window hc_mult hc_sinkhorn_iters hc_eps"
    " swiglu_limit num_hash_layers scoring_func routed_scaling_factor norm_topk_prob topk_method"
    " compress_ratios compress_rope_theta num_nextn_predict_layers expert_dtype"
    " attention_bias".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""

_DRAFT_KEYS = "dspark_"
"""Of a draft model in the same file, which is not run; the main model's maths do not depend on
it.
"""

_WINDOW_ONLY, _SPARSE = 0, 4
_STILL_BLOCK = 16  # numbers that share a scale in the smallest KV format
_HEAD, _DRAFTS = "mtp.0.", "mtp."


def mtp_prefix(config: Mapping[str, Any]) -> str | None:
    """Under which names an MTP head lies. Files with a draft model have its stages there instead,
    which are not run.
    """
    has_drafts = any(key.startswith(_DRAFT_KEYS) for key in config)
    return None if has_drafts else _HEAD


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    mine = {key: value for key, value in config.items() if not key.startswith(_DRAFT_KEYS)}
    keys = Keys(mine, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    for key, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("num_key_value_heads", 1),
        ("tie_word_embeddings", False),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
        ("n_shared_experts", 1),
    ):
        keys.want(key, only)
    keys.choice("expert_dtype", {"fp4": 4, "fp8": 8}, default="fp4")  # how the files are stored
    ratios, n_hashed = _ratios(keys), keys.count("num_hash_layers", least=0)
    mixers = {ratio: _mixer(keys, ratio) for ratio in {*ratios, _WINDOW_ONLY}}
    hashed, routed = _ffn(keys, hashed=True), _ffn(keys, hashed=False)
    layers = [
        Layer(i, mixers[ratio], hashed if i < n_hashed else routed)
        for i, ratio in enumerate(ratios)
    ]
    head = Layer(len(ratios), mixers[_WINDOW_ONLY], routed) if has_mtp else None
    streams = Streams(
        n=keys.count("hc_mult"),
        sinkhorn_steps=keys.count("hc_sinkhorn_iters"),
        eps=keys.number("hc_eps"),
    )
    made = spec_of(keys, layers, model_type="deepseek_v4", mtp=head)
    return replace(made, streams=streams)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    renames = [
        ("embed", "model.embed_tokens"),
        ("head", "lm_head"),
        ("norm", "model.norm"),
        ("hc_head_", "model.hc_head_"),
        ("layers.", "model.layers."),
    ]
    ignored: tuple[str, ...] = (_DRAFTS,)
    if spec.mtp is not None:
        head = f"model.layers.{len(spec.layers)}."
        renames.insert(0, (_HEAD, head))
        ignored = (head + "embed", head + "head")  # copies of the model's, should there be any
    return replace(plan_of(spec, ignored=ignored), renames=tuple(renames))


def _ratios(keys: Keys) -> list[int]:
    """Tokens per pooled entry of each layer; the list has the draft layers' behind. Where it is 4,
    an indexer chooses. Pages need powers of two.
    """
    n_layers, ratios = keys.count("num_hidden_layers"), keys.get("compress_ratios")
    known = isinstance(ratios, list) and all(
        type(ratio) is int and (ratio in (_WINDOW_ONLY, _SPARSE) or _is_heavy(ratio))
        for ratio in ratios
    )
    if not known or len(ratios) < n_layers:
        raise keys.wrong(
            f"compress_ratios is {ratios!r}, {_WINDOW_ONLY}, {_SPARSE} or a higher power of two"
            f" for each of {n_layers} layers was expected"
        )
    return list(ratios[:n_layers])


def _is_heavy(ratio: int) -> bool:
    return ratio > _SPARSE and ratio & (ratio - 1) == 0


def _mixer(keys: Keys, ratio: int) -> PooledAttention:
    n_heads, head_dim = keys.count("num_attention_heads"), keys.count("head_dim")
    groups, rotary = keys.count("o_groups"), keys.count("qk_rope_head_dim")
    if n_heads % groups:
        raise keys.wrong(f"{n_heads} heads cannot be in {groups} groups")
    if rotary % 2 or rotary > min(head_dim, keys.count("index_head_dim")):
        raise keys.wrong(f"qk_rope_head_dim {rotary} of {head_dim} numbers cannot be")
    if (head_dim - rotary) % _STILL_BLOCK:
        raise keys.wrong(
            f"of a head {head_dim - rotary} numbers do not rotate, a multiple of {_STILL_BLOCK} is"
            " needed"
        )
    turns = rope(keys, rotary, interleaved=True)
    yarn = turns.yarn
    if yarn is None:
        raise keys.wrong("its rope is not of the type yarn")
    if ratio == _WINDOW_ONLY:
        turns = replace(turns, yarn=None)
    else:  # the released rotation has no magnitude, whatever the factor
        base = keys.number("compress_rope_theta")
        turns = replace(turns, base=base, yarn=replace(yarn, attention_factor=1.0))
    return PooledAttention(
        n_heads=n_heads,
        head_dim=head_dim,
        q_rank=keys.count("q_lora_rank"),
        out_groups=groups,
        out_rank=keys.count("o_lora_rank"),
        window=keys.count("sliding_window"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        softmax_scale=head_dim**-0.5,
        rope=turns,
        pool=_pool(keys, ratio),
    )


def _pool(keys: Keys, ratio: int) -> Pool | None:
    if ratio == _WINDOW_ONLY:
        return None
    if ratio != _SPARSE:
        return Pool(ratio, indexer=None)
    dim = keys.count("index_head_dim")
    if dim & (dim - 1):  # for the Hadamard matrix it is turned by
        raise keys.wrong(f"index_head_dim is {dim}, a power of two was expected")
    heads = keys.count("index_n_heads")
    return Pool(ratio, PoolIndexer(n_heads=heads, head_dim=dim, top_k=keys.count("index_topk")))


def _ffn(keys: Keys, *, hashed: bool) -> MoeFfn:
    n_experts, top_k = keys.count("n_routed_experts"), keys.count("num_experts_per_tok")
    if top_k > n_experts:
        raise keys.wrong(f"{top_k} of {n_experts} experts per token cannot be")
    kinds = {"sqrtsoftplus": Score.SQRT_SOFTPLUS}
    router = Router(
        n_experts=n_experts,
        top_k=top_k,
        score=keys.choice("scoring_func", kinds, default="sqrtsoftplus"),
        selection_bias=not hashed,
        n_groups=1,
        kept_groups=1,
        renormalize=True,
        scale=keys.number("routed_scaling_factor"),
    )
    inter, limit = keys.multiple("moe_intermediate_size", of=32), keys.number("swiglu_limit")
    if limit <= 0:
        raise keys.wrong(f"swiglu_limit is {limit}, a positive number was expected")
    return MoeFfn(
        router,
        inter,
        inter,
        name="ffn.",
        glu=Glu(limit=limit),
        bias_name="gate.bias",
        projections=("w1", "w3", "w2"),
        hashed=hashed,
    )
