"""Models of real shape with made-up weights, for measuring a step without 70 GB of files.

Rows are made in the pinned arena (many experts share a place: what is moved counts, not what it
says) and dense weights on the device. The router's bias makes some experts more popular, so that a
pool of the plan's size answers a wanted share of look-ups. Where a family's attention does not
exist yet, the nearest one with equal bytes stands in, and `note` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.families.deepseek_v3 import dense_shapes
from moet_desk.engine.spec import DenseFfn, Layer, Mla, MoeFfn, Rope, Router, Spec
from moet_desk.kernels.kinds import Score
from moet_desk.kernels.triton.dense import DenseWeight

SCALE_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """A named model shape."""

    name: str
    spec: Spec
    note: str


def _mla(*, heads: int, q_rank: int | None, nope: int, value: int, rank: int = 512) -> Mla:
    rope = Rope(dim=64, base=10000.0, interleaved=True)
    scale = (nope + 64) ** -0.5
    return Mla(heads, q_rank, rank, nope, 64, value, scale, 1e-6, rope)


def _spec(
    mixer: Mla, *, hidden: int, layers: int, dense: int, dense_inter: int, experts: int, top_k: int,
    inter: int, shared: int, vocab: int, context: int,
) -> Spec:  # fmt: skip
    router = Router(experts, top_k, Score.SIGMOID, True, 1, 1, True, 1.0)
    moe = MoeFfn(router, inter, shared)
    return Spec(
        model_type="deepseek_v3", vocab=vocab, hidden=hidden, context=context, norm_eps=1e-6,
        tied_head=False, mtp=None,
        layers=tuple(
            Layer(i, mixer, DenseFfn(dense_inter) if i < dense else moe) for i in range(layers)
        ),
    )  # fmt: skip


def shapes(context: int) -> Mapping[str, Shape]:
    """The shapes by name."""
    v4 = _spec(
        _mla(heads=128, q_rank=1024, nope=128, value=128), hidden=4096, layers=43, dense=0,
        dense_inter=0, experts=256, top_k=6, inter=2048, shared=2048, vocab=129280, context=context,
    )  # fmt: skip
    glm = _spec(
        _mla(heads=64, q_rank=2048, nope=192, value=256), hidden=6144, layers=78, dense=3,
        dense_inter=12288, experts=256, top_k=8, inter=2048, shared=2048, vocab=154880,
        context=context,
    )  # fmt: skip
    qwen = _spec(
        _mla(heads=32, q_rank=None, nope=64, value=128), hidden=2048, layers=48, dense=0,
        dense_inter=0, experts=128, top_k=8, inter=768, shared=0, vocab=151936, context=context,
    )  # fmt: skip
    stand_in = "attention: MLA with about the same weight bytes stands in for"
    found = (
        Shape("deepseek-v4-flash", v4, f"{stand_in} V4's window, CSA and HCA layers; no mHC"),
        Shape("glm-5.2", glm, f"{stand_in} MLA with the DSA indexer"),
        Shape("qwen3-30b-a3b", qwen, f"{stand_in} grouped-query attention"),
    )
    return {shape.name: shape for shape in found}


class SyntheticLoader:
    """Dense weights of a spec's shapes, made on the device; the same seed gives the same model.

    Args:
        spec: the model.
        device: where.
        popularity: how much the selection bias falls from each expert to the next, in units of the
            router scores' spread; more makes look-ups hit more.
    """

    def __init__(self, spec: Spec, device: torch.device, *, popularity: float) -> None:
        self._device = device
        self._shapes = dict(dense_shapes(spec))
        self._random = torch.Generator(device=device).manual_seed(0)
        self._popularity = popularity

    def vector(self, name: str) -> Tensor:
        """Norms are one; a selection bias ranks the experts in a random order."""
        (size,) = self._shapes[name]
        if name.endswith("e_score_correction_bias"):
            order = torch.randperm(size, generator=self._random, device=self._device)
            return order.float() * (-self._popularity)
        return torch.ones(size, device=self._device)

    def matrix(self, *names: str) -> DenseWeight:
        """FP8 with unit-gain scales; the router in float32, its scores spread over 0..1."""
        rows = sum(self._shapes[name][0] for name in names)
        width = self._shapes[names[0]][1]
        values = torch.randn(rows, width, generator=self._random, device=self._device)
        if names[0].endswith("mlp.gate"):
            return DenseWeight(values * (2.0 / width**0.5))
        grid = (-(-rows // SCALE_BLOCK), -(-width // SCALE_BLOCK))
        scales = torch.full(grid, width**-0.5, device=self._device)
        return DenseWeight(values.to(torch.float8_e4m3fn), scales)

    def table(self, name: str) -> Tensor:
        """The embedding in bfloat16."""
        shape = self._shapes[name]
        values = torch.randn(shape, generator=self._random, device=self._device)
        return values.to(torch.bfloat16)
