"""What a spec's tensors are called in released files, and their shapes.

Families differ in a few names only; what is the same for all is here.
"""

from __future__ import annotations

from collections.abc import Iterator

from moet_desk.engine.spec import (
    PROJECTIONS,
    Attention,
    DenseFfn,
    Gdn,
    Gqa,
    Indexer,
    Layer,
    Mla,
    MoeFfn,
    Pool,
    PooledAttention,
    QkNorm,
    Spec,
    Streams,
)
from moet_desk.store.pack_format import PackPlan

TABLE = "tid2eid"
"""Experts of each token id, below the router's name."""

NGRAM_TABLES = "model.ngram_embeddings.embedders."
NGRAM_PRODUCTS = "model.ngram_embeddings.post_projs."
"""Tables of n-grams and, of each, the product that its rows go through; a number follows."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]

GATE_UP_BIAS, DOWN_BIAS = "experts.gate_up_proj_bias", "experts.down_proj_bias"
"""Biases of all experts, [E, 2I] with gate and up in turn, and [E, H]."""


def plan_of(spec: Spec, *, ignored: tuple[str, ...] = ()) -> PackPlan:
    """The packer's plan; `ignored` are beginnings of names that are left out."""
    ffn = spec.moe_ffn
    expert = f"model.layers.{{layer}}.{ffn.name}experts.{{expert}}."
    gate, up, down = (expert + projection for projection in ffn.projections)
    left_out = ["model.rotary_emb.", *ignored]
    if spec.mtp is not None:
        # copies of the main embedding and head that the released files carry
        head = f"model.layers.{spec.mtp.index}."
        left_out += [head + "embed_tokens", head + "shared_head.head"]
    if spec.tied_head:
        left_out.append("lm_head")
    return PackPlan(
        model_type=spec.model_type,
        hidden=spec.hidden,
        inter=ffn.inter,
        n_experts=ffn.router.n_experts,
        moe_layers=tuple(layer.index for layer in spec.moe_layers),
        gate=gate,
        up=up,
        down=down,
        dense=dict(dense_shapes(spec)),
        by_row=(NGRAM_TABLES,) if spec.ngrams is not None else (),
        ignored=tuple(left_out),
    )


def dense_shapes(spec: Spec) -> Shapes:
    """Every tensor that is not a routed expert, with its shape."""
    hidden = spec.hidden
    yield "model.embed_tokens", (spec.vocab, hidden)
    yield "model.norm", (hidden,)
    if spec.ngrams is not None:
        for table in range(spec.ngrams.n_tables):
            yield f"{NGRAM_TABLES}{table}", (spec.ngrams.rows(table), spec.ngrams.width)
            yield f"{NGRAM_PRODUCTS}{table}", (hidden, spec.ngrams.width)
    if not spec.tied_head:
        yield "lm_head", (spec.vocab, hidden)
    if spec.streams is not None:
        yield from stream_shapes(spec, spec.streams)
        return
    for layer in spec.layers:
        yield from (_layer if layer.around is None else _shortcut_layer)(layer, hidden)
    if spec.mtp is not None:
        name = f"model.layers.{spec.mtp.index}."
        yield name + "enorm", (hidden,)
        yield name + "hnorm", (hidden,)
        yield name + "eh_proj", (hidden, 2 * hidden)
        yield name + "shared_head.norm", (hidden,)
        yield from _layer(spec.mtp, hidden)


def _layer(layer: Layer, hidden: int) -> Shapes:
    name, ffn = f"model.layers.{layer.index}.", layer.ffn
    yield name + "input_layernorm", (hidden,)
    yield name + "post_attention_layernorm", (hidden,)
    if isinstance(layer.mixer, PooledAttention):
        raise TypeError("pooled attention stands between streams")
    if isinstance(layer.mixer, Gdn):
        yield from _gdn(name + "linear_attn.", layer.mixer, hidden)
    else:
        yield from _attention(name + "self_attn.", layer.mixer, hidden)
    if isinstance(ffn, DenseFfn):
        yield from _mlp(name + "mlp.", hidden, ffn.inter)
    else:
        yield from _moe(name + ffn.name, ffn, hidden)


def _shortcut_layer(layer: Layer, hidden: int) -> Shapes:
    """Of a layer with two attentions; the halves are numbered behind each part's name."""
    name, ffn, around = f"model.layers.{layer.index}.", layer.ffn, layer.around
    if around is None or not isinstance(layer.mixer, Mla | Gqa) or not isinstance(ffn, MoeFfn):
        raise TypeError("a shortcut layer has attention, a dense part and routed experts")
    for half in range(2):
        yield f"{name}input_layernorm.{half}", (hidden,)
        yield f"{name}post_attention_layernorm.{half}", (hidden,)
        yield from _attention(f"{name}self_attn.{half}.", layer.mixer, hidden)
        yield from _mlp(f"{name}mlps.{half}.", hidden, around.inter)
    yield from _moe(name + ffn.name, ffn, hidden)


def stream_shapes(spec: Spec, streams: Streams) -> Shapes:
    """Of a model with streams, its layers, what collapses the streams, and its head, but for the
    first and last products.
    """
    hidden, n = spec.hidden, streams.n
    layers = spec.layers if spec.mtp is None else (*spec.layers, spec.mtp)
    for layer in layers:
        name = f"model.layers.{layer.index}."
        if not isinstance(layer.mixer, PooledAttention) or not isinstance(layer.ffn, MoeFfn):
            raise TypeError("a layer of streams has pooled attention and routed experts")
        for part in ("attn", "ffn"):
            yield f"{name}{part}_norm", (hidden,)
            yield f"{name}hc_{part}_fn", (2 * n + n * n, n * hidden)
            yield f"{name}hc_{part}_base", (2 * n + n * n,)
            yield f"{name}hc_{part}_scale", (3,)
        yield from _pooled(name + "attn.", layer.mixer, hidden)
        yield from _moe(name + layer.ffn.name, layer.ffn, hidden, vocab=spec.vocab)
    yield from _collapse("model.", hidden, n)
    if spec.mtp is not None:
        head = f"model.layers.{spec.mtp.index}."
        for part in ("enorm", "hnorm", "norm"):
            yield head + part, (hidden,)
        yield head + "e_proj", (hidden, hidden)
        yield head + "h_proj", (hidden, hidden)
        yield from _collapse(head, hidden, n)


def _collapse(name: str, hidden: int, n: int) -> Shapes:
    yield name + "hc_head_fn", (n, n * hidden)
    yield name + "hc_head_base", (n,)
    yield name + "hc_head_scale", (1,)


def _pooled(name: str, mixer: PooledAttention, hidden: int) -> Shapes:
    queries = mixer.n_heads * mixer.head_dim
    yield name + "wq_a", (mixer.q_rank, hidden)
    yield name + "q_norm", (mixer.q_rank,)
    yield name + "wq_b", (queries, mixer.q_rank)
    yield name + "wkv", (mixer.head_dim, hidden)
    yield name + "kv_norm", (mixer.head_dim,)
    yield name + "attn_sink", (mixer.n_heads,)
    yield name + "wo_a", (mixer.out_groups * mixer.out_rank, queries // mixer.out_groups)
    yield name + "wo_b", (hidden, mixer.out_groups * mixer.out_rank)
    pool = mixer.pool
    if pool is None:
        return
    yield from _compressor(name + "compressor.", pool, mixer.head_dim, hidden)
    if pool.indexer is not None:
        indexer, below = pool.indexer, name + "indexer."
        yield below + "wq_b", (indexer.n_heads * indexer.head_dim, mixer.q_rank)
        yield below + "weights_proj", (indexer.n_heads, hidden)
        yield from _compressor(below + "compressor.", pool, indexer.head_dim, hidden)


def _compressor(name: str, pool: Pool, dim: int, hidden: int) -> Shapes:
    width = dim if pool.indexer is None else 2 * dim
    yield name + "wkv", (width, hidden)
    yield name + "wgate", (width, hidden)
    yield name + "ape", (pool.ratio, width)
    yield name + "norm", (dim,)


def _attention(name: str, mixer: Attention, hidden: int) -> Shapes:
    return _mla(name, mixer, hidden) if isinstance(mixer, Mla) else _gqa(name, mixer, hidden)


def _mla(name: str, mixer: Mla, hidden: int) -> Shapes:
    head_dim = mixer.nope_dim + mixer.rope_dim
    if mixer.q_rank is None:
        yield name + "q_proj", (mixer.n_heads * head_dim, hidden)
    else:
        yield name + "q_a_proj", (mixer.q_rank, hidden)
        yield name + "q_a_layernorm", (mixer.q_rank,)
        yield name + "q_b_proj", (mixer.n_heads * head_dim, mixer.q_rank)
    yield name + "kv_a_proj_with_mqa", (mixer.kv_rank + mixer.rope_dim, hidden)
    yield name + "kv_a_layernorm", (mixer.kv_rank,)
    up_rows = mixer.n_heads * (mixer.nope_dim + mixer.v_dim)
    yield name + "kv_b_proj", (up_rows, mixer.kv_rank)
    yield name + "o_proj", (hidden, mixer.n_heads * mixer.v_dim)
    if mixer.indexer is not None and mixer.q_rank is not None:
        yield from _indexer(name + "indexer.", mixer.indexer, hidden, mixer.q_rank)


def _indexer(name: str, indexer: Indexer, hidden: int, q_rank: int) -> Shapes:
    yield name + "wq_b", (indexer.n_heads * indexer.head_dim, q_rank)
    yield name + "wk", (indexer.head_dim, hidden)
    yield name + "k_norm", (indexer.head_dim,)
    yield name + "k_norm.bias", (indexer.head_dim,)
    yield name + "weights_proj", (indexer.n_heads, hidden)


def _gqa(name: str, mixer: Gqa, hidden: int) -> Shapes:
    queries, keys = mixer.n_heads * mixer.head_dim, mixer.n_keys * mixer.head_dim
    products = 2 * queries if mixer.out_gate else queries
    for part, width in (("q_proj", products), ("k_proj", keys), ("v_proj", keys)):
        yield name + part, (width, hidden)
        if mixer.has_bias:
            yield name + part + ".bias", (width,)
    if mixer.qk_norm is not QkNorm.NONE:
        full = mixer.qk_norm is QkNorm.FULL
        yield name + "q_norm", (queries if full else mixer.head_dim,)
        yield name + "k_norm", (keys if full else mixer.head_dim,)
    if mixer.has_sinks:
        yield name + "sinks", (mixer.n_heads,)
    yield name + "o_proj", (hidden, queries)
    if mixer.out_bias:
        yield name + "o_proj.bias", (hidden,)


def _gdn(name: str, mixer: Gdn, hidden: int) -> Shapes:
    values = mixer.n_values * mixer.value_dim
    if mixer.fused:
        yield name + "in_proj_qkvz", (mixer.channels + values, hidden)
        yield name + "in_proj_ba", (2 * mixer.n_values, hidden)
    else:
        yield name + "in_proj_qkv", (mixer.channels, hidden)
        yield name + "in_proj_z", (values, hidden)
        yield name + "in_proj_b", (mixer.n_values, hidden)
        yield name + "in_proj_a", (mixer.n_values, hidden)
    yield name + "conv1d", (mixer.channels, 1, mixer.kernel)
    yield name + "A_log", (mixer.n_values,)
    yield name + "dt_bias", (mixer.n_values,)
    yield name + "norm", (mixer.value_dim,)
    yield name + "out_proj", (hidden, values)


def _moe(name: str, ffn: MoeFfn, hidden: int, *, vocab: int = 0) -> Shapes:
    n_experts, n_choices = ffn.router.n_experts, ffn.router.n_choices
    yield name + ffn.router_name, (n_choices, hidden)
    if ffn.router.logit_bias:
        yield name + ffn.router_name + ".bias", (n_choices,)
    if ffn.router.selection_bias:
        yield name + ffn.bias_name, (n_choices,)
    if ffn.hashed:
        yield f"{name}{ffn.router_name}.{TABLE}", (vocab, ffn.router.top_k)
    if ffn.expert_bias:
        yield name + GATE_UP_BIAS, (n_experts, 2 * ffn.inter)
        yield name + DOWN_BIAS, (n_experts, hidden)
    if ffn.shared_inter:
        yield from _mlp(name + ffn.shared_name, hidden, ffn.shared_inter, ffn.projections)
    if ffn.shared_gate:
        yield name + "shared_expert_gate", (1, hidden)


def _mlp(name: str, hidden: int, inter: int, parts: tuple[str, str, str] = PROJECTIONS) -> Shapes:
    gate, up, down = parts
    yield name + gate, (inter, hidden)
    yield name + up, (inter, hidden)
    yield name + down, (hidden, inter)
