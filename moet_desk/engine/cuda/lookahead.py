"""Rows that the next layer will probably ask for are brought while the one before it computes.

Its router is given this layer's input: four of five experts that it names are those that it chooses
one layer later (docs/design/gpu.md). A look-up of these and the fetch of what they lack are a lane
of the step's graph beside experts and attention. A wrong guess costs a transfer and a slot, never a
bit: the layer looks up what it chooses as always, and waits for what was begun for it.

Only rows that are in RAM are brought, so a plane takes part if all of its rows are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moet_desk.engine.cuda.blocks import Branch, Experts, LayerLaunches, MoeLaunches
from moet_desk.engine.cuda.buffers import MAX_ROWS, StepBuffers
from moet_desk.engine.cuda.pools import DevicePool, FoundExperts
from moet_desk.engine.cuda.streams import StreamLaunches
from moet_desk.engine.lookahead_control import AheadControl
from moet_desk.engine.spec import Router
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.cache import MOST_PAIRS
from moet_desk.kernels.triton.dense import gemv
from moet_desk.kernels.triton.fetch import fetch
from moet_desk.kernels.triton.lookahead import AheadOutput, look_ahead
from moet_desk.kernels.triton.routed_lookup import Routing

_PROTECTED = 3
"""Look-ups whose rows may be needed at once: a layer's, and those ahead of it and of the next."""


class Finding(Protocol):
    """Routed experts in two parts: see `PoolExperts`."""

    @property
    def activations(self) -> Activations:
        """See `Experts`."""
        ...

    def find(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> FoundExperts:
        """Launch the look-up and the fetch of what is missing."""
        ...

    def compute(self, moe_layer: int, buffers: StepBuffers, rows: int, found: FoundExperts) -> None:
        """Launch the products."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for ahead of a layer.

    Attributes:
        outputs: of each pool.
        wait_slots: lets what is launched from here on follow the look-ups; wait_rows: the fetches.
    """

    outputs: Sequence[AheadOutput]
    wait_slots: Callable[[], None]
    wait_rows: Callable[[], None]


PROGRAMS = 64
"""That copy rows: fewer than where all wait for them, as others compute meanwhile."""

_SCORES, _ROWS = 0, 1
"""Lanes: a router is not to wait until rows have come."""


_REVIEW_STEPS = 64
"""Between two looks at what was needed: they wait for the card."""


class Lookahead:
    """The lanes and their memory; `most` of each token's likely experts are brought.

    Attributes:
        most: int32 [1] on the device, from 0 to K; data, so that captured graphs follow it.
    """

    def __init__(self, router: Router, pools: Sequence[DevicePool], device: torch.device) -> None:
        self._pools, self._top_k = pools, router.top_k
        shape, pairs = (MAX_ROWS, router.top_k), MAX_ROWS * router.top_k
        self._branch = Branch(device)
        self._logits = torch.zeros((MAX_ROWS, router.n_experts), device=device)
        self._weights = torch.zeros(shape, device=device)
        self._share = torch.zeros(MAX_ROWS, device=device)
        # In turn, layer by layer: while one is read, the next one's is written.
        self._ids = torch.zeros((2, *shape), dtype=torch.int32, device=device)
        self._outputs = [[AheadOutput.empty(pairs, device=device) for _ in pools] for _ in range(2)]
        self._nothing = [AheadOutput.empty(pairs, device=device) for _ in pools]
        self.most = torch.full((1,), router.top_k, dtype=torch.int32, device=device)
        self._control, self._steps, self._counted = AheadControl(router.top_k), 0, (0, 0)

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows leaves room in the smallest pools that there can be."""
        pairs = rows * self._top_k
        room = min((pool.least for pool in self._pools), default=0)
        return pairs <= MOST_PAIRS and _PROTECTED * pairs <= room

    def review(self) -> None:
        """Between steps: how much of what was brought was needed decides how much is."""
        self._steps += 1
        if self._steps < _REVIEW_STEPS:
            return
        counts = torch.stack([pool.tables.ahead.sum(0) for pool in self._pools]).sum(0).tolist()
        # The device's numbers are 32 bits wide and begin anew.
        pairs = zip(counts, self._counted, strict=True)
        brought, needed = ((now - then) % 2**32 for now, then in pairs)
        self.most.fill_(self._control.note(brought, needed, self._steps))
        self._steps, self._counted = 0, tuple(counts)

    def score(self, following: MoeLaunches, b: StepBuffers, rows: int) -> Callable[[], None]:
        """Launch what the following layer's router makes of this one's input; returns what lets
        later launches overwrite that.
        """
        t = slice(0, rows)
        with self._branch.beside(_SCORES):
            logits, ids = self._logits[t], self._ids[following.moe_layer % 2, t]
            gemv(b.normed[t], following.w_router, logits, bias=following.logit_bias)
            read = self._branch.mark(_SCORES)
            following.route(logits, None, ids=ids, weights=self._weights[t], share=self._share[t])
        return read

    def ask(self, following: MoeLaunches, b: StepBuffers, rows: int, before: Asked | None) -> Asked:
        """Launch the look-up of what `score` found, and the fetch of what has no slot.

        Args:
            following: the layer that it is for.
            b: with the ids of the layer before it.
            rows: of the step.
            before: what was asked for ahead of the layer before it.
        """
        layer, t = following.moe_layer, slice(0, rows)
        outputs = self._outputs[layer % 2]
        earlier = self._nothing if before is None else before.outputs
        with self._branch.beside(_ROWS):
            self._branch.join(_SCORES)
            for pool, last, out in zip(self._pools, earlier, outputs, strict=True):
                look_ahead(
                    self._ids[layer % 2, t], self.most, pool.tables, layer=layer, chosen=b.ids[t],
                    before=last, out=out,
                )  # fmt: skip
            wait_slots = self._branch.mark(_ROWS)
            for pool, out in zip(self._pools, outputs, strict=True):
                fetch(
                    pool.slots, pool.arena, out.n, miss_row=out.row, miss_slot=out.slot,
                    programs=PROGRAMS,
                )  # fmt: skip
        return Asked(outputs, wait_slots, self._branch.mark(_ROWS))


class StepAhead:
    """One step's lookahead: layer by layer, what was asked for is handed on.

    Args:
        lookahead: of the plane.
        following: the layer behind each MoE layer, by number, if its router chooses its experts.
    """

    def __init__(self, lookahead: Lookahead, following: Mapping[int, MoeLaunches]) -> None:
        self.lookahead, self._following = lookahead, following
        self.asked: Asked | None = None

    def around(self, experts: Finding, moe_layer: int) -> Experts:
        """The experts of a layer, which look ahead for the one behind it."""
        return LookingAhead(self, experts, self._following.get(moe_layer))


@dataclass(slots=True)
class LookingAhead:
    """The routed experts of one layer; see `Experts`."""

    step: StepAhead
    experts: Finding
    following: MoeLaunches | None
    _read: Callable[[], None] | None = None

    @property
    def activations(self) -> Activations:
        """See `Experts`."""
        return self.experts.activations

    def begin(self, buffers: StepBuffers, rows: int) -> None:
        """See `Experts`. What was asked for ahead has its slots before this layer looks any up, and
        was compared with the ids that this layer's replace.
        """
        if self.following is not None:
            self._read = self.step.lookahead.score(self.following, buffers, rows)
        if self.step.asked is not None:
            self.step.asked.wait_slots()

    def __call__(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> None:
        """See `Experts`."""
        found = self.experts.find(moe_layer, buffers, rows, routing)
        asked, self.step.asked = self.step.asked, None
        if self.following is not None:
            self.step.asked = self.step.lookahead.ask(self.following, buffers, rows, asked)
        if asked is not None:
            asked.wait_rows()
        if self._read is not None:
            self._read()
        self.experts.compute(moe_layer, buffers, rows, found)


def following_layers(layers: Iterable[object]) -> Mapping[int, MoeLaunches]:
    """By MoE layer, the one behind it, if that has a router to ask: no table names its experts."""
    found = [layer.ffn for layer in layers if isinstance(layer, LayerLaunches | StreamLaunches)]
    moe = [ffn for ffn in found if isinstance(ffn, MoeLaunches)]
    return {
        before.moe_layer: behind
        for before, behind in itertools.pairwise(moe)
        if behind.table is None and not behind.router.n_identity
    }
