"""Attention over a short window and pooled entries behind it, over the state and pages of one
sequence (DeepSeek-V4).

One vector is key and value of all heads. A token sees the last tokens' own entries and pooled ones:
all closed windows of them, or those that an indexer chose. What was added up of the windows that
are open, and the last tokens' entries, are the state. Of several tokens the last one is read by
itself, so that the state before it is known: reading the newest token again starts there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.recurrent import PoolState
from moet_desk.engine.spec import Pool, PooledAttention, PoolIndexer
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference import (
    OpenWindow,
    choose,
    grouped_output,
    index_rounded,
    index_scores,
    linear,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    shared_attention,
    shared_read,
    shared_write,
    unit,
)

_BLOCK_FLOATS = 1 << 24
"""Most scores of all heads held at once."""


class _Turn:
    """Rotation of the last numbers of vectors by the angles of their positions."""

    def __init__(self, mixer: PooledAttention) -> None:
        rope = mixer.rope
        self._frequencies, self._magnitude = rope_frequencies(rope.dim, rope.base, rope.yarn)
        self._dim, self._interleaved = rope.dim, rope.interleaved

    def __call__(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """x [T, D] or [T, N, D], positions [T]; `back` undoes it."""
        cos, sin = rope_tables(positions, self._frequencies, self._magnitude)
        if back:
            sin = -sin
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        turned = rotate(x[..., -self._dim :], cos, sin, interleaved=self._interleaved)
        return torch.cat([x[..., : -self._dim], turned], -1)


class _Compressor:
    """Makes pooled entries of `dim` numbers out of tokens."""

    def __init__(self, weights: Weights, turn: _Turn, norm_eps: float) -> None:
        self._places = weights("ape")  # [ratio, D]
        self._norm, self._eps, self._turn = weights("norm"), norm_eps, turn

    def read(self, joined: Tensor, start: int, window: OpenWindow) -> tuple[OpenWindow, Tensor]:
        """The state behind tokens from position `start` on, and the entries they close, rotated.

        Shapes:
            joined [T, 2 D]; returns entries [n, D]
        """
        values, logits = joined.chunk(2, -1)
        positions = torch.arange(start, start + len(joined))
        window, means = window.read(values, logits + self._places[positions % window.ratio])
        if not len(means):
            return window, means
        first = start // window.ratio
        at = torch.arange(first, first + len(means)) * window.ratio
        return window, self._turn(rms_norm(means, self._norm, self._eps), at)


class _PoolIndexer:
    """Its keys' compressor, and its choice among closed windows."""

    def __init__(
        self, indexer: PoolIndexer, pool: Pool, weights: Weights, turn: _Turn, norm_eps: float
    ) -> None:
        self._indexer, self._turn, self._ratio = indexer, turn, pool.ratio
        self.compressor = _Compressor(weights.below("compressor."), turn, norm_eps)
        self._w_query = weights("wq_b")

    def choose(
        self, heads: Tensor, latent: Tensor, keys: Tensor, start: int, *, rounds: bool
    ) -> Tensor:
        """Which of the windows tokens look at, of those closed for them.

        Shapes:
            heads [T, N], latent [T, r_q], keys [S, D]; returns [T, S] bool
        """
        indexer, n_tokens = self._indexer, len(heads)
        queries = linear(latent, self._w_query).view(n_tokens, indexer.n_heads, -1)
        positions = torch.arange(start, start + n_tokens)
        queries = self._turn(queries, positions)
        if rounds:
            queries = index_rounded(queries)
        # both scales are positive, so they can be taken out of the relu
        weights = heads * (indexer.n_heads * indexer.head_dim) ** -0.5
        seen = ((positions + 1) // self._ratio).clamp_(max=len(keys))
        return choose(index_scores(queries, keys, weights, seen), indexer.top_k)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Entries of the chunk's own windows.

    Attributes:
        near: entries of tokens from position `first` on, [S, D].
        n_pooled: closed windows behind the last token.
        chosen: of them, [T, n_pooled] bool; None: all that are closed for a token.
    """

    near: Tensor
    first: int
    n_pooled: int
    chosen: Tensor | None


class PooledBlock:
    """The mixer of one layer. `layer` is its place among the layers with a state."""

    def __init__(self, mixer: PooledAttention, weights: Weights, *, layer: int) -> None:
        self._mixer, self._layer = mixer, layer
        self._turn = _Turn(mixer)
        self._q_norm, self._kv_norm = weights("q_norm"), weights("kv_norm")
        self._w_q = weights("wq_b")
        self._sinks = weights("attn_sink")
        self._w_out = weights("wo_a"), weights("wo_b")
        self._compressor: _Compressor | None = None
        self._indexer: _PoolIndexer | None = None
        inputs = [weights("wq_a"), weights("wkv")]
        pool, eps = mixer.pool, mixer.norm_eps
        if pool is not None:
            below = weights.below("compressor.")
            self._compressor = _Compressor(below, self._turn, eps)
            inputs.append(_pooling(below))
            if pool.indexer is not None:
                below = weights.below("indexer.")
                self._indexer = _PoolIndexer(pool.indexer, pool, below, self._turn, eps)
                inputs += [_pooling(below.below("compressor.")), below("weights_proj")]
        # one product for everything that reads the input
        self._w_in, self._widths = torch.cat(inputs), [len(w) for w in inputs]

    def __call__(self, x: Tensor, kv: KvCache, sequence: KvSequence) -> Tensor:
        """Attend from the tokens behind `sequence.length` to themselves and everything before.

        Shapes:
            x [T, H]; returns [T, H], both float32
        """
        mixer, start, n_tokens = self._mixer, sequence.length, x.shape[0]
        positions = torch.arange(start, start + n_tokens)
        latent, entries, *pooling = torch.split(linear(x, self._w_in), self._widths, -1)
        latent = rms_norm(latent, self._q_norm, mixer.norm_eps)
        entries = self._turn(rms_norm(entries, self._kv_norm, mixer.norm_eps), positions)
        heads = linear(latent, self._w_q).view(n_tokens, mixer.n_heads, -1)
        heads = self._turn(unit(heads, mixer.norm_eps), positions)
        near, first = self._read(entries, pooling, kv, sequence)
        seen = self._seen(near, first, pooling, latent, kv, sequence)
        mixed = torch.cat(
            [
                self._attend(heads[lo:hi], start + lo, lo, seen, kv, sequence)
                for lo, hi in self._parts(seen, n_tokens)
            ]
        )
        mixed = self._turn(mixed, positions, back=True)
        return grouped_output(mixed, *self._w_out, groups=mixer.out_groups)

    # -- the state ---------------------------------------------------------------------------------

    def _read(
        self, entries: Tensor, pooling: list[Tensor], kv: KvCache, sequence: KvSequence
    ) -> tuple[Tensor, int]:
        """Take the tokens in; returns their entries as they are kept, behind those of the tokens
        before that are seen, and the position of the first.
        """
        mixer, start, n_tokens = self._mixer, sequence.length, len(entries)
        state = sequence.states.at(
            self._layer, start, PoolState, lambda: PoolState.empty(mixer, kv.form)
        )
        kept = {start: state}
        near = torch.cat([state.tail, shared_write(entries, kv.form, mixer.rope.dim)])
        first = start - len(state.tail)
        for part in (slice(0, n_tokens - 1), slice(n_tokens - 1, n_tokens)):
            if part.start < part.stop:
                at, behind = start + part.start, start + part.stop
                pooled, index = self._pool(state, [p[part] for p in pooling], at, kv, sequence)
                tail = near[max(0, behind - first - mixer.window + 1) : behind - first]
                state = PoolState(tail, pooled, index)
                kept[behind] = state
        sequence.states.put(self._layer, kept)
        return shared_read(near, kv.form, mixer.head_dim, mixer.rope.dim), first

    def _pool(
        self,
        state: PoolState,
        pooling: list[Tensor],
        start: int,
        kv: KvCache,
        sequence: KvSequence,
    ) -> tuple[OpenWindow | None, OpenWindow | None]:
        """Read tokens from position `start` on into the open windows; closed ones are stored."""
        pooled, index, keys = state.pooled, state.index, None
        if self._compressor is None or pooled is None:
            return None, None
        after, entries = self._compressor.read(pooling[0], start, pooled)
        if self._indexer is not None and index is not None:
            index, keys = self._indexer.compressor.read(pooling[1], start, index)
        if len(entries):
            kv.write_pooled(self._layer, sequence, start // pooled.ratio, entries, keys)
        return after, index

    # -- what tokens see ---------------------------------------------------------------------------

    def _seen(
        self,
        near: Tensor,
        first: int,
        pooling: list[Tensor],
        latent: Tensor,
        kv: KvCache,
        sequence: KvSequence,
    ) -> _Seen:
        pool, start = self._mixer.pool, sequence.length
        if pool is None:
            return _Seen(near, first, 0, None)
        count = (start + len(latent)) // pool.ratio
        if self._indexer is None or pool.indexer is None or count <= pool.indexer.top_k:
            return _Seen(near, first, count, None)
        keys = kv.read_pooled_keys(self._layer, sequence, count)
        rounds = _rounds(kv.form)
        chosen = self._indexer.choose(pooling[2], latent, keys, start, rounds=rounds)
        return _Seen(near, first, count, chosen)

    def _parts(self, seen: _Seen, n_tokens: int) -> list[tuple[int, int]]:
        """Rows that are computed together: one where each sees entries of its own choice."""
        step = 1
        if seen.chosen is None:
            width = self._mixer.n_heads * (self._mixer.window + n_tokens + seen.n_pooled)
            step = max(1, _BLOCK_FLOATS // width)
        return [(lo, min(n_tokens, lo + step)) for lo in range(0, n_tokens, step)]

    def _attend(
        self, heads: Tensor, at: int, row: int, seen: _Seen, kv: KvCache, sequence: KvSequence
    ) -> Tensor:
        """Rows from position `at` on, `row` in the chunk: heads [t, N, D] -> [t, N, D]."""
        mixer, behind = self._mixer, at + len(heads)
        positions = torch.arange(at, behind)[:, None]
        low = max(seen.first, at - mixer.window + 1)
        own = torch.arange(low, behind)
        keys = seen.near[low - seen.first : behind - seen.first]
        mask = (own <= positions) & (own > positions - mixer.window)
        pool = mixer.pool
        if pool is not None and seen.chosen is not None:
            places = seen.chosen[row].nonzero()[:, 0]
            far = kv.read_pooled(self._layer, sequence, seen.n_pooled, places)
            keys, mask = torch.cat([keys, far]), torch.cat([mask, mask.new_ones(1, len(far))], 1)
        elif pool is not None and (count := behind // pool.ratio):
            far = kv.read_pooled(self._layer, sequence, count)
            closed = torch.arange(count) < (positions + 1) // pool.ratio
            keys, mask = torch.cat([keys, far]), torch.cat([mask, closed], 1)
        return shared_attention(heads, keys, mask, self._sinks, scale=mixer.softmax_scale)


def _pooling(weights: Weights) -> Tensor:
    """Products of a compressor's input: values, then logits."""
    return torch.cat([weights("wkv"), weights("wgate")])


def _rounds(form: KvFormat) -> bool:
    """Whether the indexer rounds as the released forward does: where entries are stored so too."""
    return form in (KvFormat.FP8, KvFormat.NVFP4)
