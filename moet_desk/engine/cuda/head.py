"""The MTP head on a device: its weights, and its launches for a step's rows.

The twin is engine/mtp. A prompt's rows go through `cuda.prefill.ChunkModel.read_head`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.engine.cuda.blocks import Branch, Experts, LayerLaunches
from moet_desk.engine.cuda.buffers import MAX_ROWS, StepBuffers
from moet_desk.engine.cuda.dense_weights import SCALE_BLOCK, DenseSource
from moet_desk.engine.spec import Layer, Spec
from moet_desk.kernels.triton.dense import gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.prepare import Rotation


class HeadLaunches:
    """The head's layer and what leads into it and out of it.

    Args:
        spec: the model; layer: its `mtp`.
        load: reads the weights.
        branch: of the shared expert.
    """

    def __init__(self, spec: Spec, layer: Layer, load: DenseSource, *, branch: Branch) -> None:
        name = f"model.layers.{layer.index}."
        self.token_norm, self.hidden_norm = load.norm(name + "enorm"), load.norm(name + "hnorm")
        joined = load.matrix(name + "eh_proj")
        self.w_token, self.w_hidden = halves(joined)
        n_moe = len(spec.main_moe_layers)
        self.layer = LayerLaunches(layer, load, moe_layer=n_moe, branch=branch)
        self.final_norm = load.norm(name + "shared_head.norm")
        device = joined.values.device
        self.states = torch.zeros((MAX_ROWS, spec.hidden), dtype=torch.float32, device=device)

    def launch(
        self, b: StepBuffers, rows: int, *, eps: float, rotation: Rotation, kv: KvPages,
        lengths: Tensor, experts: Experts,
    ) -> None:  # fmt: skip
        """x becomes the head's output before its norm; x holds the tokens' vectors before, and
        `states` what the model knew at the tokens before them.
        """
        t = slice(0, rows)
        rms_norm(b.x[t], self.token_norm, eps, out=b.normed[t])
        gemv(b.normed[t], self.w_token, b.x[t])
        rms_norm(self.states[t], self.hidden_norm, eps, out=b.normed[t])
        gemv(b.normed[t], self.w_hidden, b.x[t], residual=b.x[t])
        self.layer.launch(
            b, rows, eps=eps, rotation=rotation, kv=kv, lengths=lengths, experts=experts
        )


def halves(joined: DenseWeight) -> tuple[DenseWeight, DenseWeight]:
    """A weight over two inputs side by side as a weight over each: their products add up.

    Raises:
        ValueError: a block of scales lies across the middle.
    """
    width, weight = joined.k // 2, joined.values
    parts = weight[:, :width].contiguous(), weight[:, width:].contiguous()
    if joined.scales is None:
        return DenseWeight(parts[0]), DenseWeight(parts[1])
    if joined.scale_rows == 1:
        return DenseWeight(parts[0], joined.scales), DenseWeight(parts[1], joined.scales)
    if width % SCALE_BLOCK:
        raise ValueError(f"blocks of {SCALE_BLOCK} scales do not meet at {width}")
    middle = width // SCALE_BLOCK
    scales = joined.scales[:, :middle].contiguous(), joined.scales[:, middle:].contiguous()
    return DenseWeight(parts[0], scales[0]), DenseWeight(parts[1], scales[1])
