"""What a model is, as plain numbers: the record every block is built from.

A family (engine/families) makes a `Spec` once from config.json; after that nothing in the engine
asks for a model's name. Every variation is a field of one record, not a new class
(docs/design/overview.md). No torch here, so the packer and the planner can use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from moet_desk.kernels.kinds import SWIGLU, Glu, KvFormat, RopeScaling, Score
from moet_desk.kernels.kv_sizes import (
    DELTA_RING,
    POOL_STATES,
    gqa_entry_bytes,
    mla_entry_bytes,
    pooled_key_bytes,
    shared_entry_bytes,
    window_ring,
)

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The usual names of the matrices of an expert: gate, up and down."""

STATES_KEPT = 3
"""Most states that a sequence keeps of a layer with one, to go back to (`engine.recurrent`)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over `dim` numbers of a head."""

    dim: int
    base: float
    interleaved: bool
    yarn: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the `top_k` tokens that latent attention looks at (DeepSeek-V3.2).

    Every token has one key of `head_dim` numbers and `n_heads` queries, which are made of the query
    latent. Of both, as many numbers rotate as in the attention, by the same angles.
    """

    n_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (arXiv 2405.04434). `q_rank` None: no query latent.

    With an `indexer` a token sees only what that chooses. With `reuses_choice` it sees what the
    nearest layer before with an indexer chose.
    The normed latents are multiplied by `q_gain` and `kv_gain`, the second before it is stored.
    """

    n_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    latent_eps: float
    rope: Rope
    indexer: Indexer | None = None
    reuses_choice: bool = False
    q_gain: float = 1.0
    kv_gain: float = 1.0

    def entry_bytes(self, form: KvFormat) -> int:
        """KV bytes of a token in one layer."""
        return mla_entry_bytes(form, self.kv_rank, self.rope_dim)


class QkNorm(Enum):
    """Over what queries and keys get an RMS norm before they are rotated."""

    NONE = "none"
    HEAD = "head"  # each head by itself, one weight for all
    FULL = "full"  # all heads of a token together


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention: `n_heads` query heads share `n_keys` heads of keys and values.

    Of each head the first `rope.dim` numbers rotate. `has_bias` is of queries, keys and values,
    `out_bias` of the product behind the heads. With `out_gate`, each query head brings as many
    numbers more, whose sigmoid multiplies the head's output. With `window`, a token sees that many
    tokens, itself included; with `has_sinks`, each head has one more logit, which takes probability
    and gives nothing.
    """

    n_heads: int
    n_keys: int
    head_dim: int
    has_bias: bool
    qk_norm: QkNorm
    norm_eps: float
    softmax_scale: float
    rope: Rope
    out_bias: bool = False
    has_sinks: bool = False
    window: int | None = None
    out_gate: bool = False

    def entry_bytes(self, form: KvFormat) -> int:
        """KV bytes of a token in one layer."""
        return gqa_entry_bytes(form, self.n_keys, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class Gdn:
    """Gated DeltaNet: a state of fixed size instead of entries (arXiv 2412.06464).

    Each of `n_keys` heads of queries and keys serves `n_values / n_keys` heads of values in a row;
    before that, a causal convolution of `kernel` tokens. `fused`: files hold the products of the
    input joined, one block per head of keys.
    """

    n_keys: int
    n_values: int
    key_dim: int
    value_dim: int
    kernel: int
    norm_eps: float
    fused: bool

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.n_keys * self.key_dim + self.n_values * self.value_dim

    def state_bytes(self, form: KvFormat) -> int:
        """Of a sequence in one layer, float32 whatever the format of KV."""
        return 4 * (self._matrix + (self.kernel - 1) * self.channels)

    @property
    def slot_bytes(self) -> int:
        """Of a sequence in one layer on a card (`kernels.triton.delta`): one state, and rings of
        inputs, keys, changes and decays.
        """
        added = self.n_keys * self.key_dim + self.n_values * (self.value_dim + 1)
        return 4 * (self._matrix + DELTA_RING * (self.channels + added))

    @property
    def _matrix(self) -> int:
        return self.n_values * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class Rings:
    """Layers with a window, whose pages a sequence takes in turn: entry p lies in page
    `p // page_tokens` modulo their number.

    Attributes:
        layers: their places among the layers that store.
        window: tokens that a token sees, itself included.
        pages: of a sequence; they hold the window, and the most tokens that are stored before all
            of them have looked.
        sequences: most of them.
    """

    layers: tuple[int, ...]
    window: int
    pages: int
    sequences: int


@dataclass(frozen=True, slots=True)
class PoolIndexer:
    """Chooses the `top_k` pooled entries that a token sees; its keys are pooled like them."""

    n_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Pool:
    """One pooled entry per `ratio` tokens, seen by the tokens from its last one on.

    With an `indexer`, an entry also has a share of the window before its own, and a token sees the
    entries that the indexer chose; without, all of them.
    """

    ratio: int
    indexer: PoolIndexer | None


@dataclass(frozen=True, slots=True)
class PooledAttention:
    """Attention with one head of `head_dim` numbers that is key and value of all query heads
    (DeepSeek-V4).

    Of a head the last `rope.dim` numbers rotate. A token sees `window` tokens, itself included,
    and pooled entries behind them; a layer without `pool` has the window alone. The output goes
    through `out_groups` low-rank products of groups of heads.
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

    def entry_bytes(self, form: KvFormat) -> int:
        """Bytes of an entry, of a token or pooled."""
        return shared_entry_bytes(form, self.head_dim, self.rope.dim)

    def token_bytes(self, form: KvFormat) -> Fraction:
        """Bytes that grow with each token in one layer."""
        if self.pool is None:
            return Fraction(0)
        n_bytes = self.entry_bytes(form)
        if self.pool.indexer is not None:
            n_bytes += pooled_key_bytes(form, self.pool.indexer.head_dim)
        return Fraction(n_bytes, self.pool.ratio)

    @property
    def open_numbers(self) -> int:
        """Sums of the windows that are not closed, float32."""
        if self.pool is None:
            return 0
        if self.pool.indexer is None:
            return 3 * self.head_dim
        return 9 * (self.head_dim + self.pool.indexer.head_dim)  # of two parts, and the one before

    def state_bytes(self, form: KvFormat) -> int:
        """Of a sequence in one layer: what is seen of the tokens before the next, and the sums."""
        return (self.window - 1) * self.entry_bytes(form) + 4 * self.open_numbers

    def slot_bytes(self, form: KvFormat) -> int:
        """Of a sequence in one layer on a card: a ring of entries, and sums at several lengths."""
        ring = window_ring(self.window) * self.entry_bytes(form)
        return ring + 4 * POOL_STATES * self.open_numbers


Attention = Mla | Gqa
"""Attention that stores an entry of each token. All such layers of a model have the same one, but
for the window.
"""

Stateful = Gdn | PooledAttention
"""Mixers that keep a state of fixed size of a sequence (`engine.recurrent`)."""

Mixer = Attention | Stateful
"""How tokens of one sequence see each other."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Hyper-connections: `n` residual streams, mixed by a matrix that Sinkhorn steps balance
    (arXiv 2409.19606).
    """

    n: int
    sinkhorn_steps: int
    eps: float


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Tables with a row for each n-gram that ends at a token, beside the embedding (arXiv
    2601.21204).

    For each size of 2 to `longest` tokens there are `splits` tables. A row's number is that of the
    n-gram in base `Spec.vocab` modulo the table's rows, which differ by two from table to table. An
    n-gram does not reach over an `end` token, nor before the first one: what it lacks counts as 0.
    """

    longest: int
    splits: int
    least_rows: int
    width: int
    end: int

    @property
    def n_tables(self) -> int:
        """Of all sizes; those of bigrams come first."""
        return self.splits * (self.longest - 1)

    def rows(self, table: int) -> int:
        """Rows of a table."""
        return self.least_rows + 2 * table

    def size(self, table: int) -> int:
        """Tokens of the n-grams that a table is of."""
        return 2 + table // self.splits


def indexer_of(spec: Spec) -> Indexer | None:
    """The indexer of a model with sparse latent attention; all that it has are equal."""
    attention = spec.attention
    return attention.indexer if isinstance(attention, Mla) else None


def dense_widths(spec: Spec) -> list[int]:
    """Inner widths of the dense parts, the MTP head's too."""
    layers = spec.layers if spec.mtp is None else (*spec.layers, spec.mtp)
    parts = [part for layer in layers for part in (layer.ffn, layer.around)]
    return [part.inter for part in parts if isinstance(part, DenseFfn)]


@dataclass(frozen=True, slots=True)
class Router:
    """How the experts of a token are chosen. The selection bias never enters the weights, a bias on
    the logits does.

    Ids from `n_experts` on, `n_identity` of them, are identity experts: chosen like others, they
    give their input, have no weights and are never looked up.
    """

    n_experts: int
    top_k: int
    score: Score
    selection_bias: bool
    n_groups: int
    kept_groups: int
    renormalize: bool
    scale: float
    logit_bias: bool = False
    n_identity: int = 0

    @property
    def n_choices(self) -> int:
        """Scores of a token: of experts with weights and of identity experts."""
        return self.n_experts + self.n_identity

    @property
    def mean_used(self) -> float:
        """Experts with weights that a token uses on average, if all choices are as likely."""
        return self.top_k * self.n_experts / self.n_choices


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """A plain SwiGLU feed-forward layer of inner width `inter`."""

    inter: int


@dataclass(frozen=True, slots=True)
class MoeFfn:
    """Routed experts, plus one shared expert of width `shared_inter` (0: none).

    `name` is what its tensors are called below the layer, `router_name` and `bias_name` the router
    and the selection bias below that. `expert_bias`: both products of an expert have one, stored
    for all experts together. `shared_gate`: a sigmoid of the input weighs the shared expert, which
    has the experts' activation. `projections`: what gate, up and down are called. `hashed`: a table
    gives the experts of each token id, so they are known before the layer runs.
    """

    router: Router
    inter: int
    shared_inter: int
    name: str = "mlp."
    router_name: str = "gate"
    glu: Glu = SWIGLU
    expert_bias: bool = False
    bias_name: str = "gate.e_score_correction_bias"
    shared_name: str = "shared_experts."
    shared_gate: bool = False
    projections: tuple[str, str, str] = PROJECTIONS
    hashed: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `index` is the model's own layer number, used in tensor names.

    With `around`, the layer has two attentions, each with KV of its own, and a dense part of that
    width behind each; `ffn` reads what the first dense part reads and is added at the end
    (shortcut-connected experts, arXiv 2509.01322).
    """

    index: int
    mixer: Mixer
    ffn: DenseFfn | MoeFfn
    around: DenseFfn | None = None

    @property
    def n_mixers(self) -> int:
        """Attentions of the layer: so many layers of the KV cache are its own."""
        return 1 if self.around is None else 2


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole model. `mtp` is the layer of the multi-token-prediction head, if it is shipped.
    `norm_offset` is added to the weights of all norms but those inside of a Gdn. With `streams`, a
    token has that many residual streams instead of one. With `ngrams`, what goes into the first
    layer is the mean of the token's vector and of those of the n-grams that end there.
    """

    model_type: str
    vocab: int
    hidden: int
    context: int
    norm_eps: float
    tied_head: bool
    layers: tuple[Layer, ...]
    mtp: Layer | None
    norm_offset: float = 0.0
    streams: Streams | None = None
    ngrams: Ngrams | None = None

    @property
    def attention(self) -> Attention | PooledAttention:
        """What stores entries: of the first such layer."""
        for layer in self.layers:
            if not isinstance(layer.mixer, Gdn):
                return layer.mixer
        raise ValueError("a model without attention")

    @property
    def recurrent(self) -> tuple[Stateful, ...]:
        """Mixers with a state, in the order of their layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Stateful))

    @property
    def delta(self) -> tuple[Gdn, ...]:
        """Those of gated DeltaNets."""
        return tuple(mixer for mixer in self.recurrent if isinstance(mixer, Gdn))

    @property
    def n_kv_layers(self) -> int:
        """Layers of the KV cache, without the MTP head's: of attention that stores an entry of each
        token.
        """
        return sum(layer.n_mixers for layer in self.layers if not isinstance(layer.mixer, Stateful))

    @property
    def window(self) -> int:
        """Of the layers with one, which must be equal; 0: no layer has one."""
        mixers = (layer.mixer for layer in self.layers)
        windows = {mixer.window or 0 for mixer in mixers if isinstance(mixer, Gqa)} - {0}
        if len(windows) > 1:
            raise ValueError(f"windows of {sorted(windows)} tokens in one model")
        return next(iter(windows), 0)

    @property
    def moe_ffn(self) -> MoeFfn:
        """The routed feed-forward part; all MoE layers of a model have equal shapes."""
        for layer in self.layers:
            if isinstance(layer.ffn, MoeFfn):
                return layer.ffn
        raise ValueError("a model without routed experts")

    @property
    def main_moe_layers(self) -> tuple[int, ...]:
        """Model layer numbers of the MoE layers that run for every token."""
        return tuple(layer.index for layer in self.layers if isinstance(layer.ffn, MoeFfn))

    @property
    def n_named(self) -> int:
        """Layers that run for every token and whose experts a table of token ids names."""
        ffns = (layer.ffn for layer in self.layers)
        return sum(isinstance(ffn, MoeFfn) and ffn.hashed for ffn in ffns)

    @property
    def moe_layers(self) -> tuple[Layer, ...]:
        """Layers with routed experts in pack order: the main ones, then the MTP head's."""
        every = self.layers if self.mtp is None else (*self.layers, self.mtp)
        return tuple(layer for layer in every if isinstance(layer.ffn, MoeFfn))
