"""The screens on another server: our own endpoint, started in the test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, PromptEnd
from moet_desk.engine.remote import connect
from moet_desk.engine.remote_wire import read_address
from moet_desk.telemetry import TextDelta
from tests.api.fakes import FakeEngine, Pause, eventually
from tests.ui.support import Stage, dump


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    endpoint = Endpoint(engine, EndpointOptions(port=0))
    endpoint.start()
    yield engine, endpoint.address
    endpoint.stop()


def stage_on(address: str) -> Stage:
    stage = Stage(open_engine=lambda: connect(read_address(address)))
    stage.app._no_loading, stage.app.model = "Not in this window.", ""
    return stage


@pytest.mark.asyncio
async def test_chat__answer_error_and_stop(served: tuple[FakeEngine, str]) -> None:
    engine, address = served
    engine.reset()
    engine.answer("Written ", "elsewhere.")
    stage = stage_on(address)
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "Hello")
        live = stage.app.conversation.live
        assert live is not None
        assert eventually(lambda: live._stream.ended, 5)
        await stage.play(pilot, 0.5)
        screen = dump(stage.app)
        assert "Written elsewhere." in screen
        assert "Another server" in screen
        assert address.partition("//")[2] in screen
        assert "waiting" not in screen  # for experts: nothing is known of that
        assert stage.app.conversation.turns[-1].meta["server"] == f"{address}/v1"

        engine.answers, engine.prompt_end = AnswerFormat(think=THINK), PromptEnd.REASONING
        engine.answer("Hm, let me see.", "</think>", "It is four.")
        await stage.ask(pilot, "And this?")
        live = stage.app.conversation.live
        assert live is not None
        assert eventually(lambda: live._stream.ended, 5)
        await stage.play(pilot, 0.5)
        turn = stage.app.conversation.turns[-1]
        assert (turn.thought, turn.text) == ("Hm, let me see.", "It is four.")
        engine.reset()
        engine.script = [TextDelta("Once upon"), Pause(60)]
        await stage.ask(pilot, "A story")
        live = stage.app.conversation.live
        assert live is not None
        assert live._stream.wait(5)
        await stage.play(pilot, 0.5)
        await pilot.press("escape")
        assert eventually(lambda: live._stream.ended, 5)
        await stage.play(pilot, 0.5)
        assert "stopped by you" in dump(stage.app)
        sent = engine.requests[-1].messages
        assert sent is not None
        assert [message["content"] for message in sent][3:] == ["It is four.", "A story"]
        assert eventually(lambda: engine.busy == 0, 5)


@pytest.mark.asyncio
async def test_screens__that_need_a_model_here__say_so(served: tuple[FakeEngine, str]) -> None:
    engine, address = served
    engine.reset()
    stage = stage_on(address)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f3")
        await stage.threads(pilot)
        screen = dump(stage.app)
        assert f"The answers come from {address}/v1" in screen
        assert "without --connect" in screen
        assert "2-bit slot" not in screen
        await pilot.press("f5")
        await stage.threads(pilot)
        assert "No endpoint in this window" in dump(stage.app)
        await pilot.press("f4")
        await stage.threads(pilot)
        await pilot.press("enter")
        await stage.settle(pilot)
        assert "Not in this window." in dump(stage.app)
        assert not [asked for asked in stage.desk.asked if asked[0] == "opener"]
        assert stage.app.bridge.snapshot().remote


@pytest.mark.asyncio
async def test_quality__of_a_server_that_knows_none__is_not_offered(
    served: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, address = served
    engine.reset()
    stage = stage_on(address)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f9")
        await stage.play(pilot, 0.5)
        assert stage.app.conversation.wishes.quality.value == "balanced"  # ours knows them
        info = stage.app.bridge.model()
        monkeypatch.setattr(stage.app.bridge, "model", lambda: replace(info, has_qualities=False))
        await pilot.press("f9")
        await stage.play(pilot, 0.5)
        screen = dump(stage.app)
        assert "The server decides how it computes." in screen
        assert stage.app.conversation.wishes.quality.value == "balanced"
        assert "balanced" not in screen.splitlines()[-2]
