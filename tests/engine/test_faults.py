"""What goes wrong while serving: each request fails with its own error, and the engine lives on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from moet_desk import hardware
from moet_desk.engine import heat
from moet_desk.engine.engine import Engine
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Quality,
    RequestStream,
    Sampling,
    start_engine,
)
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import BASE_FILE, FINE_FILE, HEAT_FILE
from moet_desk.telemetry import (
    EngineState,
    Event,
    Failed,
    Finished,
    FinishReason,
    TextDelta,
    Tier,
)

GREEDY = Sampling(temperature=0)


def hello(**more: object) -> GenerateRequest:
    fields = {"messages": [{"role": "user", "content": "Hello"}], "sampling": GREEDY, **more}
    return GenerateRequest(**fields)  # type: ignore[arg-type]


def events_of(stream: RequestStream) -> list[Event]:
    return list(stream)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.fixture
def own_pack(demo_pack: Path, tmp_path: Path) -> Path:
    """A copy of the demo pack that a test may damage."""
    return Path(shutil.copytree(demo_pack, tmp_path / "demo"))


@pytest.fixture(scope="module")
def handle(demo_pack: Path):  # type: ignore[no-untyped-def]
    engine = start_engine(demo_pack, EngineOptions(save_heat=False, context=512, max_waiting=3))
    assert engine.wait_ready(120)
    yield engine
    engine.close()


def flip_rows(path: Path, stride: int, rows: range) -> None:
    """Change one bit in each of some rows of a pack file."""
    with path.open("r+b") as file:
        for row in rows:
            file.seek(row * stride + 100)
            byte = file.read(1)[0]
            file.seek(row * stride + 100)
            file.write(bytes([byte ^ 16]))


def test_damaged_row__met_in_decode__request_fails_and_names_it_next_one_works(
    own_pack: Path,
) -> None:
    engine = start_engine(
        own_pack, EngineOptions(save_heat=False, arena_rows=0, pool_slots=4, fine_slots=4)
    )
    try:
        assert engine.wait_ready(120)
        good = events_of(engine.submit(hello(max_tokens=8)))
        assert isinstance(good[-1], Finished)
        intact = (own_pack / BASE_FILE).read_bytes()
        flip_rows(own_pack / BASE_FILE, 57344, range(0, 256))
        bad = events_of(engine.submit(hello(max_tokens=8)))[-1]
        assert isinstance(bad, Failed)
        assert isinstance(bad.error, MoetError)
        assert bad.error.code == "MD-PACK-04"
        assert "layer" in bad.error.cause
        (own_pack / BASE_FILE).write_bytes(intact)
        again = events_of(engine.submit(hello(max_tokens=8)))
        assert text_of(again) == text_of(good)
        assert engine.snapshot().counters.read_errors >= 1
    finally:
        engine.close()


def test_truncated_pack__while_running__read_error_then_recovery(own_pack: Path) -> None:
    engine = start_engine(own_pack, EngineOptions(save_heat=False, arena_rows=0, fine_slots=4))
    try:
        assert engine.wait_ready(120)
        intact = (own_pack / FINE_FILE).read_bytes()
        with (own_pack / FINE_FILE).open("r+b") as file:
            file.truncate(4096)
        bad = events_of(engine.submit(hello(quality=Quality.EXACT, max_tokens=4)))[-1]
        assert isinstance(bad, Failed)
        assert isinstance(bad.error, MoetError)
        assert bad.error.code == "MD-NVME-04"
        fast = events_of(engine.submit(hello(max_tokens=4)))[-1]
        assert isinstance(fast, Finished)  # the 2-bit rows are whole
        with (own_pack / FINE_FILE).open("r+b") as file:
            file.write(intact)
        exact = events_of(engine.submit(hello(quality=Quality.EXACT, max_tokens=4)))[-1]
        assert isinstance(exact, Finished)
    finally:
        engine.close()


def test_prompt_longer_than_context__refused_with_both_numbers(handle: EngineHandle) -> None:
    with pytest.raises(MoetError) as caught:
        handle.submit(hello(messages=[{"role": "user", "content": "word " * 600}]))
    assert caught.value.code == "MD-API-03"
    assert caught.value.facts["context"] == 512
    assert caught.value.facts["prompt_tokens"] > 512


def test_answer_reaching_the_context__ends_with_length(handle: EngineHandle) -> None:
    prompt = [{"role": "user", "content": "word " * 480}]
    events = events_of(handle.submit(hello(messages=prompt, ignore_eos=True)))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.LENGTH
    assert last.usage.prompt_tokens + last.usage.completion_tokens == 512


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(top_p=0)}, "top_p"),
        ({"sampling": Sampling(min_p=2)}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 40}, "top_logprobs"),
        ({"prompt": "and a prompt"}, "messages"),
        ({"messages": None, "prompt_ids": [99999]}, "prompt_ids"),
        ({"messages": None, "prompt_ids": []}, "prompt_ids"),
    ],
)
def test_bad_parameter__refused_by_name(
    handle: EngineHandle, fields: dict[str, object], parameter: str
) -> None:
    with pytest.raises(MoetError) as caught:
        handle.submit(hello(**fields))
    assert caught.value.code == "MD-API-04"
    assert caught.value.facts["parameter"] == parameter


def test_cancel__while_writing__ends_at_once_and_frees_the_place(handle: EngineHandle) -> None:
    stream = handle.submit(hello(ignore_eos=True))
    stream.wait(10)
    stream.cancel()
    began = time.monotonic()
    last = events_of(stream)[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    assert time.monotonic() - began < 2
    deadline = time.monotonic() + 2
    while handle.snapshot().requests_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert handle.snapshot().requests_running == 0


def test_cancel__while_waiting__never_runs(handle: EngineHandle) -> None:
    running = [handle.submit(hello(ignore_eos=True)) for _ in range(4)]
    waiting = handle.submit(hello())
    waiting.cancel()
    last = events_of(waiting)[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    assert last.usage.completion_tokens == 0
    for stream in running:
        stream.cancel()
        events_of(stream)


def test_queue_full__next_request_refused__later_ones_welcome(handle: EngineHandle) -> None:
    streams = [handle.submit(hello(ignore_eos=True)) for _ in range(7)]
    with pytest.raises(MoetError) as caught:
        handle.submit(hello())
    assert caught.value.code == "MD-ENG-06"
    for stream in streams:
        stream.cancel()
        events_of(stream)
    assert isinstance(events_of(handle.submit(hello(max_tokens=3)))[-1], Finished)


def test_nan_in_the_model__request_fails_closed(own_pack: Path) -> None:
    engine = start_engine(own_pack, EngineOptions(save_heat=False))
    try:
        assert engine.wait_ready(120)
        assert isinstance(engine, Engine)
        assert engine._serving is not None
        norm = engine._serving.core.model._final_norm
        saved = norm.clone()
        norm.fill_(float("nan"))
        bad = events_of(engine.submit(hello()))[-1]
        assert isinstance(bad, Failed)
        assert isinstance(bad.error, MoetError)
        assert bad.error.code == "MD-ENG-04"
        norm.copy_(saved)
        assert isinstance(events_of(engine.submit(hello(max_tokens=3)))[-1], Finished)
    finally:
        engine.close()


def test_bug_in_a_step__only_that_request_fails(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(demo_pack, EngineOptions(save_heat=False))
    try:
        assert engine.wait_ready(120)
        assert isinstance(engine, Engine)
        assert engine._serving is not None

        def broken(*_: object) -> torch.Tensor:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(engine._serving.core.decoder, "logits", broken)
            bad = events_of(engine.submit(hello()))[-1]
        assert isinstance(bad, Failed)
        assert "a bug" in str(bad.error)
        assert isinstance(events_of(engine.submit(hello(max_tokens=3)))[-1], Finished)
    finally:
        engine.close()


def test_loading__no_pack_there__error_from_wait_ready_and_snapshot(tmp_path: Path) -> None:
    engine = start_engine(tmp_path / "nothing", EngineOptions())
    with pytest.raises(MoetError) as caught:
        engine.wait_ready(60)
    assert engine.snapshot().state is EngineState.FAULT
    assert engine.snapshot().error == caught.value.to_dict()
    with pytest.raises(MoetError):
        engine.submit(hello())
    engine.close()


def test_loading__cuda_asked_for_and_no_card__refused(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = hardware.Accelerator(missing="the driver shows none")
    monkeypatch.setattr(hardware, "probe_accelerator", lambda: none)
    engine = start_engine(demo_pack, EngineOptions(device="cuda"))
    with pytest.raises(MoetError) as caught:
        engine.wait_ready(60)
    assert caught.value.code == "MD-GPU-01"
    engine.close()


def test_loading__auto_and_no_card__the_cpu_and_the_log_says_why(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moet_desk.engine")
    old = hardware.Accelerator("NVIDIA X", (7, 5), has_triton=True, can_compile=True)
    monkeypatch.setattr(hardware, "probe_accelerator", lambda: old)
    engine = start_engine(demo_pack, EngineOptions(device="auto", save_heat=False))
    try:
        assert engine.wait_ready(120)
        assert engine.snapshot().device == "cpu"
        assert "computing on cpu: NVIDIA X: it is too old" in caplog.text
    finally:
        engine.close()


def test_loading__too_little_ram__refused_with_numbers(demo_pack: Path) -> None:
    engine = start_engine(demo_pack, EngineOptions(ram_bytes=300 * 2**20))
    with pytest.raises(MoetError) as caught:
        engine.wait_ready(60)
    assert caught.value.code == "MD-RAM-01"
    assert "MiB" in caught.value.cause
    engine.close()


@pytest.mark.parametrize("content", [b"", b"{", b'{"rows": [[999999, 1.0], [-4, 2.0]]}', b"[1]"])
def test_heat_file__unusable__ignored(own_pack: Path, content: bytes) -> None:
    (own_pack / HEAT_FILE).write_bytes(content)
    engine = start_engine(own_pack, EngineOptions())
    assert engine.wait_ready(120)
    assert isinstance(events_of(engine.submit(hello(max_tokens=3)))[-1], Finished)
    engine.close()
    assert (own_pack / HEAT_FILE).stat().st_size > 20  # replaced by a good one on the way out


def test_heat__saved_at_the_end__hottest_experts_preloaded_next_time(own_pack: Path) -> None:
    engine = start_engine(own_pack, EngineOptions(pool_slots=60))
    assert engine.wait_ready(120)
    events_of(engine.submit(hello(max_tokens=60, ignore_eos=True)))
    engine.close()
    saved = heat.read(own_pack)
    assert len(saved) > 100
    assert [value for _, value in saved] == sorted((value for _, value in saved), reverse=True)
    engine = start_engine(own_pack, EngineOptions(pool_slots=60, save_heat=False))
    assert engine.wait_ready(120)
    cache = engine.snapshot().cache
    assert cache is not None
    in_slots = {
        layer * cache.n_experts + expert
        for layer, tiers in enumerate(cache.tiers)
        for expert, tier in enumerate(tiers)
        if tier == Tier.BASE
    }
    engine.close()
    assert in_slots == {row for row, _ in saved[:60]}


def test_close__while_requests_run__they_end_as_cancelled(demo_pack: Path) -> None:
    engine = start_engine(demo_pack, EngineOptions(save_heat=False))
    assert engine.wait_ready(120)
    stream = engine.submit(hello(ignore_eos=True))
    stream.wait(10)
    engine.close()
    last = events_of(stream)[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
