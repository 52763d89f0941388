"""The only crossing between the engine, the pack job and the screens.

It pulls: the screens call it on timers (text 10 times a second, gauges twice) and it reads
streams and snapshots; nothing is ever pushed into a widget. It owns the start (pack, open, load)
and the reading side of one answer. It knows no widget. All runs on the UI thread, but for
`open_engine`, which gets its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

from moet_desk.engine.handle import (
    EngineHandle,
    GenerateRequest,
    ModelInfo,
)
from moet_desk.errors import MoetError, fail
from moet_desk.errors.disk import unexpected
from moet_desk.telemetry import (
    EngineSnapshot,
    EngineState,
    LoadStep,
)
from moet_desk.ui.clock import Clock, system_clock
from moet_desk.ui.live_answer import LiveAnswer


class PackJob(Protocol):
    """A pack being made, usually by a child process. Read from the UI thread, never blocking."""

    @property
    def finished(self) -> bool:
        """True when the pack is complete or the job has failed."""
        ...

    @property
    def error(self) -> MoetError | None:
        """Why the job failed, None while it runs or when it went well."""
        ...

    def poll(self) -> list[dict[str, Any]]:
        """Events since the last call, oldest first.

        `{"event": "pack", "done": rows, "total": rows, "bytes": n, "rate_bytes_per_s": r}`; other
        events are ignored.
        """
        ...

    def cancel(self) -> None:
        """Stop; finished rows are kept."""
        ...


class Phase(Enum):
    """How far the start has come."""

    IDLE = "idle"  # no model was chosen yet
    PACKING = "packing"
    OPENING = "opening"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class Bridge:
    """Starts the engine (after the pack job, if there is one) and hands out what it shows.

    Without `open_engine` it waits for `load`, which also puts another model in the place of one.
    `poll` moves the start on and is called by the gauge timer.
    """

    def __init__(
        self,
        open_engine: Callable[[], EngineHandle] | None,
        *,
        pack_job: PackJob | None = None,
        clock: Clock | None = None,
        log_dir: str = "",
    ) -> None:
        self.clock = clock or system_clock()
        self._log_dir = log_dir
        self._open_engine = open_engine
        self._pack_job = pack_job
        self._handle: EngineHandle | None = None
        self._opening: _Opening | None = None
        self._pack_step: LoadStep | None = None
        self._pack_rate = 0.0
        self._pack_bytes = 0
        self._since_s = self.clock.monotonic()
        self.loads = 0  # how often `load` was called
        self.is_recording = False  # what the engine shows was recorded earlier
        self._leaving: EngineHandle | None = None  # closed before the next one opens
        if pack_job is not None:
            self.phase = Phase.PACKING
        else:
            self.phase = Phase.OPENING if open_engine is not None else Phase.IDLE
        self.error: MoetError | Mapping[str, Any] | None = None

    # -- start ---------------------------------------------------------------------------------

    def poll(self) -> Phase:
        """Move the start on by what has happened since the last call. Never blocks."""
        match self.phase:
            case Phase.PACKING:
                self._poll_pack()
            case Phase.OPENING:
                self._poll_opening()
            case Phase.LOADING | Phase.READY:
                self._poll_engine()
            case Phase.IDLE | Phase.FAILED:
                pass
        return self.phase

    def _poll_pack(self) -> None:
        job = self._pack_job
        if job is None:
            self.phase = Phase.OPENING
            return
        for event in job.poll():
            if event.get("event") == "pack":
                self._pack_step = LoadStep(
                    "Pack the model", done=int(event["done"]), total=int(event["total"]),
                    unit="rows",
                )  # fmt: skip
                self._pack_bytes = int(event.get("bytes", 0))
                self._pack_rate = float(event.get("rate_bytes_per_s") or 0.0)
        if job.error is not None:
            self._fail(job.error)
        elif job.finished:
            self.phase = Phase.OPENING
            seconds = self.clock.monotonic() - self._since_s
            step = self._pack_step or LoadStep("Pack the model")
            self._pack_step = LoadStep(
                step.name, done=step.total, total=step.total, unit=step.unit,
                seconds=seconds, finished=True,
            )  # fmt: skip

    def _poll_opening(self) -> None:
        if self._opening is None:
            if self._open_engine is None:
                self.phase = Phase.IDLE
                return
            self._opening = _Opening(self._open_engine, self._leaving)
            self._leaving = None
        if self._opening.error is not None:
            self._fail(unexpected(self._opening.error, log=self._log_dir))
        elif self._opening.handle is not None:
            self._handle = self._opening.handle
            self.phase = Phase.LOADING
            self._poll_engine()

    def _poll_engine(self) -> None:
        snapshot = self.snapshot()
        if snapshot.state is EngineState.FAULT:
            unnamed = fail("MD-ENG-03", reason="It gave no reason", log=self._log_dir)
            self._fail(snapshot.error or unnamed)
        elif snapshot.state not in (EngineState.LOADING, EngineState.NO_MODEL):
            self.phase = Phase.READY

    def _fail(self, error: MoetError | Mapping[str, Any]) -> None:
        self.phase = Phase.FAILED
        self.error = error

    def restart(self) -> None:
        """After a failure: open the engine again. A failed pack job cannot be restarted here."""
        self.close()
        self._handle, self._opening, self.error = None, None, None
        self._since_s = self.clock.monotonic()
        self.phase = Phase.OPENING

    def load(self, open_engine: Callable[[], EngineHandle]) -> None:
        """Put another model in the place of the one that is there, whose answers stop.

        The old engine closes before the new one opens: both at once may not fit. A pack job of the
        start is stopped and can go on later. A model that is just being opened is closed as soon as
        it is there.
        """
        if self._pack_job is not None and not self._pack_job.finished:
            self._pack_job.cancel()
        before = self._opening if self._handle is None else None
        self._leaving, self._handle = self._handle or self._leaving, None
        self._pack_job, self._pack_step, self.error = None, None, None
        self.loads += 1
        self.is_recording = False
        self._open_engine = open_engine if before is None else before.then(open_engine)
        self._opening = None
        self._since_s = self.clock.monotonic()
        self.phase = Phase.OPENING

    @property
    def can_restart(self) -> bool:
        """Whether `restart` could help: only the engine failed, and its card can be reached from
        this process.
        """
        record = self.error.to_dict() if isinstance(self.error, MoetError) else self.error or {}
        if record.get("code") == "MD-GPU-07":
            return False
        return self._pack_job is None or self._pack_job.error is None

    # -- what it shows -------------------------------------------------------------------------

    def elapsed_s(self) -> float:
        """Seconds since the start began."""
        return self.clock.monotonic() - self._since_s

    def steps(self) -> tuple[LoadStep, ...]:
        """The lines of the loading block, the pack job's first."""
        pack = () if self._pack_step is None else (self._pack_step,)
        if self._pack_job is not None and self._pack_step is None:
            pack = (LoadStep("Pack the model"),)
        opening = () if self._handle is not None else (LoadStep("Start the engine"),)
        loading = self.snapshot().loading if self._handle is not None else ()
        return (*pack, *opening, *loading)

    @property
    def pack_rate(self) -> tuple[int, float]:
        """Bytes packed so far and bytes per second."""
        return self._pack_bytes, self._pack_rate

    def snapshot(self) -> EngineSnapshot:
        """The engine's newest snapshot; before it is open, one that says so."""
        if self._handle is not None:
            return self._handle.snapshot()
        states = {Phase.FAILED: EngineState.FAULT, Phase.IDLE: EngineState.NO_MODEL}
        return EngineSnapshot(state=states.get(self.phase, EngineState.LOADING))

    def model(self) -> ModelInfo | None:
        """The loaded model, None before it is loaded."""
        return None if self._handle is None else self._handle.model()

    @property
    def engine(self) -> EngineHandle | None:
        """The engine, None before it is open."""
        return self._handle

    # -- answers -------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> LiveAnswer:
        """Start an answer.

        Raises:
            MoetError: as `EngineHandle.submit`; MD-ENG-07 before the engine is open.
        """
        if self._handle is None:
            why = "" if self.phase is Phase.IDLE else " yet"
            raise fail("MD-ENG-07", why=why)
        stream = self._handle.submit(request)
        return LiveAnswer(
            stream, self.clock.monotonic, quality=request.quality, log_dir=self._log_dir
        )

    def limit_vram(self, n_bytes: int | None) -> None:
        """Have the model take so much of a card's memory at most; one that is being opened too."""
        opening = None if self._opening is None else self._opening.handle
        handle = self._handle or opening
        if handle is not None:
            handle.limit_vram(n_bytes)

    def count_tokens(self, text: str) -> int | None:
        """Tokens of a text; None without a model. May take a second: call it in a thread."""
        handle = self._handle
        if handle is None or handle.model() is None:
            return None
        return handle.count_tokens(GenerateRequest(prompt=text))

    def close(self) -> None:
        """Stop the pack job (it can resume) and close the engine."""
        if self._pack_job is not None and not self._pack_job.finished:
            self._pack_job.cancel()
        if self._handle is None and self._opening is not None:
            self._handle = self._opening.handle
        for handle in (self._leaving, self._handle):
            if handle is not None:
                handle.close()


class _Opening:
    """`open_engine` running in a thread, because it may import torch (seconds).

    `leaving` is closed first: the memory of two models may not be there.
    """

    def __init__(
        self, open_engine: Callable[[], EngineHandle], leaving: EngineHandle | None = None
    ) -> None:
        self.handle: EngineHandle | None = None
        self.error: BaseException | None = None
        self._open_engine = open_engine
        self._leaving = leaving
        self._thread = threading.Thread(target=self._run, name="open-engine", daemon=True)
        self._thread.start()

    def then(self, open_engine: Callable[[], EngineHandle]) -> Callable[[], EngineHandle]:
        """What opens another model once this one is open, and closed again."""

        def open_next() -> EngineHandle:
            self._thread.join()
            if self.handle is not None:
                self.handle.close()
            return open_engine()

        return open_next

    def _run(self) -> None:
        try:
            if self._leaving is not None:
                self._leaving.close()
            self.handle = self._open_engine()
        except Exception as error:  # the UI thread shows whatever it was
            self.error = error
