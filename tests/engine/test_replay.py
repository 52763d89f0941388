"""Playing a recording: pictures, stories and words at every place; and making one of an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from moet_desk.engine.handle import GenerateRequest, RequestStream
from moet_desk.engine.playback import Question, Rewound
from moet_desk.engine.recorder import TraceRecorder
from moet_desk.engine.replay import ReplayEngine
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.engine.trace_file import Ended, Trace, read_trace
from moet_desk.errors import MoetError
from moet_desk.telemetry import (
    EngineState,
    Event,
    Finished,
    FinishReason,
    LoadStep,
    Story,
    TextDelta,
    Tier,
)
from tests.engine.test_trace_file import write

ASK = GenerateRequest(prompt="Why?")


@dataclass
class Held:
    seconds: float = 50.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Held:
    return Held()


@pytest.fixture
def player(tmp_path: Path, clock: Held) -> ReplayEngine:
    write(tmp_path / "a.mdtrace")  # pictures at 0, 0.5, 1 and 2 s; words at 0.1, 1.1 and 1.2 s
    return ReplayEngine(read_trace(tmp_path / "a.mdtrace"), clock=clock)


def story(player: ReplayEngine, row: int) -> Story:
    view = player.snapshot().cache
    assert view is not None
    assert view.stories is not None
    return view.stories.of(row)


def tier(player: ReplayEngine) -> Tier:
    view = player.snapshot().cache
    assert view is not None
    return Tier(view.tiers[1][1])  # row 9


def texts(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def answer(player: ReplayEngine) -> RequestStream:
    return player.submit(ASK)


def test_replay__time_passes__pictures_and_stories_follow(
    player: ReplayEngine, clock: Held
) -> None:
    assert (tier(player), player.position_s) == (Tier.RAM, 0.0)
    clock.seconds += 0.6
    player.advance()
    assert tier(player) is Tier.FINE
    assert (story(player, 9).fetches, story(player, 9).uses) == (2, 0.0)
    assert (story(player, 9).fetched_s, story(player, 9).source) == (0.5, Tier.RAM)
    clock.seconds += 5.0
    player.advance()
    assert (player.position_s, player.ended) == (2.0, True)
    assert (story(player, 9).uses, story(player, 15).uses) == (2.0, 300.0)
    view = player.snapshot().cache
    assert view is not None
    assert view.heat[1][1] == 7
    assert view.hit_share == (None, 0.934)
    assert player.snapshot().counters.lookups == 5


def test_replay__going_back__the_same_as_playing_from_the_beginning(
    player: ReplayEngine, clock: Held
) -> None:
    clock.seconds += 0.6
    player.advance()
    seen, view = player.snapshot(), player.snapshot().cache
    clock.seconds += 5.0
    player.advance()
    player.seek(0.6)
    assert player.advance()[0] == Rewound()
    again = player.snapshot().cache
    assert view is not None
    assert again is not None
    assert (again.tiers, again.heat, again.stories) == (view.tiers, view.heat, view.stories)
    assert player.snapshot().counters == seen.counters
    assert all(new > old for new, old in zip(again.generations, view.generations, strict=True))


def test_replay__nothing_changed_in_a_layer__its_generation_stays(
    player: ReplayEngine, clock: Held
) -> None:
    first = player.snapshot().cache
    clock.seconds += 0.6
    player.advance()
    second = player.snapshot().cache
    assert first is not None
    assert second is not None
    assert second.generations[0] == first.generations[0]
    assert second.generations[1] == first.generations[1] + 1


def test_pause_and_speed__the_place_does_not_jump(player: ReplayEngine, clock: Held) -> None:
    clock.seconds += 0.4
    player.change_speed(1)
    assert (player.speed, player.position_s) == (2.0, pytest.approx(0.4))
    clock.seconds += 0.2
    assert player.position_s == pytest.approx(0.8)
    player.pause(True)
    clock.seconds += 9.0
    assert (player.position_s, player.paused, player.ended) == (pytest.approx(0.8), True, False)
    player.pause(False)
    player.change_speed(-9)
    clock.seconds += 0.4
    assert (player.speed, player.position_s) == (0.25, pytest.approx(0.9))
    player.change_speed(9)
    assert player.speed == 8.0
    player.seek(99.0)
    assert player.ended
    player.pause(False)  # at the end: from the beginning
    assert (player.position_s, player.advance()[0]) == (0.0, Rewound())
    player.seek(-3.0)
    assert player.position_s == 0.0


def test_words__the_recorded_question__gets_the_recorded_answer(
    player: ReplayEngine, clock: Held
) -> None:
    with pytest.raises(MoetError) as caught:
        answer(player)
    assert caught.value.code == "MD-TRACE-04"
    clock.seconds += 0.2
    assert player.advance() == [Question("Why?", "fast")]
    stream = answer(player)
    assert stream.take() == []
    clock.seconds += 1.4
    assert player.advance() == []
    events = stream.take()
    assert texts(events) == "So."
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].usage.completion_tokens) == (FinishReason.STOP, 2)
    with pytest.raises(MoetError):
        answer(player)


def test_words__going_back__ends_the_open_answer_and_asks_again(
    player: ReplayEngine, clock: Held
) -> None:
    clock.seconds += 0.5
    player.advance()
    stream = answer(player)
    player.seek(0.15)
    assert player.advance() == [Rewound(), Question("Why?", "fast")]
    (ended,) = stream.take()
    assert isinstance(ended, Finished)
    assert ended.reason is FinishReason.CANCELLED
    again = answer(player)
    player.seek(2.0)
    player.advance()
    assert texts(again.take()) == "So."
    player.close()
    assert again.take() == []


def test_words__closed_meanwhile__the_answer_ends(player: ReplayEngine, clock: Held) -> None:
    clock.seconds += 0.5
    player.advance()
    stream = answer(player)
    player.close()
    (ended,) = stream.take()
    assert isinstance(ended, Finished)


def test_end__recorded_in_the_middle_of_an_answer__nothing_is_written_any_more(
    tmp_path: Path, clock: Held
) -> None:
    write(tmp_path / "a.mdtrace")
    trace = read_trace(tmp_path / "a.mdtrace")
    assert isinstance(trace.words[-1], Ended)
    writing = [
        replace(frame.snapshot, state=EngineState.WRITING, requests_running=1)
        for frame in trace.frames
    ]
    frames = [
        msgspec.structs.replace(frame, snapshot=snapshot)
        for frame, snapshot in zip(trace.frames, writing, strict=True)
    ]
    player = ReplayEngine(Trace(trace.header, frames, trace.words[:-1]), clock=clock)
    clock.seconds += 1.5
    player.advance()
    stream = answer(player)
    assert player.snapshot().state is EngineState.WRITING
    clock.seconds += 1.0
    player.advance()
    assert (player.snapshot().state, player.snapshot().requests_running) == (EngineState.READY, 0)
    said, ended = stream.take()
    assert isinstance(said, TextDelta)
    assert isinstance(ended, Finished)
    assert ended.reason is FinishReason.CANCELLED
    player.advance()
    assert stream.take() == []
    player.seek(0.5)
    player.advance()
    assert player.snapshot().state is EngineState.WRITING


@pytest.mark.parametrize("name", ["count_tokens", "encode"])
def test_handle__anything_that_needs_a_model__says_that_none_is_here(
    player: ReplayEngine, name: str
) -> None:
    with pytest.raises(MoetError) as caught:
        getattr(player, name)(ASK)
    assert caught.value.code == "MD-TRACE-04"
    with pytest.raises(MoetError):
        player.decode([1])
    assert player.wait_ready()
    model = player.model()
    assert model is not None
    assert model.name == "m"


def test_recording__says_what_where_and_when(player: ReplayEngine) -> None:
    what = player.recording
    assert (what.model, what.date, what.machine) == ("m", "2026-11-30", "?")
    assert (what.length_s, what.made_up, what.has_words) == (2.0, False, True)


# -- making one ------------------------------------------------------------------------------


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(Script(answers=("one two three",), tokens_per_s=1e4))
    engine.advance(1.0)
    return engine


def test_recorder__a_question__pictures_and_words_that_can_be_played(
    engine: ScriptedEngine, tmp_path: Path, clock: Held
) -> None:
    path = tmp_path / "b.mdtrace"
    recorder = TraceRecorder(engine, path, {"cpu": "some cpu"}, period_s=0.01)
    watched = recorder.watch(engine)
    asked = GenerateRequest(messages=[{"role": "user", "content": "Count."}])
    stream = watched.submit(asked)
    engine.advance(9.0)
    assert texts(stream.take()) == "one two three"
    recorder.close()
    recorder.close()
    trace = read_trace(path)
    assert len(trace.frames) >= 2
    assert trace.header.model == engine.model()
    assert (trace.header.exact, trace.header.machine["cpu"]) == (False, "some cpu")
    player = ReplayEngine(trace, clock=clock)
    player.seek(99.0)
    assert player.advance() == [Question("Count.", "fast")]
    assert texts(player.submit(asked).take()) == "one two three"
    now, then = engine.snapshot().cache, player.snapshot().cache
    assert now is not None
    assert then is not None
    assert (then.tiers, then.heat) == (now.tiers, now.heat)


def test_recorder__disk_full__the_answer_goes_on_and_no_file_is_left(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = TraceRecorder(engine, tmp_path / "b.mdtrace", {}, period_s=9.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder._writer._gzip, "write", full)
    stream = recorder.watch(engine).submit(GenerateRequest(prompt="Count."))
    engine.advance(9.0)
    assert texts(stream.take()) == "one two three"
    with pytest.raises(MoetError) as caught:
        recorder.close()
    assert caught.value.code == "MD-TRACE-05"
    assert "No space left" in caught.value.cause
    assert list(tmp_path.iterdir()) == []


def test_recorder__no_model_yet__refused(tmp_path: Path) -> None:
    slow = Script(load=(LoadStep("Load", seconds=1.0),))
    with pytest.raises(MoetError) as caught:
        TraceRecorder(ScriptedEngine(slow), tmp_path / "b.mdtrace", {})
    assert caught.value.code == "MD-ENG-07"
