"""What rows of a prompt see of pooled attention: decoded once for a block of them, then looked at
by tiles. A step's rows, of many sequences, are in `pooled`.

Nothing here allocates or waits. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet_desk.engine.cuda.pool_states import PoolMemory
from moet_desk.engine.cuda.pooled_sizes import PooledSizes
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.choose import choose
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.pooled_keys import rounds
from moet_desk.kernels.triton.pooled_scores import score_run
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.shared_prefill import Run, decode_seen, run_attention


@dataclass(frozen=True, slots=True)
class RunBuffers:
    """Of a block of rows, B of which choose entries at the same time.

    Attributes:
        decoded: float32, flat: entries that the rows may see.
        page: int32 [1, 1], zero: the table of a sequence with a single page.
        scores: float32 [B, S]; chosen, counts: int32 [B, K], [B].
    """

    decoded: Tensor
    page: Tensor
    scores: Tensor
    chosen: Tensor
    counts: Tensor

    @classmethod
    def make(cls, size: PooledSizes, rows: int, device: torch.device) -> RunBuffers:
        """For blocks of up to `rows` rows."""
        choosing = size.choosing(rows)

        def i32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            decoded=torch.zeros(size.decoded, device=device), page=i32(1, 1),
            scores=torch.zeros((choosing, size.scored), device=device),
            chosen=i32(choosing, size.top_k), counts=i32(choosing),
        )  # fmt: skip

    def entries(self, form: KvFormat, dim: int) -> Tensor:
        """Room for decoded entries, [S, dim]."""
        exact = form is KvFormat.F32
        return (self.decoded if exact else self.decoded.view(torch.bfloat16)).view(-1, dim)


@dataclass(frozen=True, slots=True)
class Question:
    """What an indexer is asked by rows that may not see all windows.

    Attributes:
        queries: [T, N, D]; weights: [T, N], of its heads.
        keys: of windows; closed: int32 [T], how many are.
        scale: of the weights.
    """

    queries: Tensor
    weights: Tensor
    keys: KvPages
    closed: Tensor
    scale: float


def kept_queries(room: Tensor, form: KvFormat) -> Tensor:
    """Room for an indexer's queries [T, N, D] in as many float32, contiguous."""
    if not rounds(form):
        return room
    return room.view(torch.bfloat16).flatten()[: room.numel()].view(room.shape)


def look(
    b: RunBuffers,
    parts: Tensor,
    run: Run,
    memory: PoolMemory,
    sinks: Tensor,
    out: Tensor,
    *,
    rotation: Rotation,
    scale: float,
    question: Question | None,
) -> None:
    """Attention of a run's rows to what they see of a layer's memory.

    Shapes:
        parts [2, T, N, D], out [2, G, T, N / G * D] bfloat16, contiguous; sinks [N]
    """
    rows, form = parts.shape[1], memory.form
    entries = b.entries(form, parts.shape[3])
    table = b.page if run.pooled is None else run.pooled.kv.table
    decode_seen(KvPages(memory.rows, table, form), run, entries)
    if question is None or run.pooled is None:
        run_attention(
            parts, entries, run, sinks, out, rotation=rotation, scale=scale, form=form
        )  # fmt: skip
        return
    for first in range(0, rows, len(b.scores)):
        here = slice(first, min(first + len(b.scores), rows))
        own = replace(run, start=run.start + first, chosen=_choose(b, question, here))
        run_attention(
            parts[:, here], entries, own, sinks, out, rotation=rotation, scale=scale, form=form,
            first=first,
        )  # fmt: skip


def _choose(b: RunBuffers, asked: Question, here: slice) -> tuple[Tensor, Tensor]:
    """Which windows some rows see, by their numbers: as if all were on one page."""
    n, closed = slice(0, here.stop - here.start), asked.closed[here]
    scores, chosen, counts = b.scores[n], b.chosen[n], b.counts[n]
    score_run(
        asked.queries[here], asked.weights[here], asked.keys, closed, scores, scale=asked.scale
    )
    page = b.decoded.view(torch.uint8)[: scores.shape[1]].view(1, -1, 1)
    choose(scores, closed, KvPages(page, b.page.expand(n.stop, 1), asked.keys.form), chosen, counts)
    return chosen, counts
