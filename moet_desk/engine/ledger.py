"""What happened to each expert: uses, fetches, evictions and when; what the Cache screen tells.

Fed with differences, up to ten times a second: by the CPU's residency, which counts, by the
device's, which compares pictures, and by the replay of a trace. Owned by one thread. Costs a few
array operations over all experts each time, none in a step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moet_desk.telemetry import Stories, Tier

Grid = NDArray[np.uint8]
"""[L * E] `Tier` values."""


class Ledger:
    """The sums so far.

    Args:
        n_rows: L * E, all experts.
        exact: whether what it is told was counted (`Stories.exact`).
    """

    def __init__(self, n_rows: int, *, exact: bool) -> None:
        self._exact = exact
        self._uses = np.zeros(n_rows, np.float32)
        self._fetches = np.zeros(n_rows, np.uint32)
        self._evictions = np.zeros(n_rows, np.uint32)
        self._used_s = np.full(n_rows, -1, np.float32)
        self._fetched_s = np.full(n_rows, -1, np.float32)
        self._source = np.zeros(n_rows, np.uint8)

    def note(
        self,
        now_s: float,
        *,
        uses: NDArray[np.float32],
        fetches: NDArray[np.uint32],
        evictions: NDArray[np.uint32],
        before: Grid | None,
    ) -> None:
        """Add what happened since the last call.

        Args:
            now_s: seconds since the model was loaded.
            uses: [L * E], how often each expert was asked for since then.
            fetches: [L * E], how often it came into a slot.
            evictions: [L * E], how often it left one.
            before: tiers at the last call: where rows were fetched from. A row that was in a slot
                then, left it and came back is taken to have come from RAM.
        """
        self._uses += uses
        self._fetches += fetches
        self._evictions += evictions
        self._used_s[uses > 0] = now_s
        came = fetches > 0
        self._fetched_s[came] = now_s
        if before is not None:
            self._source[came] = np.minimum(before[came], Tier.RAM)

    def stories(self, now_s: float) -> Stories:
        """A frozen copy."""
        return Stories(
            now_s=now_s,
            uses=self._uses.tobytes(),
            fetches=self._fetches.tobytes(),
            evictions=self._evictions.tobytes(),
            used_s=self._used_s.tobytes(),
            fetched_s=self._fetched_s.tobytes(),
            source=self._source.tobytes(),
            exact=self._exact,
        )


def moves(before: Grid | None, after: Grid) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Rows that came into a slot and that left one between two pictures, [L * E] each, 0 or 1."""
    if before is None:
        none = np.zeros(after.shape, np.uint32)
        return none, none
    was, has = before >= Tier.BASE, after >= Tier.BASE
    return (has & ~was).astype(np.uint32), (was & ~has).astype(np.uint32)


def uses_between(
    before: NDArray[np.float64], after: NDArray[np.float64], lookups: NDArray[np.int64]
) -> NDArray[np.float32]:
    """How often each expert was used, worked out from decayed counts.

    Args:
        before: [L, E], the count at the last picture, decayed to the moment of this one.
        after: the count now.
        lookups: [L], look-ups of each layer in between, which the uses add up to.

    Returns:
        float32 [L * E], estimates; 0 exactly where an expert was not used.
    """
    more = after - before
    more[more < 0.02 + 0.005 * after] = 0.0  # float32 logarithms are no finer
    total = more.sum(axis=1)
    lookups = np.maximum(lookups, 0)  # a count of 32 bits may begin anew
    share = np.divide(lookups, total, out=np.zeros_like(total), where=total > 0)
    uses: NDArray[np.float32] = (more * share[:, None]).astype(np.float32).reshape(-1)
    return uses
