"""Random experts and rows that several kernel tests build on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.kernels.layouts import ExpertLayout, pack_expert
from moet_desk.kernels.reference import expand_base, expand_fine

Matrix = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Expert:
    layout: ExpertLayout
    gate_up: Matrix
    down: Matrix
    base_row: Tensor
    fine_row: Tensor

    def base_slot(self) -> Tensor:
        slot = torch.full((self.layout.slot_floats,), float("nan"))
        expand_base(self.base_row, self.layout, slot)
        return slot

    def fine_slot(self) -> Tensor:
        slot = torch.full((self.layout.slot_floats,), float("nan"))
        expand_fine(self.base_row, self.fine_row, self.layout, slot)
        return slot


def random_matrix(n: int, k: int, *, low: int = 115, high: int = 130) -> Matrix:
    nibbles = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return nibbles, torch.randint(low, high, (n, k // 32), dtype=torch.uint8)


def random_expert(hidden: int, inter: int, *, low: int = 115, high: int = 130) -> Expert:
    gate, up = (random_matrix(inter, hidden, low=low, high=high) for _ in range(2))
    down = random_matrix(hidden, inter, low=low, high=high)
    base_row, fine_row = pack_expert(gate, up, down)
    gate_up = (torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]]))
    return Expert(ExpertLayout(hidden, inter), gate_up, down, base_row, fine_row)


def all_quads(turn: int) -> Tensor:
    """Every combination of four neighbouring nibbles: blocks [8192, 32] uint8.

    A quad is what one digit word and one byte of base codes hold. `turn` moves the quads around
    within their blocks: 0..7 bring each of them to all eight words of a record.
    """
    numbers = torch.arange(1 << 16).view(-1, 8).roll(turn, 1)
    return (numbers[..., None] >> 4 * torch.arange(4) & 15).to(torch.uint8).view(-1, 32)


def quads_expert(hidden: int, inter: int, *, scale: int, turns: Iterable[int]) -> Expert:
    """An expert with the blocks of `all_quads`, as often as there is room, all of one scale."""
    blocks = torch.cat([all_quads(turn) for turn in turns]).flatten()

    def filled(n: int, k: int, begin: int) -> Matrix:
        at = (torch.arange(n * k) + begin) % len(blocks)
        return blocks[at].view(n, k), torch.full((n, k // 32), scale, dtype=torch.uint8)

    gate, up = filled(inter, hidden, 0), filled(inter, hidden, inter * hidden)
    down = filled(hidden, inter, 0)
    base_row, fine_row = pack_expert(gate, up, down)
    gate_up = (torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]]))
    return Expert(ExpertLayout(hidden, inter), gate_up, down, base_row, fine_row)


def real_values(matrix: Matrix, levels: list[float]) -> Tensor:
    """level[code] * 2**(scale - 127) in float64, for 16 nibble values or any other table."""
    codes, scales = matrix
    value = torch.tensor(levels, dtype=torch.float64)[codes.long()]
    exponent = scales.double().repeat_interleave(32, 1) - 127
    return value * torch.exp2(exponent)
