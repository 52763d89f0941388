"""Records a running engine: looks at its snapshots in a thread of its own, beside the engine.

The engine does nothing for it: a snapshot is one reference that it swaps anyway. `watch` also
writes down questions and answers, as the reader takes them. `TraceWriter` owns the file.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from moet_desk import __version__
from moet_desk.engine.forwarding import Forwarding
from moet_desk.engine.handle import EngineHandle, GenerateRequest, RequestStream
from moet_desk.engine.trace_file import PERIOD_S, Asked, Ended, Header, Said, TraceWriter
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import Event, Finished, TextDelta

log = logging.getLogger(__name__)


class TraceRecorder:
    """A recording of one engine from now on until `close`.

    Args:
        handle: the engine; its model is loaded.
        path: of the file, which appears with `close`.
        machine: see `Header`.
        period_s: seconds between two pictures.

    Raises:
        MoetError: MD-TRACE-05 it cannot be written, MD-ENG-07 no model is loaded.
    """

    def __init__(
        self,
        handle: EngineHandle,
        path: Path,
        machine: Mapping[str, str | int | float | None],
        *,
        period_s: float = PERIOD_S,
    ) -> None:
        model, snapshot = handle.model(), handle.snapshot()
        if model is None or snapshot.cache is None:
            raise fail("MD-ENG-07", why=" yet")
        stories = snapshot.cache.stories
        header = Header(
            program=__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine=machine,
            model=model,
            layers=snapshot.cache.layers,
            n_experts=snapshot.cache.n_experts,
            exact=stories is not None and stories.exact,
        )
        self.path = path
        self.problem: MoetError | None = None  # why it stopped early
        self._handle, self._period_s = handle, period_s
        self._writer = TraceWriter(path, header)
        self._began = time.monotonic()
        self._lock = threading.Lock()  # the writer's: pictures and words come from two threads
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._began

    @property
    def full(self) -> bool:
        """Whether the file is as large as it may be."""
        return self._writer.full

    def watch(self, handle: EngineHandle) -> EngineHandle:
        """The same engine; what is asked and answered through it is recorded."""
        return _Watched(handle, self)

    def say(self, message: Asked | Said | Ended) -> None:
        """Write words down. Any thread."""
        with self._lock:
            self._guarded(lambda: self._writer.say(message))

    def close(self) -> None:
        """Take a last picture and give the file its name. A second call does nothing.

        Raises:
            MoetError: MD-TRACE-05, also if that happened earlier; no file is left.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._look()
        if self.problem is None:
            self._guarded(self._writer.close)
        if self.problem is not None:
            self._writer.discard()
            raise self.problem

    def _run(self) -> None:
        self._look()
        while self.problem is None and not self._stop.wait(self._period_s):
            self._look()

    def _look(self) -> None:
        snapshot = self._handle.snapshot()
        with self._lock:
            self._guarded(lambda: self._writer.add(self.seconds, snapshot))

    def _guarded(self, write: Callable[[], None]) -> None:
        if self.problem is not None:
            return
        try:
            write()
        except MoetError as error:  # a full disk must not end the answer
            log.warning("recording stopped: %s", error)
            self.problem = error


class _Watched(Forwarding):
    """An engine whose requests are written down by a recorder."""

    def __init__(self, handle: EngineHandle, recorder: TraceRecorder) -> None:
        super().__init__(handle)
        self._recorder = recorder

    def submit(self, request: GenerateRequest) -> RequestStream:
        stream = self._handle.submit(request)
        recorder = self._recorder
        recorder.say(Asked(recorder.seconds, _question(request), request.quality.value))
        stream.watch(self._note)
        return stream

    def _note(self, event: Event) -> None:
        recorder = self._recorder
        if isinstance(event, TextDelta):
            recorder.say(Said(recorder.seconds, event.text, event.n_tokens))
        elif isinstance(event, Finished):
            recorder.say(Ended(recorder.seconds, event.reason, event.usage))


def _question(request: GenerateRequest) -> str:
    """What was asked last, as people would write it."""
    if request.messages:
        return str(request.messages[-1].get("content") or "")
    return request.prompt or ""
