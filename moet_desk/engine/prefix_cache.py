"""What the model computed of prompts, kept for the next prompt that begins alike.

A prompt is read in chunks on a fixed grid, and what a chunk leaves in the KV cache depends on the
tokens up to its end, on the rows that read it and on the plan alone. So a chunk can be taken from
here instead of being read again, with the same bits: what is kept changes how soon an answer
begins, never what it says. What answers left is not kept: it was computed row by row, and the same
text read as a prompt rounds differently. The last token of a prompt is always read, because its
scores give the first token.

Owned by the engine thread. Entries of chunks lie in RAM; a `SavedPrefixes` keeps them on disk too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from moet_desk.engine.kv_cache import KvSequence

Entries = NDArray[np.uint8]
"""KV entries of a chunk, all layers: what `KvCache.take_out` gives and `put_in` takes."""


class Saved(Protocol):
    """Where chunks outlive the program. Neither raises: what is not kept is read again."""

    def read(self, key: bytes) -> Entries | None:
        """The entries under a key, flat; None if there are none or they are damaged."""
        ...

    def write(self, key: bytes, entries: Entries) -> None:
        """Keep entries, later if need be; nobody may change them any more."""
        ...


class Pages(Protocol):
    """As much of a `KvCache` as is asked here."""

    def take_out(self, sequence: KvSequence, start: int, count: int) -> Entries: ...

    def put_in(self, sequence: KvSequence, start: int, entries: Entries) -> None: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt that is to be read.

    Attributes:
        ids: its tokens.
        reading: the rows that read it, in a word; chunks are shared only between equal ones.
    """

    ids: Sequence[int]
    reading: str


@dataclass(slots=True)
class PrefixCounters:
    """Chunks since the model was loaded: wanted by a prompt, found, and found on disk."""

    wanted: int = 0
    found: int = 0
    from_disk: int = 0


class PrefixCache:
    """Chunks of prompts by all the tokens up to their end.

    Args:
        identity: everything else that the entries depend on: pack, plan, format, program.
        chunk: tokens of the grid.
        n_bytes: most bytes in RAM; 0 keeps nothing.
        saved: where chunks outlive the program, if anywhere.
    """

    def __init__(
        self, identity: str, *, chunk: int, n_bytes: int, saved: Saved | None = None
    ) -> None:
        self.chunk, self._most, self._saved = chunk, n_bytes, saved
        self.counters = PrefixCounters()
        self.n_bytes = 0
        self._root = blake3(identity.encode()).digest()
        self._kept: OrderedDict[bytes, Entries] = OrderedDict()  # the longest unused one first

    def restore(self, prefix: Prefix, sequence: KvSequence, pages: Pages) -> int:
        """Put the chunks that are known at the beginning of a sequence.

        Returns:
            how many tokens need not be read any more: a multiple of the chunk, less than all.
        """
        n_tokens, used = 0, list[bytes]()
        for key in self._keys(prefix):
            self.counters.wanted += 1
            entries = self._find(key)
            if entries is None:
                break
            self.counters.found += 1
            pages.put_in(sequence, n_tokens, entries)
            n_tokens += self.chunk
            used.append(key)
        sequence.tokens[:] = prefix.ids[:n_tokens]
        for key in reversed(used):  # the beginning is the newest: it is needed by all that follows
            if key in self._kept:
                self._kept.move_to_end(key)
        return n_tokens

    def keep(self, prefix: Prefix, sequence: KvSequence, pages: Pages, *, n_read: int) -> None:
        """Keep the chunk that ends at `n_read` tokens, which were just read, if it is whole and
        does not hold the prompt's last token.
        """
        if not self._most or n_read % self.chunk or not 0 < n_read < len(prefix.ids):
            return
        key = next(key for i, key in enumerate(self._keys(prefix), 1) if i * self.chunk == n_read)
        if key in self._kept:
            return
        entries = pages.take_out(sequence, n_read - self.chunk, self.chunk)
        self._hold(key, entries)
        if self._saved is not None:
            self._saved.write(key, entries)

    def _keys(self, prefix: Prefix) -> Iterator[bytes]:
        """A key for each whole chunk that does not hold the last token."""
        key = blake3(self._root + prefix.reading.encode()).digest()
        for end in range(self.chunk, len(prefix.ids), self.chunk):
            tokens = np.asarray(prefix.ids[end - self.chunk : end], dtype="<u4").tobytes()
            key = blake3(key + tokens).digest()
            yield key

    def _find(self, key: bytes) -> Entries | None:
        held = self._kept.get(key)
        if held is not None or self._saved is None:
            return held
        entries = self._saved.read(key)
        if entries is not None:
            self.counters.from_disk += 1
            self._hold(key, entries)
        return entries

    def _hold(self, key: bytes, entries: Entries) -> None:
        self._kept[key] = entries
        self.n_bytes += entries.nbytes
        while self.n_bytes > self._most:
            _, dropped = self._kept.popitem(last=False)
            self.n_bytes -= dropped.nbytes
