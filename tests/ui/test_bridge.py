"""The crossing: flush pace, the start of the engine, the reading side of an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from moet_desk.engine.handle import EngineHandle, GenerateRequest, Quality
from moet_desk.engine.scripted import Script, ScriptedEngine, ScriptedFailure
from moet_desk.errors import MoetError, fail
from moet_desk.marked_text import MarkedText
from moet_desk.telemetry import EngineState, LoadStep
from moet_desk.ui.bridge import Bridge, Phase
from moet_desk.ui.clock import Clock
from moet_desk.ui.paces import AnswerPace, FlushPace, PicturePace
from tests.ui.support import NOON, FakePack, HeldClock


def test_flush_pace__slow_then_fast__doubles_and_recovers() -> None:
    pace = FlushPace()
    for expected in (0.2, 0.4, 0.4):
        pace.record(0.05)
        assert pace.period_s == expected
    assert pace.slow
    for expected in (0.2, 0.1, 0.1):
        pace.record(0.015)
        assert pace.period_s == expected
    assert not pace.slow


def test_answer_pace__what_drawing_costs__decides_when_and_how_much_room() -> None:
    now, cpu = [10.0], [0.0]
    pace = AnswerPace(Clock(lambda: NOON, lambda: now[0], lambda: cpu[0]))

    def draw(cost_s: float, *, grew: bool) -> None:
        pace.begin()
        pace.end(grew=grew)
        now[0] += cost_s
        cpu[0] += cost_s
        pace.painted()
        pace.painted()  # nothing was drawn since

    def wait_s(*, in_front: bool) -> float:
        now[0] += 60.0
        assert pace.due(in_front=in_front)
        began = now[0]
        while not pace.due(in_front=in_front):
            now[0] += 0.01
        return now[0] - began

    assert wait_s(in_front=True) == pytest.approx(0.1, abs=0.02)
    assert not pace.skips_turns
    assert wait_s(in_front=False) == pytest.approx(0.45, abs=0.02)
    assert pace.room(40, 4.0, 20) == 0
    for _ in range(12):
        draw(0.0016, grew=False)  # 0.8 % of a core five times a second
        draw(0.0025, grew=True)  # 0.25 % once a second
    assert wait_s(in_front=True) == pytest.approx(0.18, abs=0.02)
    assert pace.skips_turns
    assert pace.room(40, 4.0, 20) == 10
    assert pace.room(400, 4.0, 20) == 20
    assert not pace.slow
    draw(0.05, grew=False)
    draw(0.05, grew=False)
    assert pace.slow
    pace.reset()
    assert not pace.slow
    assert pace.n_flushes == 26
    for _ in range(12):
        draw(0.0038, grew=False)  # 1.9 % of a core five times a second
    assert wait_s(in_front=True) == pytest.approx(0.18, abs=0.02)
    for _ in range(12):
        draw(0.006, grew=False)  # 3 % would be too much, 2 % three times a second is not
    assert wait_s(in_front=True) == pytest.approx(0.27, abs=0.02)
    assert not pace.skips_turns
    assert not pace.slow


def poll_until(bridge: Bridge, phase: Phase, step: Callable[[], None] = lambda: None) -> None:
    wait = threading.Event()
    for _ in range(500):
        if bridge.poll() is phase:
            return
        step()
        wait.wait(0.002)
    raise AssertionError(f"still {bridge.phase}")


def test_bridge__pack_then_load__steps_in_order() -> None:
    engine = ScriptedEngine(Script(load=(LoadStep("Dense layers", total=100, seconds=1.0),)))
    pack = FakePack(
        [{"event": "pack", "done": n, "total": 4, "bytes": n * 10, "rate_bytes_per_s": 5.0}
         for n in (1, 4)]
    )  # fmt: skip
    bridge = Bridge(lambda: engine, pack_job=pack, clock=HeldClock().clock())
    assert bridge.snapshot().state is EngineState.LOADING
    assert bridge.poll() is Phase.PACKING
    step = bridge.steps()[0]
    assert (step.name, step.done, step.total) == ("Pack the model", 1, 4)
    assert bridge.pack_rate == (10, 5.0)
    poll_until(bridge, Phase.LOADING)
    assert [step.name for step in bridge.steps()] == ["Pack the model", "Dense layers"]
    assert bridge.steps()[0].finished
    poll_until(bridge, Phase.READY, lambda: engine.advance(0.5))


def test_bridge__pack_fails__failed_and_no_restart() -> None:
    pack = FakePack([{"event": "pack", "done": 1, "total": 4}], fail("MD-DISK-02", path="p"))
    bridge = Bridge(ScriptedEngine, pack_job=pack)
    poll_until(bridge, Phase.FAILED)
    assert isinstance(bridge.error, MoetError)
    assert bridge.error.code == "MD-DISK-02"
    assert not bridge.can_restart


def test_bridge__engine_does_not_open__named_and_restart_helps() -> None:
    tries: list[EngineHandle] = []

    def open_engine() -> EngineHandle:
        tries.append(ScriptedEngine())
        if len(tries) == 1:
            raise ValueError("broken")
        return tries[-1]

    bridge = Bridge(open_engine, log_dir="/logs")
    poll_until(bridge, Phase.FAILED)
    assert isinstance(bridge.error, MoetError)
    assert (bridge.error.code, bridge.error.facts["log"]) == ("MD-BUG-01", "/logs")
    bridge.restart()
    poll_until(bridge, Phase.READY)


def test_bridge__load_failure__error_of_the_snapshot() -> None:
    engine = ScriptedEngine(Script(load_failure=ScriptedFailure("MD-PACK-04", {"n_bad": 1})))
    bridge = Bridge(lambda: engine)
    poll_until(bridge, Phase.FAILED, lambda: engine.advance(0.1))
    assert not isinstance(bridge.error, MoetError)
    assert bridge.error is not None
    assert bridge.error["code"] == "MD-PACK-04"


def test_bridge__close_while_packing__cancels_the_job() -> None:
    pack = FakePack([{"event": "pack", "done": 1, "total": 4}] * 2)
    bridge = Bridge(ScriptedEngine, pack_job=pack)
    bridge.close()
    assert pack.cancelled


def test_live_answer__pulls__clean_text_counts_and_rate() -> None:
    time = HeldClock()
    engine = ScriptedEngine(Script(answers=("one \x1b[31mtwo three four five",), tokens_per_s=10))
    bridge = Bridge(lambda: engine, clock=time.clock())
    poll_until(bridge, Phase.READY)
    live = bridge.submit(GenerateRequest(prompt="x"))
    text = MarkedText()
    while not live.ended:
        time.seconds += 0.1
        engine.advance(0.1)
        text += live.pull()[1]
    assert text == live.text == MarkedText("one two three four five")
    assert live.finished is not None
    assert live.n_tokens == live.finished.usage.completion_tokens
    assert live.first_token_s is not None
    assert live.tok_per_s is not None
    assert abs(live.tok_per_s - 10) < 0.5


@pytest.mark.parametrize("rerun_every", [2, 5])
def test_live_answer__many_pieces_in_one_pull__as_one_by_one(rerun_every: int) -> None:
    script = Script(
        answers=("one two \x1b[1mthree " * 9,), tokens_per_s=10, rerun_every=rerun_every
    )
    found = []
    for step_s in (0.1, 0.7, 30.0):
        time, engine = HeldClock(), ScriptedEngine(script)
        bridge = Bridge(partial(lambda engine: engine, engine), clock=time.clock())
        poll_until(bridge, Phase.READY)
        live = bridge.submit(GenerateRequest(prompt="x", quality=Quality.BALANCED))
        text = MarkedText()
        while not live.ended:
            time.seconds += step_s
            engine.advance(step_s)
            text += live.pull()[1]
        assert text == live.text
        found.append((text, live.n_tokens, live.n_reran, pytest.approx(live.rerun_s)))
    assert found[0] == found[1] == found[2]
    assert found[0][1] > 20


def test_live_answer__balanced__marks_of_the_clean_text_tokens_and_seconds() -> None:
    time = HeldClock()
    script = Script(answers=("one \x1b[31mtwo three four five",), tokens_per_s=10, rerun_every=2)
    engine = ScriptedEngine(script)
    bridge = Bridge(lambda: engine, clock=time.clock())
    poll_until(bridge, Phase.READY)
    live = bridge.submit(GenerateRequest(prompt="x", quality=Quality.BALANCED))
    text = MarkedText()
    while not live.ended:
        engine.advance(0.1)
        text += live.pull()[1]
    assert text == live.text
    assert text.text == "one two three four five"
    assert [text.text[start:end] for start, end in text.marks] == ["one", "mtwo"[1:], " four"]
    usage = live.usage
    assert usage is not None
    assert live.n_reran == usage.rerun_tokens == 3
    assert usage.rerun_s == pytest.approx(0.15)
    assert live.rerun_s == pytest.approx(0.15)


class _Recorded(ScriptedEngine):
    """An engine that writes down when it is opened and closed."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self._name, self._log = name, log
        log.append(f"open {name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")
        super().close()


def test_bridge__no_model__idle_until_one_is_loaded() -> None:
    log: list[str] = []
    bridge = Bridge(None)
    assert bridge.poll() is Phase.IDLE
    assert bridge.snapshot().state is EngineState.NO_MODEL
    with pytest.raises(MoetError, match="MD-ENG-07"):
        bridge.submit(GenerateRequest(prompt="x"))
    bridge.load(lambda: _Recorded("a", log))
    poll_until(bridge, Phase.READY)
    assert (log, bridge.loads) == (["open a"], 1)


def test_bridge__another_model__old_one_is_closed_before_the_new_one_opens() -> None:
    log: list[str] = []
    bridge = Bridge(lambda: _Recorded("a", log))
    poll_until(bridge, Phase.READY)
    bridge.load(lambda: _Recorded("b", log))
    assert bridge.phase is Phase.OPENING
    poll_until(bridge, Phase.READY)
    assert log == ["open a", "close a", "open b"]
    bridge.close()
    assert log[-1] == "close b"


def test_bridge__another_model_while_one_opens__it_is_closed_first() -> None:
    log: list[str] = []
    may_open = threading.Event()

    def slow() -> EngineHandle:
        may_open.wait(5)
        return _Recorded("a", log)

    bridge = Bridge(slow)
    bridge.poll()
    bridge.load(lambda: _Recorded("b", log))
    bridge.poll()
    may_open.set()
    poll_until(bridge, Phase.READY)
    assert log == ["open a", "close a", "open b"]


def test_bridge__another_model_after_a_failed_one__pack_job_is_dropped() -> None:
    pack = FakePack([{"event": "pack", "done": 1, "total": 4}] * 9)
    bridge = Bridge(ScriptedEngine, pack_job=pack)
    bridge.poll()
    bridge.load(ScriptedEngine)
    assert pack.cancelled
    poll_until(bridge, Phase.READY)
    assert bridge.can_restart


def test_picture_pace__costs__as_often_as_the_budget_allows() -> None:
    pace = PicturePace(0.25)
    assert pace.due(10.0)
    assert not pace.due(10.2)
    assert pace.due(10.24)  # a timer may fire a little early
    for _ in range(20):
        pace.record(0.0075)
    assert pace.period_s == pytest.approx(0.5, abs=0.001)
    assert [pace.due(20.0), pace.due(20.4), pace.due(20.46)] == [True, False, True]
    for _ in range(20):
        pace.record(9.0)
    assert pace.period_s == pytest.approx(1.0, abs=0.001)
    for _ in range(20):
        pace.record(0.001)
    assert pace.period_s == pytest.approx(0.25, abs=0.001)
