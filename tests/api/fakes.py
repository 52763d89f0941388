"""A fake engine whose answers the test writes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moet_desk.engine.handle import GenerateRequest, ModelInfo, RequestStream
from moet_desk.engine.parsers.answers import AnswerFormat, PromptEnd
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import (
    EngineSnapshot,
    EngineState,
    Event,
    Failed,
    Finished,
    FinishReason,
    TextDelta,
    Usage,
)

MODEL = ModelInfo(
    name="fake",
    family="deepseek_v3",
    context=2048,
    model_context=4096,
    vocab=100,
    n_layers=2,
    n_moe_layers=1,
    n_experts=8,
    top_k=2,
    identity="0123456789abcdef",
)


@dataclass(frozen=True)
class Pause:
    """The engine computes for so long, or until it is cancelled."""

    seconds: float


class FakeEngine:
    """Pushes the events of `script` from a thread; counts what runs."""

    def __init__(self) -> None:
        self._running: dict[str, threading.Event] = {}
        self._ids = itertools.count()
        self.reset()

    def reset(self) -> None:
        """As new: answers "Hello" in two pieces."""
        self.refusal: Exception | None = None
        self.fault: MoetError | None = None
        self.info: ModelInfo | None = MODEL
        self.state = EngineState.READY
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.answers, self.prompt_end = AnswerFormat(), PromptEnd.UNSAID
        self.most = 1000  # requests in all before the queue is full
        self.script: Sequence[Event | Pause] = ()
        self.answer("Hel", "lo")

    @property
    def busy(self) -> int:
        return len(self._running)

    def answer(self, *texts: str, reason: FinishReason = FinishReason.STOP) -> None:
        deltas = [TextDelta(text) for text in texts]
        self.script = [*deltas, Finished(reason, Usage(7, len(texts)), "fast")]

    def submit(self, request: GenerateRequest) -> RequestStream:
        if self.refusal is not None:
            raise self.refusal
        if len(self.requests) >= self.most:
            raise fail("MD-ENG-06", n_waiting=self.most)
        self.requests.append(request)
        name = f"r{next(self._ids)}"
        stop = self._running[name] = threading.Event()
        stream = RequestStream(name, self._cancel)
        stream.answers, stream.prompt_end = self.answers, self.prompt_end
        stream.prompt_tokens = 7
        threading.Thread(target=self._play, args=(stream, stop, self.script), daemon=True).start()
        return stream

    def _cancel(self, name: str) -> None:
        stop = self._running.get(name)
        if stop is not None:
            stop.set()

    def _play(
        self, stream: RequestStream, stop: threading.Event, script: Sequence[Event | Pause]
    ) -> None:
        for item in script:
            if isinstance(item, Pause):
                stop.wait(item.seconds)
            if stop.is_set():
                self.cancelled += 1
                del self._running[stream.id]
                stream.push(Finished(FinishReason.CANCELLED, Usage(7, 1), "fast"))
                return
            if isinstance(item, Finished | Failed):
                del self._running[stream.id]
            if not isinstance(item, Pause):
                stream.push(item)

    def snapshot(self) -> EngineSnapshot:
        error = None if self.fault is None else self.fault.to_dict()
        return EngineSnapshot(
            state=self.state, model="fake", requests_running=self.busy, error=error
        )

    def model(self) -> ModelInfo | None:
        return self.info

    def count_tokens(self, request: GenerateRequest) -> int:
        return 7

    def encode(self, request: GenerateRequest) -> list[int]:
        return list(request.prompt_ids or (request.prompt or "").encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        pass


def eventually(holds: Callable[[], bool], timeout_s: float = 1.0) -> bool:
    """Whether a condition comes true within the time."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class InstantEngine(ScriptedEngine):
    """Checks messages and ids like the real one and has the answer ready at once."""

    def __init__(self, *answers: str) -> None:
        script = Script(
            answers=answers or ("One two.",), tokens_per_s=1e6, prompt_tok_per_s=1e9,
            n_layers=1, n_experts=2, top_k=1, model="fake", context=4096,
        )  # fmt: skip
        super().__init__(script)

    @property
    def busy(self) -> int:
        return self.snapshot().requests_running

    def submit(self, request: GenerateRequest) -> RequestStream:
        stream = super().submit(request)
        self.advance(1.0)
        return stream
