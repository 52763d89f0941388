"""Products with dense weights, for many tokens at once and for one.

Called on the engine thread. A product of [1, K] and one of [3, K] round differently in BLAS, so
decode calls `linear_row` per token: then a token's bits do not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Multiply every row by W, for a chunk of a prompt; rounding depends on T.

    Shapes:
        x [T, K], w [N, K], same dtype; returns [T, N]
    """
    return torch.nn.functional.linear(x, w)


def linear_row(x: Tensor, w: Tensor) -> Tensor:
    """Multiply one token by W.

    Shapes:
        x [K], w [N, K], same dtype; returns [N]
    """
    return torch.mv(w, x)
