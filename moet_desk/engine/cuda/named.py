"""Experts that tables of token ids name, asked for at the beginning of a step.

They are known before any layer runs, so their look-up and fetch are a branch of the step's graph
beside the first layers' attention. A layer waits for its own rows only. Nothing else touches the
slots' tables, the mailbox and the arena meanwhile: these are the first layers with experts, and
those behind them look up once the last of these has what it waits for. The twin on a CPU asks the
system to read ahead (engine/stream_model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.cuda.blocks import Branch
from moet_desk.engine.cuda.buffers import MAX_ROWS, StepBuffers
from moet_desk.engine.cuda.pools import FoundExperts, PoolExperts
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.routed_lookup import Routing


@dataclass(frozen=True, slots=True)
class BroughtExperts:
    """The routed experts of one layer whose rows are on their way; see `Experts`.

    Attributes:
        experts: computes them.
        found: where their rows will lie.
        wait: lets what is launched from here on follow the fetch.
    """

    experts: PoolExperts
    found: FoundExperts
    wait: Callable[[], None]

    @property
    def activations(self) -> Activations:
        """See `Experts`."""
        return self.experts.activations

    def begin(self, buffers: StepBuffers, rows: int) -> None:
        """See `Experts`."""

    def __call__(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> None:
        """See `Experts`; a table has named them, so there is no routing."""
        self.compute(moe_layer, buffers, rows, self.find(moe_layer, buffers, rows, routing))

    def find(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> FoundExperts:
        """Wait for the rows, which are on their way."""
        self.wait()
        return self.found

    def compute(self, moe_layer: int, buffers: StepBuffers, rows: int, found: FoundExperts) -> None:
        """See `PoolExperts.compute`."""
        self.experts.compute(moe_layer, buffers, rows, found)


class NamedExperts:
    """Brings the experts of the layers that have a table.

    Args:
        tables: int32 [V, K] of the first MoE layers.
        device: theirs.

    Raises:
        ValueError: a layer without a table stands before one with a table.
    """

    def __init__(self, tables: Mapping[int, Tensor], device: torch.device) -> None:
        if sorted(tables) != list(range(len(tables))):
            raise ValueError("tables name the experts of other layers than the first ones")
        self._tables = [tables[layer] for layer in range(len(tables))]
        self._ids = [
            torch.zeros((MAX_ROWS, table.shape[1]), dtype=torch.int32, device=device)
            for table in self._tables
        ]
        self._branch = Branch(device)

    def bring(self, tokens: Tensor, experts: PoolExperts) -> Mapping[int, BroughtExperts]:
        """Launch it for the layers whose rows fit the pools together, and return what computes
        them, by MoE layer; the others look up as layers without a table do.

        Shapes:
            tokens int32 [T], T = 1..8
        """
        rows = tokens.shape[0]
        brought = dict[int, BroughtExperts]()
        n_layers = min(len(self._tables), experts.layers_ahead(rows))
        if not n_layers:  # a branch that nothing joins would spoil the capture
            return brought
        with self._branch.beside():
            for layer in range(n_layers):
                ids = self._ids[layer][:rows]
                torch.index_select(self._tables[layer], 0, tokens, out=ids)
                found = experts.bring(layer, ids, before=layer)
                brought[layer] = BroughtExperts(experts, found, self._branch.mark())
        return brought
