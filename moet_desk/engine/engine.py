"""READ FIRST: the engine thread. It loads a model, takes requests, reads prompts and writes
answers.

One turn of the loop: take commands, admit who fits, read one chunk of one prompt, write one token
of every answer (`decode.Decoder.step`), show a snapshot. All mutable engine state belongs to this
thread; others reach it by the command queue and see it by snapshots and request streams. Torch is
imported here only after the thread runs, so starting the engine does not hold up the first frame.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    ModelInfo,
    RequestStream,
)
from moet_desk.errors import MoetError, fail, without_frames
from moet_desk.telemetry import EngineSnapshot, EngineState, LoadStep

if TYPE_CHECKING:
    from moet_desk.engine.request import ActiveRequest
    from moet_desk.engine.serving import Serving

log = logging.getLogger("moet_desk.engine")

IDLE_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Submit:
    """Command: work on this request."""

    request: ActiveRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command: stop this request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LimitVram:
    """Command: take so many bytes of the card at most."""

    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class Close:
    """Command: stop everything and end the thread."""


Command = Submit | Cancel | LimitVram | Close


def launch(pack: Path, options: EngineOptions) -> Engine:
    """Start the engine thread on a pack; see `handle.start_engine`."""
    return Engine(pack, options)


class Engine:
    """The `EngineHandle` of a real model.

    Attributes written by the engine thread and read by all: `_snapshot`, `_model`, `_error`; each
    is one reference that is swapped.
    """

    def __init__(self, pack: Path, options: EngineOptions) -> None:
        self._pack = pack
        self._options = options
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loaded = threading.Event()
        self._error: MoetError | None = None
        self._model: ModelInfo | None = None
        self._serving: Serving | None = None
        self._snapshot = EngineSnapshot(state=EngineState.LOADING, model=pack.name)
        self._numbers = itertools.count(1)
        self._open: dict[str, RequestStream] = {}
        self._places = threading.Lock()  # of `_open` and `_end`, in `submit`
        self._end: MoetError | None = None  # why no command is taken any more
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- any thread --------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """See `EngineHandle.submit`."""
        serving = self._ready_to_serve()
        stream = self._take_place()
        try:
            active = serving.prepare(request, stream)
            with self._places:  # an engine that ended meanwhile takes no commands any more
                if self._end is not None:
                    raise self._end
                self._commands.put(Submit(active))
        except BaseException:
            self._open.pop(stream.id, None)
            raise
        return stream

    def _take_place(self) -> RequestStream:
        """A place in the queue. Taken before the prompt is encoded, which may take long, so that
        many callers at once do not all find the last one free.
        """
        with self._places:
            n_open = sum(not stream.ended for stream in list(self._open.values()))
            n_waiting = n_open - self._options.max_running
            if n_waiting >= self._options.max_waiting:
                raise fail("MD-ENG-06", n_waiting=n_waiting)
            stream = RequestStream(f"r{next(self._numbers)}", self._cancel)
            self._open[stream.id] = stream
            return stream

    def count_tokens(self, request: GenerateRequest) -> int:
        """See `EngineHandle.count_tokens`."""
        return len(self.encode(request))

    def encode(self, request: GenerateRequest) -> list[int]:
        """See `EngineHandle.encode`."""
        return self._ready_to_serve().encode(request)

    def decode(self, ids: Sequence[int]) -> str:
        """See `EngineHandle.decode`."""
        return self._ready_to_serve().decode(ids)

    def snapshot(self) -> EngineSnapshot:
        """See `EngineHandle.snapshot`."""
        return self._snapshot

    def model(self) -> ModelInfo | None:
        """See `EngineHandle.model`."""
        return self._model

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """See `EngineHandle.wait_ready`."""
        done = self._loaded.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return done

    def limit_vram(self, n_bytes: int | None) -> None:
        """See `EngineHandle.limit_vram`."""
        self._commands.put(LimitVram(n_bytes))

    def close(self) -> None:
        """See `EngineHandle.close`."""
        self._commands.put(Close())
        self._thread.join()

    def _cancel(self, request_id: str) -> None:
        self._commands.put(Cancel(request_id))

    def _ready_to_serve(self) -> Serving:
        if self._end is not None:
            raise self._end
        if self._serving is None:
            raise fail("MD-ENG-07", why=" yet: it is being loaded")
        return self._serving

    # -- engine thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            serving = self._load()
            self._serve(serving)
            self._take_no_more(fail("MD-ENG-07", why=": it was put away"))
            serving.close()
        except MoetError as error:
            self._give_up(error)
        except Exception as error:  # the last stop of this thread: a crash must be shown
            log.exception("the engine thread failed")
            named = self._named(error)
            named.__cause__ = error
            self._give_up(named)
        finally:
            self._loaded.set()

    def _load(self) -> Serving:
        from moet_desk.engine.serving import Serving  # brings in torch

        serving = Serving(self._pack, self._options, show=self._show_loading)
        gc.collect()
        gc.freeze()  # what lives as long as the model need not be looked at again
        self._model = serving.info
        self._snapshot = serving.snapshot(EngineState.READY)
        self._serving = serving
        self._loaded.set()
        return serving

    def _show_loading(self, steps: tuple[LoadStep, ...]) -> None:
        self._snapshot = EngineSnapshot(
            state=EngineState.LOADING, model=self._pack.name, loading=steps
        )

    def _serve(self, serving: Serving) -> None:
        while self._take_commands(serving):
            serving.turn()
            for request_id in serving.take_ended():
                self._open.pop(request_id, None)
            if serving.should_show():
                self._snapshot = serving.snapshot(serving.state())

    def _take_commands(self, serving: Serving) -> bool:
        """Handle what has come in; wait for something if there is no work. False after `Close`."""
        while True:
            try:
                command = self._commands.get(block=not serving.busy, timeout=IDLE_POLL_S)
            except queue.Empty:
                if serving.busy:
                    return True
                serving.idle(time.monotonic())
                self._snapshot = serving.snapshot(EngineState.READY)
                continue
            if isinstance(command, Close):
                return False
            if isinstance(command, Submit):
                serving.add(command.request)
            elif isinstance(command, LimitVram):
                serving.limit_vram(command.n_bytes)
            else:
                serving.cancel(command.request_id)

    def _named(self, error: Exception) -> MoetError:
        from moet_desk.engine.breakdown import breakdown_of  # brings in torch

        found = breakdown_of(error, card=self._snapshot.device or "The graphics card")
        if found is not None:
            return found.error
        return fail("MD-ENG-03", reason=f"{type(error).__name__}: {error}", log="F8")

    def _give_up(self, error: MoetError) -> None:
        """Show a fault and end every open request with it; the handle stays usable for reading."""
        without_frames(error)  # a model that was half loaded is gigabytes
        gc.collect()
        self._error = error
        self._snapshot = EngineSnapshot(
            state=EngineState.FAULT, model=self._pack.name, error=error.to_dict()
        )
        self._take_no_more(error)
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.fail_all(error)
            if error.code != "MD-GPU-07":  # a lost card may not answer; its memory goes with us
                self._release(serving)
        self._open.clear()

    def _release(self, serving: Serving) -> None:
        try:
            serving.release()
        except Exception:  # the fault that is shown is the one that led here
            log.exception("memory could not be released")

    def _take_no_more(self, error: MoetError) -> None:
        """From now on requests are refused with an error; those that nobody looked at get it."""
        with self._places:
            self._end = error
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, Submit):
                    command.request.fail(error)
