"""How a product of a step is cut into programs.

Owns tiles and which is taken, which changes speed alone, and the lanes that share a row's sum: the
order of adding follows from those (`dense`), so they depend on the weight and nothing else. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from moet_desk.kernels.triton.dense_weight import RUN, WeightKind

_MOST_EAGER = 64
"""Numbers of x that a lane asks for with the weights that they meet."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Shape of one program; changes speed, never bits.

    Attributes:
        rows: of the weight.
        warps: at least a row's lanes / 32, or more are taken.
        ahead: steps of K whose weights are asked for before the first is multiplied, at most.
    """

    rows: int
    warps: int
    ahead: int = 1


def lanes_of(k: int, kind: WeightKind) -> int:
    """Lanes that share a row's sum: the most that have two steps or more, a sixteenth of them idle
    at most. By K and the kind alone, so that tiles and rows of x change no bit.
    """
    runs = -(-k // RUN[kind])
    for lanes in (128, 64):
        if runs >= 2 * lanes and -(-runs // lanes) * lanes * 15 <= runs * 16:
            return lanes
    return 32


@dataclass(frozen=True, slots=True)
class Way:
    """A tile as a launch takes it.

    Attributes:
        rows, warps: of the tile, warps enough for a row's lanes.
        lanes: that share a row's sum.
        ahead: steps asked for at once, so that the passes over K are as equal as can be.
        eager: what they meet of x is asked for with them.
    """

    rows: int
    warps: int
    lanes: int
    ahead: int
    eager: bool


def way_of(k: int, kind: WeightKind, x_rows: int, tile: GemvTile) -> Way:
    """How a tile multiplies rows of `k` weights of a kind with `x_rows` rows of x."""
    lanes = lanes_of(k, kind)
    steps = -(-k // (lanes * RUN[kind]))
    passes = -(-steps // tile.ahead)
    ahead = -(-steps // passes)
    eager = ahead * RUN[kind] * x_rows <= _MOST_EAGER
    return Way(tile.rows, max(tile.warps, lanes // 32), lanes, ahead, eager)


def tile_for(n: int, k: int, kind: WeightKind, rows: int, *, gated: bool = False) -> GemvTile:
    """Tile by the weight and the rows of x; `bench/kernels_dense.py products` compares them.

    H200, 2026-11-30, one row, microseconds, and before weights were asked for ahead: FP8 1536 x
    4096 3.8, 6.1; 32768 x 1024 9.8, 11.4; 4096 x 8192 10.6, 12.9; bfloat16 2624 x 4096 6.8, 10.0;
    256 x 4096 2.2, 7.7; 129280 x 4096 235, 239.
    """
    lanes = lanes_of(k, kind)
    whole = k <= 2 * lanes * RUN[kind]
    if rows > 1:
        # Rows of a thread share what it reads of x, so many rows of x want many of the weight.
        each = 8 if rows > 4 and n >= 4096 and lanes > 32 else 4
        return GemvTile(each * 128 // lanes, 4)
    if RUN[kind] < 16:
        return GemvTile(2 if lanes > 32 else 4, 4, 4)
    if lanes == 32:
        return GemvTile(4, 2, 2)
    # A row in one pass, if that is no more than a thread can hold.
    return GemvTile(8, 4) if gated or (n >= 4096 and not whole) else GemvTile(4, 4, 4)
