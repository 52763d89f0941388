"""Tile sizes that were measured on a card, by the shape of an expert.

Owns reading `tiles.json`, which `bench/tune.py` writes, and which of its rows stands for a shape.
Kernels ask through `experts.tiles_for` and `grouped.grouped_tile`, which have a rule for all that
is not in it. A result's bits depend on no tile, so the table changes speed alone. Immutable once
read; any thread.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from moet_desk.kernels.layouts import ExpertLayout

FILE = Path(__file__).with_name("tiles.json")
FORMAT = 1

NEAR = 0.6
"""Largest distance of a shape that another's row stands for: the sum of both widths' differences in
powers of two. 4096 x 2048 may stand for 4096 x 1408, not for 4096 x 1024.
"""

MANY_TOKENS = 3
"""Tokens of a step from which the second of a shape's two rows counts."""

_WARPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a matrix and warps of a program."""

    rows: int
    warps: int


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Rows of a matrix of a prompt's program, its warps, and reads that it has under way."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Tiles of one expert shape in a decode step of `tokens` tokens (1, or `MANY_TOKENS`)."""

    hidden: int
    inter: int
    fine: bool
    tokens: int
    gate_up: Tile
    down: Tile

    def is_legal(self, layout: ExpertLayout) -> bool:
        """Whether these tiles divide the matrices of `layout`, and a thread of them holds no more
        than for the shape that they were measured with.
        """
        divides = not (layout.inter % self.gate_up.rows or layout.hidden % self.down.rows)
        return divides and layout.hidden <= self.hidden and layout.inter <= self.inter


@dataclass(frozen=True, slots=True)
class GroupedRow:
    """Tiles of one expert shape for a prompt's full tiles of pairs; `wide`: 15-bit activations."""

    hidden: int
    inter: int
    wide: bool
    gate_up: GroupedTile
    down: GroupedTile

    def is_legal(self, layout: ExpertLayout) -> bool:
        """Always: rows beyond a matrix are masked there."""
        return True


_Row = TypeVar("_Row", DecodeRow, GroupedRow)


@dataclass(frozen=True, slots=True)
class CardTiles:
    """What was measured on one kind of card."""

    card: str
    decode: tuple[DecodeRow, ...] = ()
    grouped: tuple[GroupedRow, ...] = ()


def capability_of(device: torch.device) -> str:
    """Compute capability as "9.0"; empty for what is no card."""
    return "{}.{}".format(*_capability(device)) if device.type == "cuda" else ""


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def load() -> Mapping[str, CardTiles]:
    """The table that comes with the program, by capability."""
    return parse(json.loads(FILE.read_text()))


def parse(document: Mapping[str, Any]) -> Mapping[str, CardTiles]:
    """Read a table.

    Raises:
        ValueError: it is of another format, or has a tile that no launch could use.
        KeyError, TypeError: it is none.
    """
    if document["format"] != FORMAT:
        raise ValueError(f"tiles of format {document['format']}, {FORMAT} was expected")
    return {
        capability: CardTiles(
            card=card["card"],
            decode=tuple(_decode_row(row) for row in card["decode"]),
            grouped=tuple(_grouped_row(row) for row in card["grouped"]),
        )
        for capability, card in document["cards"].items()
    }


@functools.lru_cache(maxsize=512)
def decode_row(
    layout: ExpertLayout, *, fine: bool, tokens: int, capability: str
) -> DecodeRow | None:
    """The row of this shape, or of the nearest one whose tiles fit it; None: nothing is known."""
    card = load().get(capability)
    wanted = MANY_TOKENS if tokens >= MANY_TOKENS else 1
    rows = [row for row in card.decode if (row.fine, row.tokens) == (fine, wanted)] if card else []
    return nearest(rows, layout)


@functools.lru_cache(maxsize=512)
def grouped_row(layout: ExpertLayout, *, wide: bool, capability: str) -> GroupedRow | None:
    """Likewise for prompts."""
    card = load().get(capability)
    return nearest([row for row in card.grouped if row.wide == wide] if card else [], layout)


def nearest(rows: Sequence[_Row], layout: ExpertLayout) -> _Row | None:
    """The legal row of the nearest shape, if one is near; the first of equals."""
    fitting = [row for row in rows if row.is_legal(layout)]
    found = min(fitting, key=lambda row: _distance(row, layout), default=None)
    return None if found is None or _distance(found, layout) > NEAR else found


def _distance(row: DecodeRow | GroupedRow, layout: ExpertLayout) -> float:
    wider = math.log2(row.hidden / layout.hidden), math.log2(row.inter / layout.inter)
    return abs(wider[0]) + abs(wider[1])


def _decode_row(row: Mapping[str, Any]) -> DecodeRow:
    made = DecodeRow(
        row["hidden"], row["inter"], row["fine"], row["tokens"],
        Tile(*row["gate_up"]), Tile(*row["down"]),
    )  # fmt: skip
    tiles = (made.gate_up, made.down)
    known = made.tokens in (1, MANY_TOKENS) and made.is_legal(ExpertLayout(made.hidden, made.inter))
    if not known or any(t.warps not in _WARPS or not _is_power(t.rows) for t in tiles):
        raise ValueError(f"no launch could use {made}")
    return made


def _grouped_row(row: Mapping[str, Any]) -> GroupedRow:
    made = GroupedRow(
        row["hidden"], row["inter"], row["wide"],
        GroupedTile(*row["gate_up"]), GroupedTile(*row["down"]),
    )  # fmt: skip
    for tile in (made.gate_up, made.down):
        usable = _is_power(tile.rows) and tile.rows >= 16 and tile.warps in _WARPS
        if not usable or not 1 <= tile.stages <= 8:
            raise ValueError(f"no launch could use {made}")
    return made


def _is_power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
