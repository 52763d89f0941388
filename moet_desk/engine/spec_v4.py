"""What a DeepSeek-V4 model is beside the common `Spec`: streams, pooled attention, hashed routing.

No torch here, like `spec`. The engine does not run these yet; `families.deepseek_v4` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moet_desk.engine.spec import MoeFfn, Rope


@dataclass(frozen=True, slots=True)
class Streams:
    """Hyper-connections: `n` residual streams, mixed by a matrix that Sinkhorn steps balance."""

    n: int
    sinkhorn_steps: int
    eps: float


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the `top_k` pooled entries that a token of a layer sees."""

    n_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Pool:
    """One pooled entry per `ratio` tokens.

    With `overlap` an entry also has a share of the window before its own, and `indexer` chooses
    among the entries; without, every closed entry is seen.
    """

    ratio: int
    overlap: bool
    indexer: Indexer | None


@dataclass(frozen=True, slots=True)
class PooledAttention:
    """Attention with one head of `head_dim` numbers that is key and value of all query heads.

    Of a head the last `rope.dim` numbers rotate. A token sees `window` tokens, itself included,
    and pooled entries behind them; a layer without `pool` has the window alone.
    """

    n_heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    norm_eps: float
    softmax_scale: float
    rope: Rope
    pool: Pool | None


@dataclass(frozen=True, slots=True)
class V4Layer:
    """One layer. `hashed`: a table gives the experts of each token id, so they are known before
    the layer runs.
    """

    index: int
    mixer: PooledAttention
    ffn: MoeFfn
    hashed: bool


@dataclass(frozen=True, slots=True)
class V4Spec:
    """A whole model. `mtp` is the layer of the multi-token-prediction head, if it is shipped."""

    vocab: int
    hidden: int
    context: int
    norm_eps: float
    streams: Streams
    layers: tuple[V4Layer, ...]
    mtp: V4Layer | None
