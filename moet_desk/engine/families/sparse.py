"""DeepSeek Sparse Attention in a config: the indexer, and which layers have one of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.spec import Indexer, Layer, Mla

INDEX_KEYS = frozenset(
    "index_n_heads index_head_dim index_topk indexer_rope_interleave layer_types"
    " mlp_layer_types partial_rotary_factor".split()
)
"""Keys that both families have beside those of DeepSeek-V3."""

OWN, REUSED = "full", "shared"

_OLDER_NAME = "deepseek_sparse_attention"
"""What older versions of transformers write for "indexed_attention"."""


def with_indexer(keys: Keys, mixer: Mla, *, interleaved: bool) -> Mla:
    """Latent attention with an indexer; `interleaved` if the file does not say it."""
    if mixer.q_rank is None:
        raise keys.wrong("q_lora_rank is missing, an indexer is fed by the query latent")
    head_dim = keys.multiple("index_head_dim", of=4)
    if head_dim < mixer.rope_dim:
        raise keys.wrong(f"index_head_dim is {head_dim}, but {mixer.rope_dim} numbers rotate")
    indexer = Indexer(
        n_heads=keys.count("index_n_heads"),
        head_dim=head_dim,
        top_k=keys.count("index_topk"),
        interleaved=keys.flag("indexer_rope_interleave", default=interleaved),
    )
    return replace(mixer, indexer=indexer)


def check_layers(keys: Keys, kinds: Sequence[str]) -> None:
    """See that lists that name each layer say the same as the rest; `kinds` dense or sparse."""
    keys.want("mlp_layer_types", list(kinds))
    named = keys.get("layer_types")
    older = isinstance(named, list) and named[:1] == [_OLDER_NAME]
    keys.want("layer_types", [_OLDER_NAME if older else "indexed_attention"] * len(kinds))
    keys.want("partial_rotary_factor", 1.0)


def reusing(layers: Iterable[Layer], kinds: Iterable[str]) -> list[Layer]:
    """The layers, those of kind "shared" without an indexer: they reuse the choice before them."""
    return [
        replace(layer, mixer=replace(layer.mixer, indexer=None, reuses_choice=True))
        if kind == REUSED and isinstance(layer.mixer, Mla)
        else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]
