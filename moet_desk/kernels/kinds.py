"""Variants that both specs and ops speak of. No torch, so that plans and specs stay light."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Score(Enum):
    """How a router logit becomes a score."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"
    TOPK_SOFTMAX = "topk_softmax"  # softmax over the chosen logits only


class KvFormat(Enum):
    """How one cached token is stored (design §5.4; layouts in `reference.kv_formats`)."""

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class Activations(Enum):
    """Integer steps from 0 to the largest activation of a block of 32 (docs/adr/0009).

    Both keep a block's dot product exact in float32 (32 * 12 half units * 32512 < 2**24) and in
    int32. INT8 is one dp4a per four weights, INT15 two: hi = (q + 128) >> 8 and lo = q - 256 * hi.
    """

    INT8 = 127
    INT15 = 127 * 256


@dataclass(frozen=True, slots=True)
class Glu:
    """An expert's activation: (up + shift) * gate * sigmoid(alpha * gate).

    With a limit L, gate is first cut to <= L and up to -L..L. As it stands it is SwiGLU.
    """

    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0


SWIGLU = Glu()


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters (arXiv 2309.00071) as in a config's `rope_scaling`.

    `attention_factor` overrides the magnitude that follows from `mscale` and `mscale_all_dim`.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
