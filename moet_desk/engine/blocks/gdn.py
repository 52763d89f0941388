"""Gated DeltaNet over the state of one sequence (arXiv 2412.06464).

One token takes the recurrence. Of several, all but the last are computed in blocks and the last one
by itself, so that the state before it is known: reading the newest token again starts there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.recurrent import DeltaState
from moet_desk.engine.spec import Gdn
from moet_desk.kernels.reference import (
    causal_conv,
    delta_chunk,
    delta_decay,
    delta_step,
    delta_unit,
    linear,
    rms_norm,
)


class GdnBlock:
    """The mixer of one layer. `layer` is its place among the layers with a state."""

    def __init__(self, mixer: Gdn, weights: Weights, *, layer: int) -> None:
        self._mixer = mixer
        self._layer = layer
        # one product for everything that reads the input: queries, keys, values, gate, beta, decay
        self._w_in = _fused(mixer, weights) if mixer.fused else _apart(weights)
        self._conv = weights("conv1d")[:, 0].contiguous()  # [C, kernel]
        self._a_log, self._dt_bias = weights("A_log"), weights("dt_bias")
        self._norm = weights("norm")
        self._w_out = weights("out_proj")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvCache, sequence: KvSequence
    ) -> Tensor:
        """Mix the tokens behind `sequence.length` with everything before; rope is not used.

        Shapes:
            x [T, H]; returns [T, H], both float32
        """
        mixer, start, n_tokens = self._mixer, sequence.length, x.shape[0]
        values = mixer.n_values * mixer.value_dim
        sizes = [mixer.channels, values, mixer.n_values, mixer.n_values]
        mixed, z, b, a = torch.split(linear(x, self._w_in), sizes, -1)
        decay, beta = delta_decay(a, self._a_log, self._dt_bias), torch.sigmoid(b)
        before = sequence.states.at(self._layer, start, DeltaState, lambda: DeltaState.empty(mixer))
        kept, outputs = {start: before}, []
        for part in (slice(0, n_tokens - 1), slice(n_tokens - 1, n_tokens)):
            if part.start < part.stop:
                out, before = self._mix(mixed[part], decay[part], beta[part], before)
                kept[start + part.stop] = before
                outputs.append(out)
        sequence.states.put(self._layer, kept)
        heads = rms_norm(torch.cat(outputs), self._norm, mixer.norm_eps)  # [T, N, dv]
        gate = torch.nn.functional.silu(z.reshape(heads.shape))
        return linear((heads * gate).flatten(1), self._w_out)

    def _mix(
        self, mixed: Tensor, decay: Tensor, beta: Tensor, state: DeltaState
    ) -> tuple[Tensor, DeltaState]:
        """Tokens [T, C] behind a state: their outputs [T, N, dv], and the state behind them."""
        mixer, n_tokens = self._mixer, mixed.shape[0]
        convolved, tail = causal_conv(mixed, state.tail, self._conv)
        width = mixer.n_keys * mixer.key_dim
        q, k, v = torch.split(convolved, [width, width, mixer.n_values * mixer.value_dim], -1)
        q, k = (delta_unit(part.reshape(n_tokens, mixer.n_keys, -1)) for part in (q, k))
        q = q * mixer.key_dim**-0.5
        times = mixer.n_values // mixer.n_keys
        q, k = (part.repeat_interleave(times, 1) for part in (q, k))
        v = v.reshape(n_tokens, mixer.n_values, -1)
        if n_tokens == 1:
            out, matrix = delta_step(q[0], k[0], v[0], decay[0], beta[0], state.matrix)
            return out[None], DeltaState(matrix, tail)
        out, matrix = delta_chunk(q, k, v, decay, beta, state.matrix)
        return out, DeltaState(matrix, tail)


def _apart(weights: Weights) -> Tensor:
    return torch.cat([weights(f"in_proj_{part}") for part in ("qkv", "z", "b", "a")])


def _fused(mixer: Gdn, weights: Weights) -> Tensor:
    """The same rows out of blocks per head of keys: its query, key, values and gates; its betas and
    decays.
    """
    times = mixer.n_values // mixer.n_keys
    own = times * mixer.value_dim
    joined = _by_head(weights("in_proj_qkvz"), mixer)
    q, k, v, z = torch.split(joined, [mixer.key_dim, mixer.key_dim, own, own], 1)
    b, a = _by_head(weights("in_proj_ba"), mixer).chunk(2, 1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v, z, b, a)])


def _by_head(rows: Tensor, mixer: Gdn) -> Tensor:
    return rows.view(mixer.n_keys, -1, rows.shape[1])
