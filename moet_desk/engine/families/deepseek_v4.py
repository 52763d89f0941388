"""DeepSeek-V4-Flash: config keys.

One key-value head for all query heads, a short window and pooled entries behind it; four residual
streams; the first layers' experts come from a table of token ids. The family is not in
`MODULE_OF_TYPE` yet, because the engine has no blocks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, rope
from moet_desk.engine.spec import MoeFfn, Router
from moet_desk.engine.spec_v4 import Indexer, Pool, PooledAttention, Streams, V4Layer, V4Spec
from moet_desk.kernels.kinds import Glu, Score

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

_WINDOW_ONLY, _SPARSE, _HEAVY = 0, 4, 128


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> V4Spec:
    """The spec of a model with the released spelling of keys.

    Args:
        config: the parsed config.json.
        path: where it came from, for messages.
        has_mtp: whether the MTP head's tensors are there.

    Raises:
        MoetError: MD-SRC-07 a key that is missing, wrong or unknown.
    """
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
        V4Layer(i, mixers[ratio], hashed if i < n_hashed else routed, hashed=i < n_hashed)
        for i, ratio in enumerate(ratios)
    ]
    head = V4Layer(len(ratios), mixers[_WINDOW_ONLY], routed, hashed=False)
    return V4Spec(
        vocab=keys.count("vocab_size"),
        hidden=keys.multiple("hidden_size", of=32),
        context=keys.count("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        streams=Streams(
            n=keys.count("hc_mult"),
            sinkhorn_steps=keys.count("hc_sinkhorn_iters"),
            eps=keys.number("hc_eps"),
        ),
        layers=tuple(layers),
        mtp=head if has_mtp else None,
    )


def _ratios(keys: Keys) -> list[int]:
    """Tokens per pooled entry of each layer. The list also has the draft layers', behind."""
    n_layers, ratios = keys.count("num_hidden_layers"), keys.get("compress_ratios")
    known = isinstance(ratios, list) and all(
        type(ratio) is int and ratio in (_WINDOW_ONLY, _SPARSE, _HEAVY) for ratio in ratios
    )
    if not known or len(ratios) < n_layers:
        raise keys.wrong(
            f"compress_ratios is {ratios!r}, one of {_WINDOW_ONLY}, {_SPARSE} and {_HEAVY}"
            f" for each of {n_layers} layers was expected"
        )
    return list(ratios[:n_layers])


def _mixer(keys: Keys, ratio: int) -> PooledAttention:
    n_heads, head_dim = keys.count("num_attention_heads"), keys.count("head_dim")
    groups, rotary = keys.count("o_groups"), keys.count("qk_rope_head_dim")
    if n_heads % groups:
        raise keys.wrong(f"{n_heads} heads cannot be in {groups} groups")
    if rotary % 2 or rotary > min(head_dim, keys.count("index_head_dim")):
        raise keys.wrong(f"qk_rope_head_dim {rotary} of {head_dim} numbers cannot be")
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
    if ratio == _HEAVY:
        return Pool(ratio, overlap=False, indexer=None)
    indexer = Indexer(
        n_heads=keys.count("index_n_heads"),
        head_dim=keys.count("index_head_dim"),
        top_k=keys.count("index_topk"),
    )
    return Pool(ratio, overlap=True, indexer=indexer)


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
    return MoeFfn(router, inter, inter, name="ffn.", glu=Glu(limit=limit), bias_name="gate.bias")
