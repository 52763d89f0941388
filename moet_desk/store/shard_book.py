"""Which shards must be on disk for which piece of work, and what that takes at most.

Pure: no clock, disk or network. The streaming packer and the figures that a person sees before a
download are made by the same code. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class ShardBook:
    """Units of work (rows, dense tensors), each with the shards it needs.

    A shard goes from wanted to landed to free; it is free when every unit that needs it is
    finished. Shards that no unit needs are not wanted.
    """

    def __init__(self, needs: Mapping[int, Iterable[str]]) -> None:
        self._missing: dict[int, int] = {}  # unit -> shards that have not landed
        self._shards: dict[int, tuple[str, ...]] = {}
        self._users: dict[str, set[int]] = {}  # shard -> units that are not finished
        self._landed: set[str] = set()
        for unit, names in needs.items():
            self._shards[unit] = tuple(dict.fromkeys(names))
            self._missing[unit] = len(self._shards[unit])
            for name in self._shards[unit]:
                self._users.setdefault(name, set()).add(unit)

    @property
    def wanted(self) -> list[str]:
        """Shards to bring, by name: the order in which models are cut into files."""
        return sorted(set(self._users) - self._landed)

    @property
    def held(self) -> set[str]:
        """Shards that are on disk and still needed."""
        return set(self._landed)

    def land(self, shard: str) -> list[int]:
        """Note that a shard is there; returns the units that can be worked on now."""
        if shard not in self._users or shard in self._landed:
            return []
        self._landed.add(shard)
        ready = []
        for unit in self._users[shard]:
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                ready.append(unit)
        return sorted(ready)

    def finish(self, units: Iterable[int]) -> list[str]:
        """Note that units are durable; returns the shards that nobody needs any more."""
        free = []
        for unit in units:
            for shard in self._shards.pop(unit):
                users = self._users[shard]
                users.discard(unit)
                if not users:
                    del self._users[shard]
                    self._landed.discard(shard)
                    free.append(shard)
        return sorted(free)


def may_start(n_here: int, window: int, *, idle: bool) -> bool:
    """Whether one more shard may be fetched beside `n_here` that are on disk or on their way.

    With nothing on its way and nothing to pack (`idle`), the work waits for a shard beyond the
    window: a model that is cut so that experts lie in many files needs them all at once.
    """
    return n_here < window or idle


def peak_bytes(needs: Mapping[int, Iterable[str]], sizes: Mapping[str, int], window: int) -> int:
    """A bound on the disk space that shards take while a model streams through `window` of them.

    Which shards are there together depends on which lands first, how many does not: more than the
    window are only when all that were started have landed, and then those there are the ones of a
    beginning of the list that later shards complete. The bound is for that many of the largest.
    """
    book = ShardBook(needs)
    most, wanted = min(window, len(book.wanted)), book.wanted
    for at, name in enumerate(wanted):
        book.finish(book.land(name))
        if at + 1 < len(wanted):
            most = max(most, len(book.held) + 1)
    return sum(sorted((sizes[name] for name in wanted), reverse=True)[:most])


def spans(needs: Mapping[int, Sequence[str]]) -> int:
    """The most shards that one unit needs; 1 or 2 for models that are cut layer by layer."""
    return max((len(set(names)) for names in needs.values()), default=0)
