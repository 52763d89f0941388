"""A card that is lost, memory that runs out, clocks that jump: requests end, with their text."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk import hardware
from moet_desk.engine import breakdown, engine, loader, request, serving
from moet_desk.engine.breakdown import breakdown_of
from moet_desk.engine.engine import Engine
from moet_desk.engine.handle import EngineOptions, RequestStream, start_engine
from moet_desk.errors import MoetError, fail
from moet_desk.store.arena import Arena
from moet_desk.telemetry import EngineState, Event, Failed, Finished
from tests.engine.test_faults import events_of, hello, text_of
from tests.faults import (
    MAPS,
    READS,
    ROW_READS,
    Refusal,
    n_open_files,
    opens,
    refuse_here,
)

LOST = torch.AcceleratorError(
    "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in"
)
UNPLUGGED = torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors")
RESUMED = RuntimeError("Triton Error [CUDA]: unknown error")
NO_VRAM = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.99 GiB of"
    " which 18.81 MiB is free. Process 71 has 20 GiB memory in use. Of the allocated memory 1 GiB"
)
NO_RAM = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)"
)
WITHIN_S = 20.0


def found(error: Exception, *, answers: bool) -> tuple[str, bool] | None:
    seen = breakdown_of(error, card="NVIDIA X", answers=lambda: answers)
    return None if seen is None else (seen.error.code, seen.ends_engine)


@pytest.mark.parametrize("error", [LOST, UNPLUGGED, RESUMED])
def test_breakdown__error_of_the_card__ends_the_engine_only_if_the_card_is_silent(
    error: Exception,
) -> None:
    assert found(error, answers=False) == ("MD-GPU-07", True)
    assert found(error, answers=True) is None  # a launch with wrong sizes: a bug, the card is well


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (NO_VRAM, ("MD-GPU-11", False)),
        (NO_RAM, ("MD-RAM-04", False)),
        (MemoryError(), ("MD-RAM-04", False)),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ("MD-RAM-04", False)),
        (RuntimeError("can't start new thread"), ("MD-RAM-04", False)),
        (OSError(errno.EMFILE, "Too many open files", "/a"), ("MD-DISK-04", False)),
        (TimeoutError(), ("MD-DISK-04", False)),
        (fail("MD-PACK-07", path="p", reason="r"), ("MD-PACK-07", False)),
        (RuntimeError("shape mismatch"), None),
        (ValueError("CUDA error: said by nobody who knows"), None),
    ],
)
def test_breakdown__other_errors__end_a_request_whatever_the_card_says(
    error: Exception, want: tuple[str, bool] | None
) -> None:
    assert found(error, answers=False) == want


def test_breakdown__words__say_what_the_driver_said_in_one_line() -> None:
    lost = breakdown_of(LOST, card="NVIDIA X", answers=lambda: False)
    assert lost is not None
    assert lost.error.cause == "NVIDIA X: an illegal memory access was encountered."
    refused = breakdown_of(OSError(errno.EMFILE, "Too many open files", "/a"), card="")
    assert refused is not None
    assert refused.error.cause == "/a: Too many open files."
    full = breakdown_of(NO_VRAM, card="NVIDIA X")
    assert full is not None
    assert full.no_room
    assert "(Tried to allocate 20.00 MiB. GPU 0 has a total" in full.error.cause
    assert "of which 18.81 MiB is free)" in full.error.cause


def test_card_answers__no_card_in_use__is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> None:
        raise LOST

    monkeypatch.setattr(torch.cuda, "synchronize", silent)
    assert breakdown.card_answers()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not breakdown.card_answers()


# -- in a running engine ---------------------------------------------------------------------


@contextmanager
def started(pack: Path, **options: Any) -> Iterator[Engine]:
    options = {"save_heat": False, "context": 512, "max_running": 2, **options}
    handle = start_engine(pack, EngineOptions(**options))
    try:
        assert isinstance(handle, Engine)
        assert handle.wait_ready(120)
        yield handle
    finally:
        handle.close()


@pytest.fixture
def running(demo_pack: Path) -> Iterator[Engine]:
    """One that a test may end."""
    with started(demo_pack) as handle:
        yield handle


@pytest.fixture(scope="module")
def lasting(demo_pack: Path) -> Iterator[Engine]:
    """One that must outlive its tests."""
    with started(demo_pack) as handle:
        yield handle


@pytest.fixture(scope="module")
def whole(lasting: Engine) -> str:
    """The answer when nothing goes wrong."""
    return text_of(events_of(lasting.submit(hello(max_tokens=12, ignore_eos=True))))


def after_some_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, raise_it: Callable[[], None], steps: int = 6
) -> None:
    """From the given step on, steps of decoding fail."""
    assert engine._serving is not None
    decoder = engine._serving.core.decoder
    intact, left = decoder.step, [steps]

    def step(requests: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise_it()
        intact(requests)

    monkeypatch.setattr(decoder, "step", step)


def raising(error: Exception) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def last_of(stream: RequestStream) -> tuple[str, Event]:
    """The text and the last event, which must come in time."""
    events: list[Event] = []
    reader = threading.Thread(target=lambda: events.extend(stream), daemon=True)
    reader.start()
    reader.join(WITHIN_S)
    assert not reader.is_alive(), "this request hangs"
    return text_of(events), events[-1]


def code_of(event: Event) -> str:
    assert isinstance(event, Failed)
    assert isinstance(event.error, MoetError)
    return event.error.code


@pytest.mark.parametrize("error", [LOST, RESUMED], ids=["lost", "after a suspend"])
def test_card_lost__in_an_answer__all_requests_end_with_their_text_and_nothing_hangs(
    running: Engine, whole: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(breakdown, "card_answers", lambda: False)
    after_some_text(running, monkeypatch, raising(error))
    asked = [running.submit(hello(max_tokens=12, ignore_eos=True)) for _ in range(4)]
    ends = [last_of(stream) for stream in asked]
    assert [code_of(event) for _, event in ends] == ["MD-GPU-07"] * 4
    assert ends[0][0]  # the text so far
    assert all(whole.startswith(text) for text, _ in ends)
    assert running.snapshot().state is EngineState.FAULT
    assert (running.snapshot().error or {})["code"] == "MD-GPU-07"
    for call in (lambda: running.submit(hello()), lambda: running.wait_ready(1)):
        with pytest.raises(MoetError) as caught:
            call()
        assert caught.value.code == "MD-GPU-07"
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < 2


def test_card_lost__while_a_picture_is_made__the_same(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running._serving is not None
    monkeypatch.setattr(breakdown, "card_answers", lambda: False)
    residency = running._serving.core.residency
    after_some_text(
        running, monkeypatch, lambda: monkeypatch.setattr(residency, "view", raising(LOST))
    )
    text, last = last_of(running.submit(hello(max_tokens=400, ignore_eos=True)))
    assert code_of(last) == "MD-GPU-07"
    assert text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NO_VRAM, "MD-GPU-11"),
        (NO_RAM, "MD-RAM-04"),
        (MemoryError(), "MD-RAM-04"),
        (LOST, "MD-ENG-04"),  # the card answers: this launch alone went wrong
    ],
    ids=["vram", "ram", "python", "launch"],
)
def test_memory_runs_out__in_an_answer__that_one_fails_and_the_next_is_whole(
    lasting: Engine, whole: str, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    with monkeypatch.context() as patch:
        after_some_text(lasting, patch, raising(error))
        text, last = last_of(lasting.submit(hello(max_tokens=12, ignore_eos=True)))
    assert code_of(last) == code
    assert text
    assert whole.startswith(text)
    assert text_of(events_of(lasting.submit(hello(max_tokens=12, ignore_eos=True)))) == whole
    assert lasting.snapshot().state is not EngineState.FAULT


def test_loading__card_lost_or_full__error_from_the_catalogue(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakdown, "card_answers", lambda: False)
    for error, code in ((NO_VRAM, "MD-GPU-11"), (UNPLUGGED, "MD-GPU-07"), (NO_RAM, "MD-RAM-04")):
        monkeypatch.setattr(serving, "_load", lambda *_, error=error: raising(error)())
        handle = start_engine(demo_pack, EngineOptions())
        with pytest.raises(MoetError) as caught:
            handle.wait_ready(60)
        assert caught.value.code == code
        handle.close()


@pytest.mark.parametrize(
    ("module", "name", "refusal", "code"),
    [
        (serving, "_load", opens(errno.EMFILE), "MD-PACK-07"),
        (serving, "_load", Refusal(READS, errno.EIO), "MD-PACK-07"),
        (serving, "_load", Refusal(ROW_READS, errno.ENODEV), "MD-PACK-07"),  # dense weights
        (loader, "_warm", Refusal(ROW_READS, errno.ENODEV), "MD-NVME-04"),  # rows
        (hardware, "probe", opens(errno.EMFILE), "MD-DISK-04"),
        (loader, "Arena", Refusal(MAPS, errno.ENOMEM), "MD-RAM-04"),
    ],
    ids=str,
)
def test_loading__the_kernel_refuses__error_from_the_catalogue_and_nothing_stays_open(
    demo_pack: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    refusal: Refusal,
    code: str,
) -> None:
    intact, n_files = getattr(module, name), n_open_files()

    def refused(*given: Any, **more: Any) -> Any:
        refuse_here(refusal)
        return intact(*given, **more)

    monkeypatch.setattr(module, name, refused)
    handle = start_engine(demo_pack, EngineOptions(save_heat=False))
    with pytest.raises(MoetError) as caught:
        handle.wait_ready(60)
    assert caught.value.code == code
    handle.close()
    assert n_open_files() == n_files


def test_loading__fails_half_way__its_memory_goes_although_the_error_is_kept(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[weakref.ref[Arena]] = []

    def warm(pack: Path, plan: Any, arena: Arena, *_: Any) -> None:
        arenas.append(weakref.ref(arena))
        raise fail("MD-NVME-04", layer=1, expert=2, path="p", model="m", reason="gone")

    monkeypatch.setattr(loader, "_warm", warm)
    handle = start_engine(demo_pack, EngineOptions(save_heat=False))
    with pytest.raises(MoetError):
        handle.wait_ready(60)
    handle.close()
    gc.collect()
    assert handle.snapshot().state is EngineState.FAULT
    assert [arena() for arena in arenas] == [None]


# -- the drive -------------------------------------------------------------------------------


class Drive:
    """The drive of the pack, which can be unplugged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there = True
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, *given: Any) -> int:
        if not self.is_there:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return self._preadv(*given)


def test_drive__unplugged_in_an_answer__text_stays_and_after_plugging_in_all_is_well(
    demo_pack: Path, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(monkeypatch)
    with started(demo_pack, arena_rows=0, pool_slots=64, fine_slots=4) as handle:
        with monkeypatch.context() as patch:
            after_some_text(handle, patch, lambda: setattr(drive, "is_there", False), steps=3)
            asked = [handle.submit(hello(max_tokens=12, ignore_eos=True)) for _ in range(2)]
            ends = [last_of(stream) for stream in asked]
        assert [code_of(event) for _, event in ends] == ["MD-NVME-04"] * 2
        assert ends[0][0]
        assert all(whole.startswith(text) for text, _ in ends)
        assert code_of(last_of(handle.submit(hello(max_tokens=12)))[1]) == "MD-NVME-04"
        drive.is_there = True
        assert text_of(events_of(handle.submit(hello(max_tokens=12, ignore_eos=True)))) == whole


def test_engine_ends__while_a_request_is_handed_over__it_is_refused_and_not_forgotten(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt was encoded while the engine ended."""
    assert running._serving is not None
    prepare = running._serving.prepare

    def late(*given: Any) -> Any:
        made = prepare(*given)
        running.close()
        return made

    monkeypatch.setattr(running._serving, "prepare", late)
    with pytest.raises(MoetError) as caught:
        running.submit(hello())
    assert caught.value.code == "MD-ENG-07"


# -- clocks ----------------------------------------------------------------------------------


class JumpyClock:
    """`time` whose clock jumps once, as it does where it goes on in a suspend of hours."""

    def __init__(self) -> None:
        self.calls = 0

    def monotonic(self) -> float:
        self.calls += 1
        return time.monotonic() + (8 * 3600.0 if self.calls > 20 else 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_clock_jumps__in_an_answer__same_text_and_figures_that_can_be_shown(
    lasting: Engine, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = JumpyClock()
    for module in (engine, request, serving):
        monkeypatch.setattr(module, "time", clock)
    for _ in range(2):
        text, last = last_of(lasting.submit(hello(max_tokens=12, ignore_eos=True)))
        assert text == whole
        assert isinstance(last, Finished)
        assert last.usage.decode_s >= 0
    assert clock.calls > 20
    rate = lasting.snapshot().decode_tok_per_s
    assert rate is None or rate >= 0
