"""Dense weights as shipped, or rounded to 8 bits where a card is too small for them. Pure.

Rounding happens while a model is loaded (`reference.quantize_dense`); packs keep what was shipped.
No torch, so that plans can be made without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from moet_desk.engine.families.tensors import NGRAM_TABLES
from moet_desk.errors import MoetError
from moet_desk.kernels.row_sizes import GROUP
from moet_desk.plan import DeviceBudget, ModelShape, TierPlan, Wishes, plan_device_tiers


class DenseFormat(Enum):
    """How dense weights lie where they are computed with."""

    STORED = "stored"
    INT8 = "int8"


PLAIN = ("BF16", "F16", "F32")
"""Types of a file whose matrices are rounded; others are small already."""

_KEPT = (
    "embed_tokens", "lm_head", ".gate", ".router", "router.classifier", "shared_expert_gate",
    "eh_proj", ".e_proj", ".h_proj", "_proj_bias", "_fn", ".tid2eid",
)  # fmt: skip
_KEPT_BELOW = ".indexer.", ".compressor."
_SCALE_BYTES = 2


def may_round(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a dense tensor can be rounded: a matrix of a product that chooses nothing.

    Routers and indexers choose experts and tokens, embedding and head choose words: these stay, and
    so do pools' compressors and connections of streams, which go through a softmax. Of tables of
    n-grams rows are read as they are.
    """
    is_matrix = len(shape) == 2 and shape[1] % GROUP == 0
    is_kept = (
        name.startswith(NGRAM_TABLES)
        or any(part in name for part in _KEPT_BELOW)
        or name.endswith(_KEPT)
    )
    return is_matrix and not is_kept


def rounded_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a rounded matrix: integers, and a scale per 32 of them."""
    rows, width = shape
    return rows * width + _SCALE_BYTES * rows * width // GROUP


def saving(tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> int:
    """Bytes that rounding saves: of unrounded tensors the logical name, shape and bytes go in."""
    return sum(
        n_bytes - rounded_bytes(shape) for name, shape, n_bytes in tensors if may_round(name, shape)
    )


def cpu_dense_format(wanted: str) -> DenseFormat:
    """On a CPU weights are float32 whatever they were: rounded only where the user asked for it."""
    return DenseFormat.INT8 if wanted == DenseFormat.INT8.value else DenseFormat.STORED


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """How a model lies on a card.

    Attributes:
        dense: of the dense weights.
        wishes: what the user fixed, with a context.
        shape: with the dense weights as they lie there.
        tiers: the sizes of all.
    """

    dense: DenseFormat
    wishes: Wishes
    shape: ModelShape
    tiers: TierPlan


def fit_device(
    wanted: str,
    shape_at: Callable[[Wishes], ModelShape],
    saved: int,
    budget: DeviceBudget,
    choices: Iterable[Wishes],
) -> DeviceFit:
    """The first choice that fits; dense weights are rounded only where they do not fit as shipped.

    Args:
        wanted: "auto", or the user's choice.
        shape_at: the model with the dense weights as shipped.
        saved: bytes that rounding would save.
        budget: of the card and of pinned RAM.
        choices: wishes with a context, the best first (`plan.contexts`).

    Raises:
        MoetError: as `plan_device_tiers`, about the last choice.
    """
    forms = [form for form in DenseFormat if wanted in ("auto", form.value)]
    if not saved:
        forms = [DenseFormat.STORED]
    problem: MoetError | None = None
    for wishes in choices:
        stored = shape_at(wishes)
        for form in forms:
            less = 0 if form is DenseFormat.STORED else saved
            shape = replace(stored, dense_bytes=stored.dense_bytes - less)
            try:
                return DeviceFit(form, wishes, shape, plan_device_tiers(shape, budget, wishes))
            except MoetError as error:
                if error.code != "MD-GPU-05":
                    raise
                problem = error
    if problem is None:
        raise ValueError("nothing to choose from")
    raise problem
