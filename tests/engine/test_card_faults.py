"""Faults of a card, by class: what each means, who fails, and whether the engine lives on.

The engine here computes on the CPU; what a card would say is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.card_faults import card_fault, is_out_of_memory
from moet_desk.engine.decode import Decoder
from moet_desk.engine.engine import Engine
from moet_desk.engine.handle import EngineOptions, GenerateRequest, Sampling, start_engine
from moet_desk.engine.loader import Core
from moet_desk.engine.serving import Serving
from moet_desk.errors import MoetError
from moet_desk.telemetry import EngineState, Event, Failed, Finished, TextDelta

ILLEGAL = "CUDA error: an illegal memory access was encountered"
LONG = f"{ILLEGAL}\nCUDA kernel errors might be asynchronously reported\nCompile with ..."


@pytest.mark.parametrize(
    ("error", "full", "fault"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), True, ""),
        (RuntimeError("CUDA error: out of memory"), True, "CUDA error: out of memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True,
         "Triton Error [CUDA]: out of memory"),
        (RuntimeError(LONG), False, ILLEGAL),
        (RuntimeError("CUDA driver error: unknown error"), False,
         "CUDA driver error: unknown error"),
        (RuntimeError("shape '[3]' is invalid"), False, ""),
        (RuntimeError(""), False, ""),
        (MemoryError("out of memory"), False, ""),
        (ValueError(ILLEGAL), False, ""),
    ],
)  # fmt: skip
def test_faults__words_of_torch_driver_and_triton__told_apart(
    error: Exception, fault: str, *, full: bool
) -> None:
    assert is_out_of_memory(error) == full
    assert card_fault(error) == fault


@pytest.fixture(scope="module")
def engine(demo_pack: Path) -> Iterator[Engine]:
    yield from started(demo_pack)


@pytest.fixture
def doomed(demo_pack: Path) -> Iterator[Engine]:
    yield from started(demo_pack)


def started(demo_pack: Path) -> Iterator[Engine]:
    handle = start_engine(demo_pack, EngineOptions(save_heat=False, context=64))
    assert isinstance(handle, Engine)
    assert handle.wait_ready(60)
    yield handle
    handle.close()


def ask(engine: Engine) -> list[Event]:
    sampling = Sampling(temperature=0)
    return list(engine.submit(GenerateRequest(prompt="A goat", max_tokens=3, sampling=sampling)))


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def code_of(event: Event) -> str:
    assert isinstance(event, Failed), event
    assert isinstance(event.error, MoetError)
    return event.error.code


def failing(patch: pytest.MonkeyPatch, owner: type, name: str, error: Exception) -> None:
    """The next call of a method meets a fault."""
    intact: Callable[..., Any] = getattr(owner, name)

    def call(*given: Any, **more: Any) -> Any:
        patch.setattr(owner, name, intact)
        raise error

    patch.setattr(owner, name, call)


def test_step__fault_that_ends_one_launch__request_fails_next_one_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = ask(engine)
    assert isinstance(want[-1], Finished)
    failing(monkeypatch, Decoder, "step", RuntimeError("CUDA error: invalid argument"))
    assert code_of(ask(engine)[-1]) == "MD-ENG-04"
    assert text_of(ask(engine)) == text_of(want)


def test_step__card_full__request_fails_with_its_code_and_room_is_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, room = ask(engine), list[bool]()
    monkeypatch.setattr(Serving, "_make_room", lambda self: room.append(True))
    failing(monkeypatch, Decoder, "step", torch.OutOfMemoryError("CUDA out of memory."))
    assert code_of(ask(engine)[-1]) == "MD-GPU-11"
    assert room == [True]
    assert text_of(ask(engine)) == text_of(want)


def test_between_steps__card_full__answers_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, room = ask(engine), list[bool]()
    monkeypatch.setattr(Serving, "_make_room", lambda self: room.append(True))
    failing(monkeypatch, Serving, "_tend_card", RuntimeError("CUDA error: out of memory"))
    assert text_of(ask(engine)) == text_of(want)
    assert room == [True]


@pytest.mark.parametrize(("owner", "name"), [(Decoder, "step"), (Serving, "_tend_card")])
def test_card_lost__in_a_step_or_between__every_request_says_so_and_the_engine_ends(
    doomed: Engine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    engine = doomed
    monkeypatch.setattr(Core, "lost", lambda self: ILLEGAL)
    failing(monkeypatch, owner, name, RuntimeError(LONG))
    try:
        codes = {code_of(ask(engine)[-1])}
    except MoetError as error:  # it was lost while nobody asked
        codes = {error.code}
    assert codes == {"MD-GPU-12"}
    engine._thread.join(20)
    assert not engine._thread.is_alive()
    snapshot = engine.snapshot()
    assert snapshot.state is EngineState.FAULT
    assert snapshot.error is not None
    assert snapshot.error["code"] == "MD-GPU-12"
    assert "illegal memory access was encountered. After that" in snapshot.error["cause"]
    with pytest.raises(MoetError, match="MD-GPU-12"):
        ask(engine)


def test_load__card_fails__said_as_what_it_is(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, Serving, "_describe", RuntimeError(LONG))
    handle = start_engine(demo_pack, EngineOptions(save_heat=False, context=64))
    with pytest.raises(MoetError, match="MD-GPU-12"):
        handle.wait_ready(60)
    handle.close()
