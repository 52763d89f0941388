"""A drive that fails while a step on the device waits for it: requests fail, the engine lives on.

On a GPU with the demo model. Without one the same tests run in the interpreter, on a model of one
MoE layer (slow). Twin: tests/engine/test_faults.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine import serving
from moet_desk.engine.cuda import expert_stream, step
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.engine import Engine
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Quality,
    RequestStream,
    Sampling,
    start_engine,
)
from moet_desk.errors import MoetError
from moet_desk.kernels.triton import fetch
from moet_desk.store.pack_format import BASE_FILE, FINE_FILE
from moet_desk.store.pack_reader import PackReader
from moet_desk.telemetry import Event, Failed, Finished
from moet_desk.units import MIB
from tests.conftest import DEMO, pack_source
from tests.engine.test_faults import events_of, text_of
from tests.engine.tiny_models import TINY, YARN, random_model, save_source
from tests.kernels.triton.slow_drive import slow_drive

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.gpu if ON_GPU else pytest.mark.slow

# Little in RAM and little in slots: every new text needs rows from the file.
SMALL = {
    **TINY, "rope_parameters": YARN, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": None, "n_routed_experts": 128, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
SLOTS = 32 if ON_GPU else 16
PROMPT_TOKENS, ANSWER_TOKENS = (24, 12) if ON_GPU else (4, 3)
WITHIN_S = 10 if ON_GPU else 120


def small_source(folder: Path) -> Path:
    """A random model whose router uses all of its experts, with the demo model's tokenizer."""
    model = random_model(SMALL, 0.25)
    for name, value in model.named_buffers():
        if "bias" in name:
            value.zero_()
    save_source(model, folder)
    for path in DEMO.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder / path.name)
    return folder


def prompt(number: int) -> list[int]:
    """Token ids that no prompt of another number shares."""
    first = 3 + number * PROMPT_TOKENS
    return list(range(first, first + PROMPT_TOKENS))


def submit(engine: Engine, ids: list[int], **more: Any) -> RequestStream:
    fields = {"max_tokens": ANSWER_TOKENS, "sampling": Sampling(temperature=0), **more}
    return engine.submit(GenerateRequest(prompt_ids=ids, ignore_eos=True, **fields))


def ask(engine: Engine, number: int, quality: Quality = Quality.FAST) -> list[Event]:
    return events_of(submit(engine, prompt(number), quality=quality))


def reason_of(event: Event) -> str:
    """What a request that failed on the drive says."""
    assert isinstance(event, Failed), event
    assert isinstance(event.error, MoetError)
    assert event.error.code == "MD-NVME-04"
    return str(event.error.facts["reason"])


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    return pack_source(DEMO if ON_GPU else small_source(folder / "source"), folder / "pack")


@pytest.fixture(scope="module")
def engine(pack: Path) -> Iterator[Engine]:
    options = EngineOptions(
        device="cuda", save_heat=False, kv_format="f32", context=256 if ON_GPU else 64,
        pool_slots=SLOTS, fine_slots=SLOTS, arena_rows=0, max_running=2,
        ram_bytes=10**9, vram_bytes=None if ON_GPU else 10**9,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            cpu = torch.device("cpu")
            patch.setattr(serving, "_load", lambda *given: load_cuda(*given, device=cpu))
        handle = start_engine(pack, options)
        try:
            assert handle.wait_ready(240)
            assert isinstance(handle, Engine)
            yield handle
        finally:
            handle.close()


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> dict[Quality, str]:
    """Answers to prompt 0 before anything went wrong."""
    return {quality: text_of(ask(engine, 0, quality)) for quality in (Quality.FAST, Quality.EXACT)}


@pytest.fixture(autouse=True)
def _no_leak(engine: Engine, wanted: dict[Quality, str]) -> Iterator[None]:
    """After a test the device has as much memory as before it, and all KV pages are free."""
    before = memory_used()
    yield
    assert engine._serving is not None
    core = engine._serving.core
    soon(lambda: core.kv.free_tokens == core.plan.kv_pages * core.kv.page_tokens)
    after = memory_used()
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) < 64 * MIB


def soon(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def memory_used() -> tuple[int, int]:
    """Bytes that tensors have on the device, and bytes that are free there."""
    return (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]) if ON_GPU else (0, 0)


@contextmanager
def reads_that(fault: Callable[[], None]) -> Iterator[None]:
    """Before every read of a row `fault` runs."""
    intact = PackReader._fill

    def faulty(self: PackReader, *given: object) -> None:
        fault()
        intact(self, *given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackReader, "_fill", faulty)
        yield


def broken_drive() -> None:
    raise OSError(errno.EIO, "the drive is gone")


def test_read_error__in_a_prompt__request_fails_and_names_the_expert_next_one_works(
    engine: Engine, wanted: dict[Quality, str]
) -> None:
    with reads_that(broken_drive):
        last = ask(engine, 1)[-1]
    assert reason_of(last) == "the drive is gone"
    assert isinstance(last, Failed)
    assert isinstance(last.error, MoetError)
    assert last.error.facts["expert"] != "?"
    assert text_of(ask(engine, 0)) == wanted[Quality.FAST]


@pytest.mark.parametrize(
    ("name", "quality"), [(BASE_FILE, Quality.FAST), (FINE_FILE, Quality.EXACT)]
)
def test_truncated_pack__while_running__request_fails_next_one_works(
    engine: Engine, pack: Path, wanted: dict[Quality, str], name: str, quality: Quality
) -> None:
    intact = (pack / name).read_bytes()
    with (pack / name).open("r+b") as file:
        file.truncate(4096)
    try:
        last = ask(engine, 2 if quality is Quality.FAST else 3, quality)[-1]
    finally:
        with (pack / name).open("r+b") as file:
            file.write(intact)
    assert "ends before this row" in reason_of(last)
    assert text_of(ask(engine, 0, quality)) == wanted[quality]


def test_no_answer_in_time__prompts_fail_until_the_drive_is_back(
    engine: Engine, wanted: dict[Quality, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    with reads_that(lambda: back.wait(60) or None), monkeypatch.context() as patch:
        patch.setattr(expert_stream, "READ_S", 0.5)
        try:
            for number in (4, 0):  # the second meets the first one's reads
                began = time.monotonic()
                last = ask(engine, number)[-1]
                assert reason_of(last) == "no answer in time"
                assert time.monotonic() - began < WITHIN_S
        finally:
            back.set()
    assert isinstance(ask(engine, 4)[-1], Finished)
    assert text_of(ask(engine, 0)) == wanted[Quality.FAST]
    assert arena_is_whole(engine)


# hot enough to wander: some token soon needs a row that is not there
WANDER = {"sampling": Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)}


def wandering(engine: Engine, number: int) -> RequestStream:
    """A request for a long answer; its prompt is read when this returns."""
    assert engine._serving is not None
    scheduler = engine._serving._scheduler
    writing = len(scheduler.to_write())
    tokens = 200 if ON_GPU else 40
    stream = submit(engine, prompt(number)[:4], max_tokens=tokens, **WANDER)
    soon(lambda: len(scheduler.to_write()) > writing)
    return stream


def test_no_answer_in_time__in_a_step__requests_fail_until_the_drive_is_back(
    engine: Engine, wanted: dict[Quality, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    stream = wandering(engine, 5)
    with reads_that(lambda: back.wait(60) or None), monkeypatch.context() as patch:
        patch.setattr(fetch, "_POLLS", 64)  # the bound where there is no clock
        patch.setattr(step, "SETTLE_S", 0.5)
        patch.setattr(expert_stream, "READ_S", 0.5)
        try:
            assert reason_of(events_of(stream)[-1]) == "no answer in time"
            # it may have all it needs, but the late read could be filling places of its rows
            assert reason_of(ask(engine, 0)[-1]) == "no answer in time"
        finally:
            back.set()
    assert text_of(ask(engine, 0)) == wanted[Quality.FAST]
    assert arena_is_whole(engine)


@pytest.mark.long
def test_slow_drive__steps_that_wait_too_long_are_done_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 4 if ON_GPU else 8

    def wander(number: int, tokens: int) -> list[Event]:
        return events_of(submit(engine, prompt(number)[:4], max_tokens=tokens, **WANDER))

    # on a card a few layers' reads together are too much for one wait, each by itself is not
    with slow_drive(0.4 if ON_GPU else None) as again:
        text = text_of(wander(6, few))
        assert again.count
        monkeypatch.setattr(step, "REPEAT_S", 0.0)
        assert reason_of(wander(7, 40)[-1]) == "no answer in time"
    assert text_of(wander(6, few)) == text
    assert arena_is_whole(engine)


def arena_is_whole(engine: Engine) -> bool:
    """Every place of the arena is free or holds a row that the table names."""
    assert engine._serving is not None
    regions = engine._serving.core.arena._regions.values()
    return all(
        sorted([*region.free, *region.place_of_row.values()]) == list(range(region.places))
        and all(region.table[row] == place for row, place in region.place_of_row.items())
        for region in regions
    )


def test_two_requests_in_one_launch__drive_fails__both_fail_and_the_next_works(
    engine: Engine, wanted: dict[Quality, str]
) -> None:
    streams = [wandering(engine, 6), wandering(engine, 7)]
    with reads_that(broken_drive):
        first, second = [events_of(stream)[-1] for stream in streams]
    assert reason_of(first) == reason_of(second) == "the drive is gone"
    assert text_of(ask(engine, 0)) == wanted[Quality.FAST]
    assert arena_is_whole(engine)
