"""The wizard's decisions: order of the steps, what Enter takes, what is asked, what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moet_desk.errors import fail
from moet_desk.ui.desk import Fit, JobState, Offer, PlanView, PlanWishes
from moet_desk.ui.setup_steps import (
    Setup,
    Step,
    after_plan,
    back,
    change,
    follow_job,
    from_kept,
    obstacle,
    question,
    recommended,
    to_kept,
)
from tests.ui.desk import DEMO, FLASH, GB, HUGE, PULLING, SMALL

PLAN = PlanView((), 32768, (8192, 32768, 65536), 2, (1, 2, 4))


def test_back__every_step__to_the_one_before_and_out() -> None:
    setup = Setup(Step.START, Step.MACHINE, "flash", job="job-1", model="flash")
    seen = []
    while setup is not None:
        seen.append(setup.step)
        assert setup.offer == "flash"
        setup = back(setup)  # type: ignore[assignment]
    assert seen == [Step.START, Step.PLAN, Step.MODEL, Step.MACHINE]
    assert back(Setup(Step.MODEL, Step.MODEL)) is None


def test_back__from_a_running_job__job_stays() -> None:
    assert back(Setup(Step.GET, job="job-1")) == Setup(Step.PLAN, job="job-1")


def test_after_plan__pack_is_here__only_started() -> None:
    assert after_plan(Setup(Step.PLAN), FLASH).step is Step.GET
    assert after_plan(Setup(Step.PLAN), replace(FLASH, ready=True)).step is Step.START


@pytest.mark.parametrize(
    ("offers", "first_run", "wanted"),
    [
        ((FLASH, DEMO, SMALL), True, "demo"),
        ((FLASH, DEMO, SMALL), False, "flash"),
        ((replace(FLASH, ready=True), DEMO, SMALL), False, "small"),
        ((HUGE, DEMO), False, "demo"),
        ((HUGE,), True, "huge"),
        ((), True, None),
    ],
)
def test_recommended(offers: tuple[Offer, ...], first_run: bool, wanted: str | None) -> None:
    assert recommended(offers, first_run=first_run) == wanted


@pytest.mark.parametrize(
    ("offer", "title"),
    [
        (FLASH, "Download 167.0 GB?"),
        (replace(FLASH, download_bytes=None), "Download DeepSeek-V4-Flash?"),
        (replace(FLASH, download_bytes=10 * GB + 1), "Download 10.0 GB?"),
        (replace(FLASH, download_bytes=10 * GB), None),
        (replace(FLASH, ready=True), None),
        (DEMO, None),
    ],
)
def test_question__large_or_unknown_download__is_named(offer: Offer, title: str | None) -> None:
    asked = question(offer)
    assert (asked and asked[0]) == title


def test_question__says_pack_and_most_disk() -> None:
    asked = question(FLASH)
    assert asked is not None
    assert "86.0 GB" in asked[1]
    assert "98.0 GB" in asked[1]


def test_obstacle__plan_first_then_fit() -> None:
    assert obstacle(FLASH, PLAN) is None
    assert obstacle(HUGE, None) == HUGE.reason
    assert obstacle(replace(HUGE, ready=True), None) is None
    problem = fail("MD-GPU-05", need="40 GiB", have="32 GiB")
    assert "40 GiB" in (obstacle(FLASH, replace(PLAN, problem=problem)) or "")
    assert FLASH.fit is not Fit.NO_ROOM


def test_change__each_field__moves_and_stays_at_its_ends() -> None:
    wishes = PlanWishes()
    assert change(wishes, PLAN, "context", 1).context == 65536
    assert change(wishes, PLAN, "context", -1).context == 8192
    assert change(wishes, replace(PLAN, context=65536), "context", 1).context == 65536
    assert change(wishes, replace(PLAN, context=40000), "context", 1).context == 65536
    assert change(wishes, replace(PLAN, context=40000), "context", -1).context == 32768
    assert change(wishes, PLAN, "keep free", 1).keep_free == 4
    assert change(wishes, PLAN, "answers", -1).quality == "fast"
    assert change(PlanWishes(quality="balanced"), PLAN, "answers", 5).quality == "exact"


def test_follow_job__done_lost_or_running() -> None:
    setup = Setup(Step.GET, offer="flash", job="job-1", model="flash")
    assert follow_job(setup, [PULLING]) == setup
    assert follow_job(setup, [replace(PULLING, state=JobState.FAILED)]) == setup
    assert follow_job(setup, [replace(PULLING, state=JobState.DONE)]).step is Step.START
    assert follow_job(setup, []).step is Step.PLAN
    assert follow_job(Setup(Step.MODEL), []) == Setup(Step.MODEL)


def test_kept__round_trip__is_the_same() -> None:
    setup = Setup(
        Step.GET,
        Step.MODEL,
        "flash",
        PlanWishes(4096, 2**30, "exact", 2**33),
        "job-1",
        "flash",
        open=True,
        limit=10**6,
    )
    assert from_kept(to_kept(setup)) == setup
    assert from_kept(to_kept(Setup())) == Setup()


@pytest.mark.parametrize(
    ("change_of_file", "wanted"),
    [
        ({"schema": 2}, None),
        ({"step": "nowhere"}, None),
        ({"context": "large", "quality": 3, "keep_free_bytes": -1}, Setup(Step.PLAN, offer="f")),
        ({"offer": None}, Setup(Step.MODEL)),
        ({"step": "start"}, Setup(Step.MODEL, offer="f")),
        ({"first": "plan", "open": 1}, Setup(Step.PLAN, offer="f")),
    ],
)
def test_from_kept__edited_file__answered_again(
    change_of_file: dict[str, Any], wanted: Setup | None
) -> None:
    kept = to_kept(Setup(Step.PLAN, offer="f")) | change_of_file
    assert from_kept(kept) == wanted


def test_from_kept__nothing__none() -> None:
    assert from_kept({}) is None
