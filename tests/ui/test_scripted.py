"""The engine that plays a script: same script, same events; failures, cancel and moving tiers."""

from __future__ import annotations

import threading

import pytest

from moet_desk.engine.handle import EngineHandle, GenerateRequest
from moet_desk.engine.scripted import Script, ScriptedEngine, ScriptedFailure
from moet_desk.errors import MoetError
from moet_desk.telemetry import (
    EngineState,
    Failed,
    Finished,
    FinishReason,
    LoadStep,
    PrefillProgress,
    TextDelta,
    Tier,
)

ASK = GenerateRequest(messages=[{"role": "user", "content": "hello " * 40}])


def play(engine: ScriptedEngine, *, step_s: float) -> list[object]:
    stream = engine.submit(ASK)
    events: list[object] = []
    while not stream.done:
        engine.advance(step_s)
        events += stream.take()
    return events


def texts(events: list[object]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def test_scripted__same_script__same_events_and_pictures() -> None:
    first, second = ScriptedEngine(Script(seed=3)), ScriptedEngine(Script(seed=3))
    assert play(first, step_s=0.1) == play(second, step_s=0.1)
    assert first.snapshot() == second.snapshot()
    assert ScriptedEngine(Script(seed=4)).snapshot().cache != first.snapshot().cache


def test_scripted__any_step__whole_answer_after_the_prompt() -> None:
    script = Script(answers=("Some words, then more.",))
    for step_s in (0.01, 0.1, 5.0):
        events = play(ScriptedEngine(script), step_s=step_s)
        assert texts(events) == "Some words, then more."
        assert isinstance(events[0], PrefillProgress)
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.STOP
        assert last.usage.decode_s == pytest.approx(last.usage.completion_tokens / 40, rel=0.3)


def test_scripted__cancel__keeps_the_text_so_far() -> None:
    engine = ScriptedEngine()
    stream = engine.submit(ASK)
    engine.advance(1.0)
    stream.cancel()
    engine.advance(0.1)
    events = stream.take()
    assert texts(list(events))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.CANCELLED


def test_scripted__failure__after_its_tokens() -> None:
    failure = ScriptedFailure("MD-ENG-04", {"reason": "because"}, after_tokens=5)
    events = play(ScriptedEngine(Script(failures={0: failure})), step_s=0.1)
    assert sum(e.n_tokens for e in events if isinstance(e, TextDelta)) == 5
    last = events[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, MoetError)
    assert last.error.code == "MD-ENG-04"


def test_scripted__loading__refuses_until_loaded() -> None:
    engine = ScriptedEngine(Script(load=(LoadStep("a", total=10, seconds=1), LoadStep("b"))))
    with pytest.raises(MoetError, match="MD-ENG-07"):
        engine.submit(ASK)
    engine.advance(0.5)
    assert engine.snapshot().loading[0].done == 5
    engine.advance(0.6)
    assert engine.snapshot().state is EngineState.READY
    assert engine.model() is not None


def test_scripted__prompt_longer_than_context__refused_with_numbers() -> None:
    with pytest.raises(MoetError, match="MD-API-03"):
        ScriptedEngine(Script(context=32)).submit(ASK)


def test_scripted__cache__generations_grow_only_where_rows_changed() -> None:
    engine = ScriptedEngine()
    stream = engine.submit(ASK)
    engine.advance(0.5)
    before = engine.snapshot().cache
    engine.advance(0.026)
    after = engine.snapshot().cache
    assert before is not None
    assert after is not None
    for i in range(len(before.layers)):
        same = before.tiers[i] == after.tiers[i] and before.heat[i] == after.heat[i]
        assert (before.generations[i] == after.generations[i]) == same
    stream.cancel()


def test_scripted__long_play__slots_never_exceed_the_pool() -> None:
    engine = ScriptedEngine(Script(pool_share=0.2))
    play(engine, step_s=0.5)
    view, sizes = engine.snapshot().cache, engine.snapshot().sizes
    assert view is not None
    in_slots = sum(tier >= Tier.BASE for row in view.tiers for tier in row)
    assert in_slots == sizes.base_slots_used <= sizes.base_slots
    counters = engine.snapshot().counters
    tiers = counters.hits_base + counters.hits_fine + counters.from_ram + counters.from_nvme
    assert counters.lookups == tiers > 0


def test_scripted__started__runs_in_its_own_thread_and_closes() -> None:
    engine: EngineHandle = ScriptedEngine(Script(answers=("hi",), tokens_per_s=500)).start(0.002)
    events = list(engine.submit(ASK))
    assert isinstance(events[-1], Finished)
    engine.close()
    assert not any(thread.name == "engine" for thread in threading.enumerate())
