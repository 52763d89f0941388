"""Recordings for the command line: making one beside an engine, and opening the app on one.

Runs in the main thread.
"""

from __future__ import annotations

import importlib.resources
import platform
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import moet_desk
from moet_desk.cli.context import Invocation
from moet_desk.errors import fail
from moet_desk.telemetry import CPU

if TYPE_CHECKING:
    from moet_desk.engine.handle import EngineHandle
    from moet_desk.engine.recorder import TraceRecorder
    from moet_desk.engine.trace_file import Trace

_SUFFIX = ".mdtrace"
_FIRST = ("deepseek-v4-flash", "demo")
"""Which one is shown when nobody says, the first that there is."""


def open_recording(invocation: Invocation, wanted: str) -> int:
    """Open the app on a recording. Chats of this run are not kept.

    Args:
        invocation: options of this run.
        wanted: a file, the name of a recording that comes with the program, or "" for the best.

    Raises:
        MoetError: MD-TRACE-01 to 03, MD-TERM-03 no terminal, MD-ENG-01 another one runs, MD-CFG-..
    """
    from moet_desk.cli.app import check_terminal, open_pack

    trace = find_trace(wanted)
    check_terminal()
    settings = invocation.load_settings().settings

    from moet_desk import runtime
    from moet_desk.cli.app_endpoint import AppEndpoint
    from moet_desk.cli.desk import AppDesk
    from moet_desk.cli.serve import endpoint_options
    from moet_desk.engine.replay import ReplayEngine
    from moet_desk.store.chats import ChatStore
    from moet_desk.ui import app

    places, engine = invocation.locations, ReplayEngine(trace)
    runtime.tune_interpreter()
    with runtime.instance_lock(places), tempfile.TemporaryDirectory() as folder:
        runtime.start_logging(places, settings.log.level)
        chats = ChatStore.open(Path(folder) / "chats.sqlite3")
        endpoint = AppEndpoint(endpoint_options(settings.endpoint, places))
        open_real = partial(open_pack, invocation, settings, endpoint)
        with runtime.terminal_guard(places):
            return app.run(
                settings,
                places,
                open_engine=lambda: engine,
                pack_job=None,
                chats=chats,
                desk=AppDesk(invocation, settings, open_real),
                endpoint=endpoint,
                model=trace.header.model.name,
                setup=None,
                playback=engine,
                record=start_recording,
            )


def find_trace(wanted: str) -> Trace:
    """A recording by file or name; see `open_recording`. Raises MD-TRACE-01 to 03."""
    from moet_desk.engine.trace_file import read_trace

    shipped = shipped_traces()
    names = [*(name for name in _FIRST if name in shipped), *shipped]
    if not wanted:
        if not names:
            reason = "No recording came with this program"
            raise fail("MD-TRACE-01", reason=reason, path=_SUFFIX, names="none")
        wanted = names[0]
    return read_trace(shipped.get(wanted, Path(wanted)), names=sorted(shipped))


def shipped_traces() -> Mapping[str, Path]:
    """Name and file of each recording that comes with the program."""
    package = Path(str(importlib.resources.files(moet_desk)))
    found: Sequence[Path] = ()
    for root in (package, package.parent):
        found = found or sorted((root / "assets" / "traces").glob(f"*{_SUFFIX}"))
    return {path.stem: path for path in found}


def start_recording(handle: EngineHandle, path: Path) -> TraceRecorder:
    """Record an engine whose model is loaded. Raises MD-TRACE-05."""
    from moet_desk.engine.recorder import TraceRecorder

    return TraceRecorder(handle, path, _machine(handle.snapshot().device))


def _machine(device: str) -> Mapping[str, str | int | float | None]:
    """The computer without what names it or its user."""
    from moet_desk.cli.bench_record import driver, machine

    facts, on_card = machine(), device not in ("", CPU)
    gpu = {"gpu": device if on_card else None, "driver": driver() if on_card else None}
    system = {"os": platform.system()}  # its build may name who runs it
    return gpu | system | {name: facts[name] for name in ("cpu", "cores", "ram_gib")}
