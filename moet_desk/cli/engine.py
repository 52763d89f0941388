"""An engine for the commands that answer: opening it with a meter, and asking it.

Owns the blocking side of requests. Runs in the main thread; Ctrl+C stops an answer, not the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moet_desk.cli.output import Meter
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    RequestStream,
    start_engine,
)
from moet_desk.errors import fail
from moet_desk.telemetry import Event, Failed, Finished, LoadStep, TextDelta
from moet_desk.units import show_memory

_LOAD_POLL_S = 0.1
_STOP_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request."""

    text: str
    finished: Finished
    interrupted: bool = False


@contextmanager
def opened_engine(pack: Path, options: EngineOptions, *, quiet: bool) -> Iterator[EngineHandle]:
    """An engine that is ready; closed at the end of the block.

    Raises:
        MoetError: loading failed.
    """
    handle = start_engine(pack, options)
    try:
        wait_ready(handle, quiet=quiet)
        yield handle
    finally:
        handle.close()


def wait_ready(
    handle: EngineHandle, *, quiet: bool, stop: Callable[[], bool] = lambda: False
) -> None:
    """Wait for the model (or for `stop`), showing the steps of loading.

    Raises:
        MoetError: loading failed.
    """
    meter = Meter(quiet=quiet)
    try:
        while not stop() and not handle.wait_ready(_LOAD_POLL_S):
            step = next((step for step in handle.snapshot().loading if not step.finished), None)
            if step is not None:
                meter.show(step.name, step.done, step.total, _figures(step))
    finally:
        meter.close()


def ask(handle: EngineHandle, request: GenerateRequest, on_text: Callable[[str], None]) -> Answer:
    """Have one answer made; `on_text` gets its pieces. Ctrl+C ends it early.

    Raises:
        MoetError: the engine refused or failed the request.
    """
    stream = handle.submit(request)
    texts: list[str] = []

    def take(events: list[Event]) -> Finished | None:
        for event in events:
            if isinstance(event, TextDelta):
                texts.append(event.text)
                on_text(event.text)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                return event
        return None

    try:
        while True:
            stream.wait()
            finished = take(stream.take())
            if finished is not None:
                return Answer("".join(texts), finished)
    except KeyboardInterrupt:
        stream.cancel()
        return Answer("".join(texts), _last_event(stream), interrupted=True)
    finally:
        if not stream.done:
            stream.cancel()


def _last_event(stream: RequestStream) -> Finished:
    while stream.wait(_STOP_WAIT_S):
        for event in stream.take():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return event
    raise fail("MD-ENG-03", reason="It did not stop an answer in time", log="the log folder")


def _figures(step: LoadStep) -> str:
    if step.unit != "bytes":
        return f"{step.done}/{step.total} {step.unit}"
    return f"{show_memory(step.done)} of {show_memory(step.total)}" if step.total else ""
