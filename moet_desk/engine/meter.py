"""Speeds of the engine, from what its steps took. Owned by the engine thread; pure arithmetic."""

from __future__ import annotations

from collections import deque
from statistics import median

RATE_WINDOW_S = 3.0
STEP_WINDOW = 64


class Meter:
    """Counts steps and tokens and keeps the last few seconds of both."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.step_s = 0.0
        self.prefill_rate: float | None = None
        self._reading_s = 0.0
        self._recent: deque[tuple[float, float, float, int, int]] = deque(maxlen=4096)

    def note_step(
        self, now: float, *, step_s: float, wait_s: float, n_tokens: int, n_answers: int = 1
    ) -> None:
        """A decode step of some answers ended at `now` (seconds of a monotonic clock)."""
        self.steps += 1
        self.tokens += n_tokens
        self.step_s += step_s
        self._recent.append((now, step_s, wait_s, n_tokens, n_answers))

    def note_read(self, n_tokens: int, seconds: float) -> None:
        """Work on a prompt chunk ended; `n_tokens` is 0 while the chunk is not done."""
        self._reading_s += seconds
        if n_tokens:
            self.prefill_rate = n_tokens / self._reading_s if self._reading_s > 0 else None
            self._reading_s = 0.0

    def decode_rate(self, now: float) -> float | None:
        """Tokens per second of decoding over the last 3 s; time without steps does not count."""
        recent = [entry for entry in self._recent if now - entry[0] <= RATE_WINDOW_S]
        seconds = sum(entry[1] for entry in recent)
        return sum(entry[3] for entry in recent) / seconds if seconds > 0 else None

    def tokens_per_step(self, now: float) -> float | None:
        """Tokens that a step gave an answer, over the last 3 s."""
        recent = [entry for entry in self._recent if now - entry[0] <= RATE_WINDOW_S]
        n_answers = sum(entry[4] for entry in recent)
        return sum(entry[3] for entry in recent) / n_answers if n_answers else None

    def step_ms(self) -> float | None:
        """Median of the last 64 steps, milliseconds."""
        last = list(self._recent)[-STEP_WINDOW:]
        return median(entry[1] for entry in last) * 1e3 if last else None

    def wait_share(self) -> float | None:
        """Part of the last 64 steps that was spent waiting for experts."""
        last = list(self._recent)[-STEP_WINDOW:]
        seconds = sum(entry[1] for entry in last)
        return sum(entry[2] for entry in last) / seconds if seconds > 0 else None
