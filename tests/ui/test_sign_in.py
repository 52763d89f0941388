"""Signing in to the hub: the dialog comes when the hub asks, and what was refused goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moet_desk.errors import fail
from moet_desk.ui.desk import JobState
from moet_desk.ui.setup_steps import Setup, Step
from moet_desk.ui.widgets.sign_in import SignInDialog
from tests.ui.desk import PULLING, READY
from tests.ui.support import Stage, dump
from tests.ui.test_setup_screen import press

GATED = fail("MD-HUB-02", repo="a/b", page="https://hub.example/a/b")
HIDDEN = fail("MD-HUB-01", host="hub.example", repo="a/b", detail="")
REFUSED = replace(PULLING, state=JobState.PAUSED, error=GATED)


def dialog_open(stage: Stage) -> bool:
    return isinstance(stage.app.screen, SignInDialog)


async def look_up(stage: Stage, pilot: Any) -> str:
    """Name a repository on the last row of the list."""
    await press(stage, pilot, "end", "enter")
    await pilot.press(*"a", "slash", *"b")
    return await press(stage, pilot, "enter")


async def sign_in(stage: Stage, pilot: Any) -> None:
    await pilot.press(*"hf", "underscore", *"right")
    await press(stage, pilot, "enter")


@pytest.mark.asyncio
async def test_wizard__gated_repository__dialog_then_looked_up_again() -> None:
    stage = Stage(setup=Setup(Step.MODEL, Step.MODEL))
    stage.desk.errors["a/b"] = GATED
    async with stage.open() as pilot:
        await stage.threads(pilot)
        screen = await look_up(stage, pilot)
        assert dialog_open(stage)
        assert "https://hub.example/a/b" in screen
        assert "https://hub.example/settings/tokens" in screen
        await pilot.press(*"hf", "underscore", *"no")
        screen = dump(stage.app)
        assert "hf_no" not in screen
        assert "•••••" in screen
        screen = await press(stage, pilot, "enter")
        assert "MD-HUB-05" in screen
        await sign_in(stage, pilot)
        assert not dialog_open(stage)
        assert [what for what in stage.desk.asked if what[0] == "look_up"] == [
            ("look_up", "a/b"), ("look_up", "a/b"),
        ]  # fmt: skip
        assert "▸a/b " in dump(stage.app)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_wizard__not_now__not_asked_again_by_itself() -> None:
    stage = Stage(setup=Setup(Step.MODEL, Step.MODEL))
    stage.desk.errors["a/b"] = GATED
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await look_up(stage, pilot)
        await press(stage, pilot, "escape")
        screen = await press(stage, pilot)
        assert not dialog_open(stage)
        assert "MD-HUB-02" in screen
        await press(stage, pilot, "ctrl+s")
        assert dialog_open(stage)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_wizard__not_found_or_private__only_offered() -> None:
    stage = Stage(setup=Setup(Step.MODEL, Step.MODEL))
    stage.desk.errors["a/b"] = HIDDEN
    async with stage.open() as pilot:
        await stage.threads(pilot)
        screen = await look_up(stage, pilot)
        assert not dialog_open(stage)
        assert "Ctrl+S signs in" in screen
        await press(stage, pilot, "ctrl+s")
        await sign_in(stage, pilot)
        assert "▸a/b " in dump(stage.app)


@pytest.mark.asyncio
async def test_wizard__job_is_refused__goes_on_after_signing_in() -> None:
    stage = Stage(setup=Setup(Step.GET, Step.MODEL, "flash", job="job-1", model="flash"))
    stage.desk.running = (REFUSED,)
    async with stage.open() as pilot:
        await stage.threads(pilot)
        assert dialog_open(stage)
        await press(stage, pilot, "escape")
        assert not dialog_open(stage)
        await press(stage, pilot, "enter")
        assert dialog_open(stage)
        await press(stage, pilot, "enter")  # the terms were accepted meanwhile, no token is needed
        assert not dialog_open(stage)
        assert ("resume", "job-1") in stage.desk.asked
        assert ("sign_in", "") not in stage.desk.asked


@pytest.mark.slow
@pytest.mark.asyncio
async def test_models__job_that_was_refused__asks_before_it_goes_on() -> None:
    stage = Stage()
    stage.desk.running = (REFUSED,)
    stage.desk.packs = (READY,)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "down", "p")
        assert dialog_open(stage)
        await sign_in(stage, pilot)
        assert ("resume", "job-1") in stage.desk.asked
        await press(stage, pilot, "up", "s")
        assert dialog_open(stage)
        screen = await press(stage, pilot, "enter")  # nothing was refused, so nothing is tried
        assert dialog_open(stage)
        assert "Accept its terms" not in screen
        await sign_in(stage, pilot)
        assert not dialog_open(stage)
