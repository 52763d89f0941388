"""States of fixed size that some mixers keep of a sequence instead of entries of its tokens.

A state cannot be cut like entries, so a sequence keeps it at the few lengths that somebody goes
back to: before and behind the tokens that were read last, and before the last one of them, which a
balanced answer reads again with FP4 experts. States are never written over, so keeping one costs no
copy. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.page_rows import PageRows
from moet_desk.engine.spec import Gdn, Pool, PooledAttention, Stateful
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import MOST_PENDING
from moet_desk.kernels.reference import OpenWindow, Running


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

    def parts(self) -> list[Tensor]:
        """Its tensors, of a size that the mixer says."""
        return [self.matrix, self.tail]

    @classmethod
    def of_bytes(cls, mixer: Gdn, flat: Tensor) -> DeltaState:
        """What `parts` gave, as bytes in a row."""
        numbers = flat.view(torch.float32)
        size = mixer.n_values * mixer.key_dim * mixer.value_dim
        matrix = numbers[:size].view(mixer.n_values, mixer.key_dim, mixer.value_dim)
        return cls(matrix, numbers[size:].view(-1, mixer.channels))


@dataclass(frozen=True, slots=True)
class PoolState:
    """The same of pooled attention.

    Attributes:
        tail: entries of the last tokens, as many as the next token sees, uint8 [n, bytes].
        pooled, index: windows that are not closed, of entries and of the indexer's keys.
    """

    tail: Tensor
    pooled: OpenWindow | None
    index: OpenWindow | None

    @classmethod
    def empty(cls, mixer: PooledAttention, form: KvFormat) -> PoolState:
        """Before the first token."""
        tail = torch.zeros((0, mixer.entry_bytes(form)), dtype=torch.uint8)
        pool = mixer.pool
        if pool is None:
            return cls(tail, None, None)
        overlap = pool.indexer is not None
        pooled = OpenWindow.start(pool.ratio, mixer.head_dim, overlap=overlap)
        if pool.indexer is None:
            return cls(tail, pooled, None)
        index = OpenWindow.start(pool.ratio, pool.indexer.head_dim, overlap=True)
        return cls(tail, pooled, index)

    def parts(self, mixer: PooledAttention) -> list[Tensor]:
        """Its tensors, filled up to a size that the mixer says."""
        missing = mixer.window - 1 - len(self.tail)
        parts = [self.tail, self.tail.new_zeros((missing, self.tail.shape[1]))]
        for window in (self.pooled, self.index):
            if window is not None:
                parts += _tensors(window.sums)
                parts += _tensors(window.before) if window.before is not None else []
        return parts

    @classmethod
    def of_bytes(
        cls, mixer: PooledAttention, form: KvFormat, flat: Tensor, length: int
    ) -> PoolState:
        """What `parts` gave of a state behind `length` tokens, as bytes in a row."""
        row = mixer.entry_bytes(form)
        tail = flat[: (mixer.window - 1) * row].view(-1, row)[: min(length, mixer.window - 1)]
        if mixer.pool is None:
            return cls(tail, None, None)
        numbers = flat[(mixer.window - 1) * row :].clone().view(torch.float32)
        size = (9 if mixer.pool.indexer else 3) * mixer.head_dim
        pooled = _window(numbers[:size], mixer.pool, mixer.head_dim, length)
        if mixer.pool.indexer is None:
            return cls(tail, pooled, None)
        index = _window(numbers[size:], mixer.pool, mixer.pool.indexer.head_dim, length)
        return cls(tail, pooled, index)


def _tensors(sums: Running) -> list[Tensor]:
    return [sums.peak, sums.total, sums.weighted]


def _window(numbers: Tensor, pool: Pool, dim: int, length: int) -> OpenWindow:
    """The window that `PoolState.parts` took apart."""
    n_open = length % pool.ratio
    if pool.indexer is None:
        return OpenWindow(pool.ratio, dim, n_open, Running(*torch.split(numbers, dim)), None)
    own, left = torch.split(numbers, [6 * dim, 3 * dim])
    sums, before = Running(*torch.split(own, 2 * dim)), Running(*torch.split(left, dim))
    return OpenWindow(pool.ratio, dim, n_open, sums, before)


State = DeltaState | PoolState
S = TypeVar("S", DeltaState, PoolState)


@dataclass(slots=True)
class States:
    """Of one sequence: for each layer with a state, by the number of tokens before it."""

    _kept: dict[int, Mapping[int, State]] = field(default_factory=dict)

    def at(self, layer: int, length: int, kind: type[S], empty: Callable[[], S]) -> S:
        """Of a layer behind `length` tokens; `empty` makes that of none.

        Raises:
            ValueError: it was not kept; a sequence may only go back as the module says.
        """
        if not length:
            return empty()
        state = self._kept.get(layer, {}).get(length)
        if not isinstance(state, kind):
            raise ValueError(f"no state of layer {layer} was kept behind {length} tokens")
        return state

    def put(self, layer: int, by_length: Mapping[int, State]) -> None:
        """Keep these of a layer and no others."""
        self._kept[layer] = by_length

    def clear(self) -> None:
        self._kept.clear()

    def fork(self) -> States:
        """The same states, to go on from without touching these."""
        return States(dict(self._kept))

    def to_bytes(
        self, length: int, mixers: Sequence[Stateful], form: KvFormat
    ) -> NDArray[np.uint8]:
        """States of all layers behind `length` tokens, flat. Raises as `at`."""
        flat = [
            part.contiguous().flatten().view(torch.uint8)
            for i, mixer in enumerate(mixers)
            for part in self._parts(i, mixer, length, form)
        ]
        joined: NDArray[np.uint8] = torch.cat(flat).numpy()
        return joined

    def _parts(self, layer: int, mixer: Stateful, length: int, form: KvFormat) -> list[Tensor]:
        if isinstance(mixer, Gdn):
            return self.at(layer, length, DeltaState, lambda: DeltaState.empty(mixer)).parts()
        state = self.at(layer, length, PoolState, lambda: PoolState.empty(mixer, form))
        return state.parts(mixer)

    def from_bytes(
        self, flat: NDArray[np.uint8], length: int, mixers: Sequence[Stateful], form: KvFormat
    ) -> None:
        """Keep what `to_bytes` gave, and nothing else."""
        sizes = [mixer.state_bytes(form) for mixer in mixers]
        parts = torch.split(torch.from_numpy(flat.copy()), sizes)
        for layer, (mixer, part) in enumerate(zip(mixers, parts, strict=True)):
            own = part.clone()  # at the beginning of its memory, whatever was before it
            state: State
            if isinstance(mixer, Gdn):
                state = DeltaState.of_bytes(mixer, own)
            else:
                state = PoolState.of_bytes(mixer, form, own, length)
            self.put(layer, {length: state})


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

    def pooled(self, layer: int) -> tuple[PageRows, PageRows | None] | None:
        """Where a layer's pooled entries lie on the pages, and the keys of its indexer; None if it
        has none.
        """
        ...


class SlotList:
    """Slots that are free, the lowest first."""

    def __init__(self, n_slots: int) -> None:
        self._free = list(range(n_slots))

    def take(self) -> int | None:
        """See `StateSlots`."""
        return self._free.pop(0) if self._free else None

    def give_back(self, slot: int) -> None:
        """See `StateSlots`."""
        self._free = sorted([*self._free, slot])


def pending_of(base: int, length: int) -> int:
    """Parts that a state behind `base` tokens lacks.

    Raises:
        ValueError: a sequence may not go back so far, or went on without its states.
    """
    if not 0 <= length - base <= MOST_PENDING:
        raise ValueError(f"no state was kept behind {length} tokens, but behind {base}")
    return length - base
