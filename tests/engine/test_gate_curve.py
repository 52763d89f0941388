"""A gate's threshold: choosing on made-up steps, its file in the pack, and counts of the engine."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.evaluate import FlipTally, count_flips, measure, opened_core, windows_of
from moet_desk.engine.gate_curve import GRID, Counts, Limit, Point, choose
from moet_desk.engine.gate_file import SCHEMA, Calibration, GatePoint, read_gate, write_gate
from moet_desk.engine.handle import EngineOptions, Quality
from moet_desk.errors import MoetError
from moet_desk.store.library import Library
from moet_desk.store.pack_format import GATE_FILE, PACK_JSON
from moet_desk.store.pack_meta import read_meta
from moet_desk.store.pack_verify import verify_pack

FAST, EXACT = Quality.FAST, Quality.EXACT


def counts_of(*steps: tuple[float, bool]) -> Counts:
    counts = Counts()
    for confidence, flip in steps:
        counts.add(confidence, flip=flip)
    return counts


def chosen(counts: Counts, target: float, budget: float) -> tuple[float, Limit]:
    choice = choose(counts.curve(), target=target, budget=budget)
    assert choice is not None
    return choice.point.tau, choice.limit


# ten steps: three flips at low confidence, one at a high one
STEPS = (
    (0.105, True), (0.205, True), (0.305, True), (0.405, False), (0.505, False),
    (0.605, False), (0.705, False), (0.805, True), (0.905, False), (0.955, False),
)  # fmt: skip


# -- choosing --------------------------------------------------------------------------------


def test_curve__made_up_steps__shares_by_hand() -> None:
    curve = counts_of(*STEPS).curve()
    assert [point.tau for point in curve] == list(GRID)
    at = {point.tau: [point.rerun, point.caught] for point in curve}
    assert at[0.1] == [0, 0]
    assert at[0.11] == [0.1, 0.25]
    assert at[0.5] == [0.4, 0.75]
    assert at[1.0] == [1, 1]


def test_curve__reruns_that_differ_from_exact__are_taken_off() -> None:
    counts = counts_of((0.205, True), (0.305, True))
    counts.add(0.105, flip=False, stays=True)  # a rerun makes a flip of its own
    counts.add(0.405, flip=True, stays=True)  # and mends nothing here
    at = {point.tau: (point.rerun, point.caught) for point in counts.curve()}
    assert at[0.11] == (0.25, 0)  # less than nothing
    assert at[0.21] == (0.5, 0)
    assert at[0.31] == (0.75, pytest.approx(1 / 3))
    assert at[1.0] == (1, pytest.approx(1 / 3))
    assert (counts.tokens, counts.flips) == (4, 3)
    assert chosen(counts, 0.9, 1.0) == (0.31, Limit.BUDGET)


def test_choose__target_within_budget__smallest_tau() -> None:
    counts = counts_of(*STEPS)
    assert chosen(counts, 0.75, 0.3) == (0.31, Limit.TARGET)
    assert chosen(counts, 0.7, 1.0) == (0.31, Limit.TARGET)
    assert chosen(counts, 1.0, 0.8) == (0.81, Limit.TARGET)
    assert chosen(counts, 0.0, 0.0) == (0.0, Limit.TARGET)


def test_choose__budget_too_small__most_caught_at_the_smallest_tau() -> None:
    counts = counts_of(*STEPS)
    assert chosen(counts, 0.9, 0.29) == (0.21, Limit.BUDGET)
    assert chosen(counts, 0.9, 0.7) == (0.31, Limit.BUDGET)  # up to 0.80 nothing more is caught
    assert chosen(counts, 0.9, 0.0) == (0.0, Limit.BUDGET)


def test_choose__equal_confidences__all_or_none_of_them() -> None:
    counts = counts_of(*[(0.405, True)] * 2, *[(0.405, False)] * 2, *[(0.9, False)] * 6)
    assert chosen(counts, 0.5, 0.4) == (0.41, Limit.TARGET)
    assert chosen(counts, 0.5, 0.39) == (0.0, Limit.BUDGET)


@pytest.mark.parametrize("tau", [0.0, 0.07, 0.29, 0.57, 0.58, 1.0])
def test_counts__confidence_on_a_threshold__not_below_it(tau: float) -> None:
    curve = counts_of((tau, True)).curve()
    assert [point.rerun for point in curve] == [float(tau < other) for other in GRID]


def test_choose__no_flips__nothing_to_choose() -> None:
    counts = counts_of((0.3, False), (0.6, False))
    curve = counts.curve()
    assert (counts.tokens, counts.flips) == (2, 0)
    assert {point.caught for point in curve} == {None}
    assert curve[50].rerun == 0.5
    assert choose(curve, target=0.0, budget=1.0) is None


def test_choose__no_positions__nothing_to_choose() -> None:
    curve = Counts().curve()
    assert curve[-1] == Point(1.0, None, None)
    assert choose(curve, target=0.9, budget=0.15) is None
    assert choose([], target=0.9, budget=0.15) is None


# -- counting --------------------------------------------------------------------------------


def test_tally__made_up_scores__confidence_of_fast_and_flips() -> None:
    counts = Counts()
    tally = FlipTally(counts, model="m")
    fast = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.3, 0.1]]).log()
    exact = torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]]).log()
    tally.add({FAST: fast, EXACT: exact}, torch.tensor([0, 2]))
    assert (tally.tokens, counts.tokens, counts.flips) == (2, 2, 1)
    curve = counts.curve()
    assert (curve[49].caught, curve[52].caught) == (0, 1)
    assert (curve[52].rerun, curve[62].rerun) == (0.5, 1)
    with pytest.raises(MoetError, match="no numbers"):
        tally.add({FAST: fast * torch.nan, EXACT: exact}, torch.tensor([0, 2]))


def test_count_flips__demo__as_eval_counts_them(demo_pack: Path) -> None:
    with opened_core(demo_pack, EngineOptions(context=256)) as (core, text):
        windows = windows_of(text, ["The tailor mended a coat. " * 12], size=96)
        counts, told = Counts(), list[tuple[int, int]]()
        count_flips(core, windows, counts, lambda done, total: told.append((done, total)))
        figures = measure(core, windows, (FAST, EXACT))
    assert counts.tokens == figures.tokens
    assert told[-1] == (counts.tokens, counts.tokens)
    agreement = figures.distance[FAST].top1_agreement
    assert counts.flips == round((1 - agreement) * counts.tokens)


# -- the file --------------------------------------------------------------------------------


@pytest.fixture
def own_pack(demo_pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_pack, tmp_path / "models" / "own"))


def gate_for(pack: Path) -> Calibration:
    return Calibration(
        schema=SCHEMA,
        identity=read_meta(pack).identity,
        tau=0.35,
        limit=Limit.TARGET,
        target=0.9,
        budget=0.15,
        curve=[GatePoint(0.35, 0.1, 0.95)],
        tokens=100,
        flips=20,
        texts=["a.txt"],
        date="2026-11-29T00:00:00+00:00",
    )


def test_gate_file__written__read_again_and_the_pack_is_whole(own_pack: Path) -> None:
    assert read_gate(own_pack) is None
    gate = gate_for(own_pack)
    assert write_gate(own_pack, gate) == own_pack / GATE_FILE
    assert read_gate(own_pack) == gate
    assert verify_pack(own_pack).ok
    library = Library(own_pack.parent)
    assert library.find("own").error is None
    library.remove("own")
    assert not own_pack.exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"identity": "0" * 64}, "another model"),
        ({"schema": SCHEMA + 1}, "schema"),
        ({"tau": 1.5}, "tau"),
        ({"tau": None}, "tau"),
        ({"limit": "whim"}, "limit"),
    ],
)
def test_read_gate__not_for_this_pack__ignored_and_logged(
    own_pack: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], words: str
) -> None:
    path = write_gate(own_pack, gate_for(own_pack))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with caplog.at_level(logging.WARNING):
        assert read_gate(own_pack) is None
    assert "is ignored" in caplog.text
    assert words in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"x":"\xff"}', b"[" * 10**5])
def test_read_gate__damaged__ignored_and_logged(
    own_pack: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (own_pack / GATE_FILE).write_bytes(content)
    assert read_gate(own_pack) is None
    assert "is ignored" in caplog.text


def test_read_gate__no_pack_record__ignored(own_pack: Path) -> None:
    write_gate(own_pack, gate_for(own_pack))
    (own_pack / PACK_JSON).write_bytes(b"{")
    assert read_gate(own_pack) is None
    (own_pack / GATE_FILE).unlink()
    (own_pack / GATE_FILE).mkdir()
    assert read_gate(own_pack) is None


def test_write_gate__folder_that_is_gone__catalogue_error(tmp_path: Path, own_pack: Path) -> None:
    with pytest.raises(MoetError) as caught:
        write_gate(tmp_path / "gone", gate_for(own_pack))
    assert caught.value.code == "MD-DISK-03"
