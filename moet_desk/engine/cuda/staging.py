"""Room in VRAM for rows on their way to a prompt's kernels: places that are taken in turn.

A place is filled on a stream of its own, beside the kernels; it is read by the kernels of one batch
and taken again after those that had their turn before it. On a CPU everything is in order. Called
on the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.store.pack_format import Plane


@dataclass(slots=True)
class _Place:
    """When a place was filled last, and when kernels had read it last; None: never, or on a CPU."""

    filled: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class Staging:
    """Places of equal size in a flat piece of memory.

    A place holds the rows of one expert, one after another: how many planes there are is said by
    `divide`, and the fewer, the more places. Invariant: every place is free or held by the caller,
    who may plan ahead: places are taken and given back in the order in which they are going to be
    filled and read.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._memory = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._strides: dict[Plane, int] = {}
        self._places: list[_Place] = []
        self._free: deque[int] = deque()  # those used longest ago first

    @property
    def n_free(self) -> int:
        """Places that can be taken."""
        return len(self._free)

    def divide(self, strides: dict[Plane, int]) -> None:
        """Cut the memory into places for rows of these sizes; nothing may be held."""
        if strides != self._strides:
            self._strides = dict(strides)
            self._places = [_Place() for _ in range(self._memory.numel() // sum(strides.values()))]
            self.give_all_back()

    def give_all_back(self) -> None:
        """Free every place, after a fault too: the next copies follow all kernels so far."""
        self._free = deque(range(len(self._places)))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def take(self) -> int:
        """A free place, the one that was used longest ago."""
        return self._free.popleft()

    def address(self, place: int, plane: Plane) -> int:
        """Where a plane's row of a place begins."""
        return self._memory.data_ptr() + self._offset(place, plane)

    def wait_filled(self, place: int) -> None:
        """Until the host memory that the place was filled from may change."""
        event = self._places[place].filled
        if event is not None:
            event.synchronize()

    def fill(self, rows: Sequence[tuple[int, Plane, Tensor]]) -> None:
        """Copy rows from pinned memory: (place, plane, uint8 [stride]) each."""
        if not rows:
            return
        behind: torch.cuda.Event | None = None
        with self._beside():
            for place, plane, row in rows:
                used = self._places[place].used
                if self._stream is not None and used is not None and used is not behind:
                    self._stream.wait_event(used)
                    behind = used
                at = self._offset(place, plane)
                self._memory[at : at + row.numel()].copy_(row, non_blocking=True)
            filled = self._event()
        for place, _, _ in rows:
            self._places[place].filled = filled

    @contextmanager
    def reading(self, places: Collection[int]) -> Iterator[None]:
        """Kernels launched inside read these places; the next copies there come behind them."""
        if self._stream is not None:
            for event in {self._places[place].filled for place in places}:
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
        yield
        used = self._event()
        for place in places:
            self._places[place].used = used

    def give_back(self, places: Collection[int]) -> None:
        """Free places behind all that are free already."""
        self._free.extend(places)

    def _offset(self, place: int, plane: Plane) -> int:
        first = place * sum(self._strides.values())
        return first + (0 if plane is Plane.BASE else self._strides[Plane.BASE])

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def _event(self) -> torch.cuda.Event | None:
        """A mark behind all that was launched on the current stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event
