"""transformers' MTP head of a model with sparse attention; its own `MtpModel` cannot make one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.tiny_models import randomize


class SparseHead(nn.Module):
    """One layer of the model's class, with an indexer, behind what joins token and state.

    As far as `test_mtp_parity`'s helpers use `MtpModel`, this is one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.mlp_layer_types = 1, ["sparse"]
        config.layer_types, config.indexer_types = ["indexed_attention"], ["full"]
        base = model.model
        decoder, norm = type(base.layers[-1]), type(base.norm)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        layer = nn.Module()
        layer.enorm, layer.hnorm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        layer.mtp_block = decoder(config, 0)
        layer.post_norm = norm(hidden, eps=eps)
        self.layers = nn.ModuleList([layer])
        self._base = [model]  # in a list, so that it is no part of the state

    def forward_layer(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """States behind tokens: ids [1, T], hidden [1, T, H], positions [1, T] -> [1, T, H]."""
        base, layer = self._base[0].model, self.layers[0]
        token = base.embed_tokens(ids)
        x = layer.eh_proj(torch.cat([layer.enorm(token), layer.hnorm(hidden)], -1))
        n_tokens = ids.shape[1]
        mask = torch.full((n_tokens, n_tokens), float("-inf")).triu(1)[None, None]
        angles = base.rotary_emb(x, position_ids=positions)
        found = layer.mtp_block(
            x, attention_mask=mask, position_embeddings=angles, position_ids=positions
        )
        states: Tensor = layer.post_norm(found[0] if isinstance(found, tuple) else found)
        return states


def random_head(model: Any) -> SparseHead:
    """A head whose weights are all random."""
    head = SparseHead(model).eval().float()
    randomize(head.layers[0], model.config.initializer_range)
    return head
