"""Moving rows: NVMe -> RAM -> slot. On a CPU a slot holds the row expanded to float32.

Owned by the engine thread. Expanding once at fetch, not per token, is what makes the CPU path
quick.
"""

from __future__ import annotations

from torch import Tensor

from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.reference import expand_base, expand_fine
from moet_desk.store.arena import Arena
from moet_desk.store.pack_format import Plane


class Transfer:
    """Fills slots from the arena, which reads the pack file for rows it does not hold."""

    def __init__(self, arena: Arena, layout: ExpertLayout) -> None:
        self.arena = arena
        self.layout = layout

    def expect(self, plane: Plane, row: int) -> None:
        """A row will be put into a slot soon: begin to read what of it is not in RAM."""
        for needed in (Plane.BASE,) if plane is Plane.BASE else Plane:
            self.arena.expect(needed, row)

    def fetch(self, plane: Plane, row: int, slot: Tensor, *, scan: bool = False) -> None:
        """Put a row into a slot: 2-bit weights for BASE, exact FP4 weights for FINE.

        Shapes:
            slot [slot_floats] float32, written

        Raises:
            MoetError: MD-NVME-04 or MD-PACK-04; the slot's content is then undefined.
        """
        base = self.arena.row(Plane.BASE, row, scan=scan)
        if plane is Plane.BASE:
            expand_base(base, self.layout, slot)
        else:
            expand_fine(base, self.arena.row(Plane.FINE, row, scan=scan), self.layout, slot)
