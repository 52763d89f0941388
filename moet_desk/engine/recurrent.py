"""States of fixed size that some mixers keep of a sequence instead of entries of its tokens.

A state cannot be cut like entries, so a sequence keeps it at the few lengths that somebody goes
back to: before and behind the tokens that were read last, and before the last one of them, which a
balanced answer reads again with FP4 experts. States are never written over, so keeping one costs no
copy. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.spec import Gdn


@dataclass(frozen=True, slots=True)
class DeltaState:
    """Of one layer behind some tokens.

    Attributes:
        matrix: [N, dk, dv] float32.
        tail: [kernel - 1, channels] float32, the convolution's last inputs.
    """

    matrix: Tensor
    tail: Tensor

    @classmethod
    def empty(cls, mixer: Gdn) -> DeltaState:
        """Before the first token."""
        matrix = torch.zeros(mixer.n_values, mixer.key_dim, mixer.value_dim)
        return cls(matrix, torch.zeros(mixer.kernel - 1, mixer.channels))


@dataclass(slots=True)
class States:
    """Of one sequence: for each layer with a state, by the number of tokens before it."""

    _kept: dict[int, Mapping[int, DeltaState]] = field(default_factory=dict)

    def at(self, layer: int, length: int, mixer: Gdn) -> DeltaState:
        """Of a layer behind `length` tokens.

        Raises:
            ValueError: it was not kept; a sequence may only go back as the module says.
        """
        if not length:
            return DeltaState.empty(mixer)
        state = self._kept.get(layer, {}).get(length)
        if state is None:
            raise ValueError(f"no state of layer {layer} was kept behind {length} tokens")
        return state

    def put(self, layer: int, by_length: Mapping[int, DeltaState]) -> None:
        """Keep these of a layer and no others."""
        self._kept[layer] = by_length

    def clear(self) -> None:
        self._kept.clear()

    def to_bytes(self, length: int, mixers: Sequence[Gdn]) -> NDArray[np.uint8]:
        """States of all layers behind `length` tokens, flat. Raises as `at`."""
        states = [self.at(i, length, mixer) for i, mixer in enumerate(mixers)]
        parts = [part.flatten() for state in states for part in (state.matrix, state.tail)]
        flat: NDArray[np.uint8] = torch.cat(parts).numpy().view(np.uint8)
        return flat

    def from_bytes(self, flat: NDArray[np.uint8], length: int, mixers: Sequence[Gdn]) -> None:
        """Keep what `to_bytes` gave, and nothing else."""
        numbers = torch.from_numpy(flat.copy().view(np.float32))
        sizes = [
            size
            for mixer in mixers
            for size in (
                mixer.n_values * mixer.key_dim * mixer.value_dim,
                (mixer.kernel - 1) * mixer.channels,
            )
        ]
        parts = iter(torch.split(numbers, sizes))
        for layer, mixer in enumerate(mixers):
            matrix = next(parts).view(mixer.n_values, mixer.key_dim, mixer.value_dim)
            self.put(layer, {length: DeltaState(matrix, next(parts).view(-1, mixer.channels))})


class StateSlots(Protocol):
    """States on a device: a slot for each sequence, which moves on in place.

    `base` is the number of tokens that a slot's states lie behind; `length` is at least that, and
    at most a step's rows more.
    """

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, as `to_bytes` gives them."""
        ...

    def take(self) -> int | None:
        """A slot for a new sequence; None if all are taken."""
        ...

    def give_back(self, slot: int) -> None: ...

    def to_bytes(self, slot: int, base: int, length: int) -> NDArray[np.uint8]:
        """States of all layers behind `length` tokens, as `States.to_bytes` has them.

        Raises:
            ValueError: they were not kept.
        """
        ...

    def from_bytes(self, flat: NDArray[np.uint8], slot: int, length: int) -> None:
        """Set what `to_bytes` gave; the base is the caller's."""
        ...
