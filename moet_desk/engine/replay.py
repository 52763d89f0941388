"""A recording behind the engine's handle: the screens show it as they would show the engine.

It computes no answer: `submit` hands out the recorded one when the recording has come to its
question, and refuses anything else. Time passes in `advance`, which the screens call. UI thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moet_desk.engine.handle import GenerateRequest, ModelInfo, RequestStream
from moet_desk.engine.ledger import Ledger, moves
from moet_desk.engine.playback import SPEEDS, Cue, Question, Recording, Rewound
from moet_desk.engine.trace_file import UNKNOWN, Asked, Changes, Frame, Said, Trace, unpack
from moet_desk.errors import fail
from moet_desk.telemetry import (
    CacheView,
    EngineSnapshot,
    EngineState,
    Finished,
    FinishReason,
    TextDelta,
    Usage,
)


class ReplayEngine:
    """Plays a recording; an `EngineHandle` and a `Playback` in one.

    Args:
        trace: what to play.
        clock: seconds that only grow.
    """

    def __init__(self, trace: Trace, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace, self._clock = trace, clock
        self._start_s = trace.frames[0].t_s
        self._picture = _Picture(trace)
        self._place_s, self._since = 0.0, clock()  # the place at that time of the clock
        self._speed, self._paused = 1.0, False
        self._words_done = 0
        self._stream: RequestStream | None = None  # of the answer that is being said
        self._asked: deque[RequestStream] = deque()  # not submitted yet
        self._quality = ""
        self._cues: list[Cue] = []
        self._snapshot = self._picture.show(0)

    # -- Playback ------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording:
        """What is played."""
        header = self._trace.header
        machine = header.machine.get("gpu") or header.machine.get("cpu") or "?"
        return Recording(
            model=header.model.name,
            machine=str(machine),
            date=header.date[:10],
            length_s=self._trace.length_s,
            made_up=header.made_up,
            has_words=bool(self._trace.words),
            note=header.note,
        )

    @property
    def position_s(self) -> float:
        """See `Playback`."""
        if self._paused:
            return self._place_s
        place_s = self._place_s + (self._clock() - self._since) * self._speed
        return min(self._trace.length_s, place_s)

    @property
    def speed(self) -> float:
        """See `Playback`."""
        return self._speed

    @property
    def paused(self) -> bool:
        """See `Playback`."""
        return self._paused

    @property
    def ended(self) -> bool:
        """See `Playback`."""
        return self.position_s >= self._trace.length_s

    def advance(self) -> list[Cue]:
        """See `Playback`."""
        place_s = self.position_s
        times = self._picture.times
        self._snapshot = self._picture.show(int(np.searchsorted(times, place_s, "right")) - 1)
        self._speak(place_s)
        if self.ended:
            self._come_to_rest()
        cues, self._cues = self._cues, []
        return cues

    def _come_to_rest(self) -> None:
        """Behind its end nothing is written any more, even if it was cut off in an answer."""
        self.close()
        if self._snapshot.state in (EngineState.READING, EngineState.WRITING):
            self._snapshot = replace(
                self._snapshot, state=EngineState.READY, requests_running=0, requests_waiting=0
            )

    def pause(self, paused: bool) -> None:
        """See `Playback`."""
        if not paused and self.ended:
            self.seek(0.0)
        self._hold()
        self._paused = paused

    def seek(self, position_s: float) -> None:
        """See `Playback`."""
        before = self.position_s
        self._place_s = min(max(0.0, position_s), self._trace.length_s)
        self._since = self._clock()
        if self._place_s < before:
            self._rewind()

    def change_speed(self, steps: int) -> None:
        """See `Playback`."""
        self._hold()
        at = SPEEDS.index(self._speed) + steps
        self._speed = SPEEDS[min(max(0, at), len(SPEEDS) - 1)]

    def _hold(self) -> None:
        """Count from here on, so that what changes does not change the place."""
        self._place_s, self._since = self.position_s, self._clock()

    # -- words ---------------------------------------------------------------------------------

    def _rewind(self) -> None:
        for stream in (self._stream, *self._asked):
            if stream is not None and not stream.ended:
                stream.push(Finished(FinishReason.CANCELLED, Usage(0, 0), self._quality))
        self._stream, self._words_done = None, 0
        self._asked.clear()
        self._cues = [Rewound()]

    def _speak(self, place_s: float) -> None:
        words = self._trace.words
        while self._words_done < len(words):
            word = words[self._words_done]
            if word.t_s - self._start_s > place_s:
                return
            self._words_done += 1
            if isinstance(word, Asked):
                self._stream = RequestStream(f"recorded-{self._words_done}", lambda _: None)
                self._asked.append(self._stream)
                self._quality = word.quality
                self._cues.append(Question(word.text, word.quality))
            elif self._stream is None or self._stream.ended:
                continue
            elif isinstance(word, Said):
                self._stream.push(TextDelta(word.text, n_tokens=word.n_tokens))
            else:
                self._stream.push(Finished(word.reason, word.usage, self._quality))

    # -- EngineHandle --------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """The recorded answer to the question that is due. Raises MD-TRACE-04 if none is."""
        if not self._asked:
            raise fail("MD-TRACE-04")
        return self._asked.popleft()

    def count_tokens(self, request: GenerateRequest) -> int:
        """Raises MD-TRACE-04: no tokenizer is here."""
        raise fail("MD-TRACE-04")

    def encode(self, request: GenerateRequest) -> list[int]:
        """Raises MD-TRACE-04."""
        raise fail("MD-TRACE-04")

    def decode(self, ids: Sequence[int]) -> str:
        """Raises MD-TRACE-04."""
        raise fail("MD-TRACE-04")

    def snapshot(self) -> EngineSnapshot:
        """As it was recorded at this place."""
        return self._snapshot

    def model(self) -> ModelInfo | None:
        """The model that was recorded."""
        return self._trace.header.model

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """At once."""
        return True

    def limit_vram(self, n_bytes: int | None) -> None:
        """A recording takes nothing of a card."""

    def close(self) -> None:
        """End an answer that is being said."""
        if self._stream is not None and not self._stream.ended:
            self._stream.push(Finished(FinishReason.CANCELLED, Usage(0, 0), self._quality))


class _Picture:
    """The cache at one frame, made from all frames before it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        start_s = trace.frames[0].t_s
        self.times = np.array([frame.t_s - start_s for frame in trace.frames])
        self._generations = np.zeros(len(trace.header.layers), np.int64)
        self._clear()

    def _clear(self) -> None:
        n_rows = self._trace.n_rows
        self._at = -1
        self._cells = np.zeros(n_rows, np.uint8)
        self._ledger = Ledger(n_rows, exact=self._trace.header.exact)
        self._snapshot = EngineSnapshot()

    def show(self, frame: int) -> EngineSnapshot:
        """The snapshot at a frame; one before the newest is made from the beginning."""
        if frame == self._at:
            return self._snapshot
        if frame < self._at:
            self._clear()
            self._generations += 1
        while self._at < frame:
            self._at += 1
            self._add(self._trace.frames[self._at], float(self.times[self._at]))
        self._snapshot = self._draw(self._trace.frames[frame], float(self.times[frame]))
        return self._snapshot

    def _add(self, frame: Frame, now_s: float) -> None:
        n_rows, before = self._trace.n_rows, self._tiers()
        rows, values = unpack(frame.cells, n_rows)
        self._cells[rows] = values
        self._generations[np.unique(rows // self._trace.header.n_experts)] += 1
        if self._trace.header.exact:
            fetches, evictions = self._counts(frame.fetches), self._counts(frame.evictions)
        else:
            fetches, evictions = moves(before if self._at else None, self._tiers())
        self._ledger.note(
            now_s, uses=self._counts(frame.uses).astype(np.float32), fetches=fetches,
            evictions=evictions, before=before if self._at else None,
        )  # fmt: skip

    def _tiers(self) -> NDArray[np.uint8]:
        tiers: NDArray[np.uint8] = np.bitwise_and(self._cells, np.uint8(3))
        return tiers

    def _counts(self, changes: Changes) -> NDArray[np.uint32]:
        counts = np.zeros(self._trace.n_rows, np.uint32)
        rows, values = unpack(changes, self._trace.n_rows)
        counts[rows] = values
        return counts

    def _draw(self, frame: Frame, now_s: float) -> EngineSnapshot:
        header = self._trace.header
        grid = self._cells.reshape(len(header.layers), header.n_experts)
        hits = np.frombuffer(frame.hits, "<u2").tolist()
        view = CacheView(
            layers=header.layers,
            n_experts=header.n_experts,
            tiers=tuple(row.tobytes() for row in grid & 3),
            heat=tuple(row.tobytes() for row in grid >> 2),
            generations=tuple(self._generations.tolist()),
            hit_share=tuple(None if hit == UNKNOWN else hit / 1000 for hit in hits),
            stories=self._ledger.stories(now_s),
        )
        return replace(frame.snapshot, cache=view)
