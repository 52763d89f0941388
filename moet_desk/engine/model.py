"""The model: embedding, decoder layers, final norm and head, built from a `Spec`.

One forward for everything: a decode row is the case of one token, a prompt chunk of many. Rows of a
decode step go through one by one, because a matrix product of one row and of three rounds
differently in BLAS; so a row's result cannot depend on what runs beside it (design §1).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from moet_desk.engine.blocks.ffn import Experts
from moet_desk.engine.blocks.layer import Block, Place
from moet_desk.engine.blocks.ngrams import NgramEmbedding
from moet_desk.engine.blocks.shortcut import ShortcutBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Gdn, MoeFfn, Rope, Spec
from moet_desk.kernels.reference import linear, rms_norm, rope_frequencies


class RopeTable:
    """cos and sin of every position, made once. Shapes: [positions, dim / 2] float32."""

    def __init__(self, rope: Rope, positions: int) -> None:
        inv_freq, magnitude = rope_frequencies(rope.dim, rope.base, rope.yarn)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inv_freq)
        self.cos, self.sin = angles.cos() * magnitude, angles.sin() * magnitude


class Model:
    """A loaded model: float32 dense weights on the CPU, experts elsewhere (`Experts`)."""

    def __init__(self, spec: Spec, weights: Weights, *, context: int) -> None:
        self.spec = spec
        weights = replace(weights, norm_offset=spec.norm_offset)
        self._embedding = weights("model.embed_tokens")  # [V, H]
        self._head = self._embedding if spec.tied_head else weights("lm_head")
        self._ngrams: NgramEmbedding | None = None
        if spec.ngrams is not None:
            self._ngrams = NgramEmbedding(spec.ngrams, spec.vocab, weights)
        self._final_norm = weights.norm("model.norm")
        self._rope = RopeTable(spec.attention.rope, context)
        self._blocks: list[Block | ShortcutBlock] = []
        n_kv = n_moe = n_states = 0
        for layer in spec.layers:
            below = weights.below(f"model.layers.{layer.index}.")
            has_state = isinstance(layer.mixer, Gdn)
            kind = Block if layer.around is None else ShortcutBlock
            at = n_states if has_state else n_kv
            self._blocks.append(kind(layer, below, kv_layer=at, moe_layer=n_moe))
            n_kv += 0 if has_state else layer.n_mixers
            n_moe += isinstance(layer.ffn, MoeFfn)
            n_states += has_state

    def forward(self, ids: Tensor, kv: KvCache, sequence: KvSequence, experts: Experts) -> Tensor:
        """Hidden states of new tokens, their KV stored and `sequence.length` moved on.

        Shapes:
            ids [T] int64; returns [T, H] float32, after the final norm
        """
        reading = self.layers(ids, kv, sequence, experts)
        while True:
            try:
                next(reading)
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def layers(
        self, ids: Tensor, kv: KvCache, sequence: KvSequence, experts: Experts
    ) -> Generator[None, None, Tensor]:
        """`forward` with a stop behind each layer; it returns the hidden states at the end, and
        `sequence.length` has not moved before that.
        """
        start, n_tokens = sequence.length, ids.shape[0]
        at = self.place(n_tokens, kv, sequence)
        x = self._first(ids, sequence)
        for block in self._blocks:
            x = block(x, at, experts)
            yield
        sequence.length, sequence.choice = start + n_tokens, None
        return rms_norm(x, self._final_norm, at.eps)

    def _first(self, ids: Tensor, sequence: KvSequence) -> Tensor:
        """What goes into the first layer, [T, H]: vectors of the tokens, and of n-grams if there
        are such. Raises as `NgramEmbedding`.
        """
        x = self.embed(ids)
        if self._ngrams is None:
            return x
        sequence.remember(sequence.length, ids.tolist())
        return self._ngrams(x, sequence.tokens)

    def embed(self, ids: Tensor) -> Tensor:
        """Vectors of tokens: ids [T] int64 -> [T, H] float32."""
        return self._embedding[ids]

    def place(self, n_tokens: int, kv: KvCache, sequence: KvSequence) -> Place:
        """Where the next tokens of a sequence stand."""
        here = slice(sequence.length, sequence.length + n_tokens)
        return Place(self._rope.cos[here], self._rope.sin[here], kv, sequence, self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: hidden [T, H] -> [T, V] float32."""
        return linear(hidden, self._head)
