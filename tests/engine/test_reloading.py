"""A model put away and loaded again behind one handle."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    RequestStream,
    Sampling,
    start_engine,
)
from moet_desk.engine.reloading import Reloadable
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import MoetError
from moet_desk.telemetry import EngineState, Finished, FinishReason, TextDelta, VramView

REQUEST = GenerateRequest(prompt="The goat has", max_tokens=6, sampling=Sampling(temperature=0))


class Slow(ScriptedEngine):
    """Takes its time to look at a request, and says whether it was closed meanwhile."""

    def __init__(self) -> None:
        super().__init__(Script(answers=("One.",)))
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.closed = False
        self.closed_inside: bool | None = None

    def submit(self, request: GenerateRequest) -> RequestStream:
        self.entered.set()
        self.go_on.wait(10)
        self.closed_inside = self.closed
        return super().submit(request)

    def close(self) -> None:
        self.closed = True
        super().close()


def calls(engine: Reloadable) -> list[Callable[[], Any]]:
    return [
        lambda: engine.submit(REQUEST),
        lambda: engine.count_tokens(REQUEST),
        lambda: engine.encode(REQUEST),
        lambda: engine.decode([1]),
    ]


def test_unloaded__refuses_and_shows_no_model_until_it_is_loaded() -> None:
    made: list[ScriptedEngine] = []

    def start() -> EngineHandle:
        made.append(ScriptedEngine(Script(answers=("One.",), model="m")))
        return made[-1]

    engine = Reloadable("m", start)
    assert [call() is not None for call in calls(engine)] == [True] * 4
    engine.load()
    assert len(made) == 1
    engine.unload()
    engine.unload()
    for call in calls(engine):
        with pytest.raises(MoetError, match="MD-ENG-07"):
            call()
    assert engine.model() is None
    assert engine.snapshot().state is EngineState.NO_MODEL
    assert engine.wait_ready(0.01) is False
    engine.load()
    assert engine.wait_ready(0.01) is True
    model = engine.model()
    assert model is not None
    assert model.name == "m"
    assert (len(made), len(engine.encode(REQUEST))) == (2, 12)
    engine.close()
    assert engine.model() is None


def test_limit_vram__before_the_model_is_loaded_again__counts_for_it_too() -> None:
    made: list[ScriptedEngine] = []

    def start() -> EngineHandle:
        made.append(ScriptedEngine(Script(vram=VramView(free=9, limit=7))))
        return made[-1]

    engine = Reloadable("m", start)
    engine.unload()
    engine.load()
    assert made[1]._vram == VramView(free=9, limit=7)  # nobody asked for another one
    engine.limit_vram(5)
    assert made[1]._vram == VramView(free=9, limit=5)
    engine.unload()
    engine.limit_vram(None)
    engine.load()
    assert made[2]._vram == VramView(free=9, limit=None)


def test_unload__an_engine_that_froze_what_it_holds__is_freed_all_the_same() -> None:
    gone: list[weakref.ref[Any]] = []

    class Knot(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.me = self
            gone.append(weakref.ref(self))
            gc.collect()
            gc.freeze()

    engine = Reloadable("m", Knot)
    engine.unload()
    assert gone[0]() is None


def test_unload__a_card_was_used__torch_gives_its_cache_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    engine = Reloadable("m", ScriptedEngine)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    engine.unload()
    assert emptied == []
    engine.load()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    engine.unload()
    assert emptied == [True]


def test_unload__a_call_inside__is_waited_for_and_its_stream_ends() -> None:
    slow = Slow()
    engine = Reloadable("m", lambda: slow)
    streams: list[RequestStream] = []
    asking = threading.Thread(target=lambda: streams.append(engine.submit(REQUEST)))
    asking.start()
    assert slow.entered.wait(10)
    leaving = threading.Thread(target=engine.unload)
    leaving.start()
    end = time.monotonic() + 10
    while engine.model() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert not slow.closed
    slow.go_on.set()
    asking.join(10)
    leaving.join(10)
    assert (slow.closed_inside, slow.closed) == (False, True)
    (last,) = [event for event in streams[0] if isinstance(event, Finished)]
    assert last.reason is FinishReason.CANCELLED


def test_real_engine__loaded_again__same_answer_and_the_first_one_is_gone(demo_pack: Path) -> None:
    handles: list[weakref.ref[Any]] = []

    def start() -> EngineHandle:
        handle = start_engine(demo_pack, EngineOptions(save_heat=False))
        handles.append(weakref.ref(handle))
        return handle

    def answer() -> str:
        assert engine.wait_ready(120)
        return "".join(e.text for e in engine.submit(REQUEST) if isinstance(e, TextDelta))

    engine = Reloadable("demo", start)
    first = answer()
    serving = weakref.ref(handles[0]()._serving)  # type: ignore[union-attr]
    engine.unload()
    assert (handles[0](), serving()) == (None, None)
    engine.load()
    assert first
    assert answer() == first
    engine.close()
