"""Stop strings in streamed text: found across chunks, holding back only what may still be one.

Pure text work without IO or torch. A `StopScanner` belongs to one request and is used by the engine
thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Cuts a stream of text at the first stop string.

    The first stop is the one that is complete first; of several complete at the same character,
    the longest. Both depend on the text alone, so any chunking gives the same result. Text that
    could be the beginning of a stop is held until the next chunk decides; `flush` releases it at
    the end.
    """

    __slots__ = ("_held", "_longest", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Make a scanner.

        Args:
            stops: the stop strings; empty ones are ignored, they would match everywhere.
        """
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown now, and the stop if one is complete.

        The stop and everything behind it are dropped. After a match nothing more comes out.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the held text; called once when the answer ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """The first position from which the text could go on to become a stop."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
