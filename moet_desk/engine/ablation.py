"""Why the 2-bit levels are sign-symmetric: experts with levels that are not, for `eval` alone.

The four levels of a matrix are those with the least squared error that four levels shared by all of
it can have, beside the same scale per block of 32: 2.25 bits a weight like the product's -4 -1 1 4.
An exact zero is one value and one level takes all zeros, so the set is lopsided: less error in the
weights, but a zero's sign no longer averages out. docs/quality.md has what that makes of the demo
model. Such weights are made from the exact ones while a slot is filled; no pack holds them and the
CPU engine alone can do it. Engine thread.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from moet_desk.engine.transfer import Transfer
from moet_desk.kernels.layouts import GROUP, ExpertLayout, unpack_nibbles
from moet_desk.kernels.reference.quant import MAGNITUDES, scale_values
from moet_desk.store.pack_format import Plane

N_LEVELS = 4
VALUES = tuple(sorted({sign * one for one in MAGNITUDES for sign in (1.0, -1.0)}))
"""The 15 values of FP4 in order; both zeros are one."""

_AT_OF_NIBBLE = torch.tensor(
    [VALUES.index(-one if nibble > 7 else one) for nibble, one in enumerate(MAGNITUDES * 2)]
)


class AsymmetricTransfer(Transfer):
    """Fills slots for BASE with the least-squares levels of the exact weights."""

    def fetch(self, plane: Plane, row: int, slot: Tensor, *, scan: bool = False) -> None:
        """See `Transfer.fetch`; BASE reads the fine row too."""
        if plane is Plane.FINE:
            super().fetch(plane, row, slot, scan=scan)
            return
        base = self.arena.row(Plane.BASE, row, scan=scan)
        expand_asymmetric(base, self.arena.row(Plane.FINE, row, scan=scan), self.layout, slot)


def expand_asymmetric(
    base_row: Tensor, fine_row: Tensor, layout: ExpertLayout, out: Tensor
) -> None:
    """Fill a slot with level * 2**(scale - 127), the levels those of `best_levels` per matrix.

    Shapes:
        base_row [>= base_bytes] uint8, fine_row [>= fine_bytes] uint8
        out [slot_floats] float32, contiguous, written in full: both matrices transposed
    """
    for matrix in (layout.gate_up, layout.down):
        nibbles, scales = unpack_nibbles(base_row, fine_row, matrix)
        at = _AT_OF_NIBBLE[nibbles.long()]  # [N, K]
        unit = torch.from_numpy(scale_values())[scales.long()]  # [N, G]
        levels = best_levels(_importance(at, unit))
        blocks = levels[at].view(matrix.n, matrix.groups, GROUP) * unit[..., None]
        size = matrix.n * matrix.k
        out[:size].view(matrix.k, matrix.n).copy_(blocks.view(matrix.n, matrix.k).T)
        base_row, fine_row = base_row[matrix.base_bytes :], fine_row[matrix.fine_bytes :]
        out = out[size:]


def best_levels(importance: Tensor) -> Tensor:
    """What each value of `VALUES` becomes, so that the squared error is the least possible.

    The best sets of one dimension are intervals, each with its mean as level; there are 364 ways to
    cut 15 values into four, and all are tried.

    Shapes:
        importance [15] float64, not negative: what an error at a value counts; returns [15] float32
    """
    values = torch.tensor(VALUES, dtype=torch.float64)
    moments = torch.stack([importance, importance * values, importance * values**2])  # [3, 15]
    sums = torch.cat([torch.zeros(3, 1, dtype=torch.float64), moments.cumsum(1)], 1)  # [3, 16]
    cuts = _cuts()  # [364, 5]
    weight, first, second = sums[:, cuts].diff(dim=-1)  # each [364, 4]
    means = torch.where(weight > 0, first / weight, 0.0)
    best = int((second - means * first).sum(-1).argmin())
    return means[best].repeat_interleave(cuts[best].diff()).float()


def _importance(at: Tensor, unit: Tensor) -> Tensor:
    """Sum of squared block scales over the weights of each value: float64 [15]."""
    squared = unit.double().square().repeat_interleave(GROUP, 1)
    return torch.bincount(at.flatten(), squared.flatten(), minlength=len(VALUES))


@cache
def _cuts() -> Tensor:
    """All ways to cut the values into intervals that are not empty: int64 [364, 5], with ends."""
    n = len(VALUES)
    inner = combinations(range(1, n), N_LEVELS - 1)
    return torch.tensor([(0, *cut, n) for cut in inner])
