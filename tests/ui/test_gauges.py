"""Bars, sparklines, status and loading lines as plain text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.content import Content

from moet_desk.telemetry import (
    CacheView,
    DraftChoice,
    EngineSnapshot,
    EngineState,
    LoadStep,
    ReadTimes,
    TierCounters,
    TierSizes,
    VramView,
)
from moet_desk.ui.screens.cache import resident_words, vram_words
from moet_desk.ui.theme import ASCII, UNICODE
from moet_desk.ui.widgets.gauges import (
    History,
    bar,
    context_meter,
    guess_lines,
    guessing,
    loading_lines,
    move_line,
    show_percent,
    sparkline,
    spread,
    tier_lines,
    wait_line,
)
from moet_desk.units import GIB


@given(st.floats(-1, 2), st.integers(0, 50))
def test_bar__any_share__fills_its_width(share: float, width: int) -> None:
    drawn = bar(share, width, ASCII)
    assert len(drawn) == width
    assert set(drawn) <= {"#", "-"}


def test_bar__shares__rounded_but_never_hiding_something() -> None:
    assert bar(0.0, 4, ASCII) == "----"
    assert bar(0.001, 4, ASCII) == "#---"
    assert bar(0.5, 4, ASCII) == "##--"
    assert bar(1.0, 4, ASCII) == "####"


def test_sparkline__values__scaled_to_their_top_with_gaps() -> None:
    assert sparkline([0, None, 5, 10], 4, UNICODE) == "▁ ▅█"
    assert sparkline([1.0] * 9, 4, UNICODE) == "████"
    assert sparkline([], 4, UNICODE) == ""


@pytest.mark.parametrize(
    ("share", "digits", "shown"),
    [(None, 1, "–"), (0.961, 1, "96.1 %"), (0.0, 0, "0 %"), (0.003, 0, "<1 %"), (0.5, 0, "50 %")],
)
def test_show_percent__share__shown(share: float | None, digits: int, shown: str) -> None:
    assert show_percent(share, digits) == shown


def test_context_meter__from_85_percent__marked() -> None:
    assert context_meter(1700, 2048).plain == "ctx 1.7K/2K"
    assert context_meter(1741, 2048).plain == "! ctx 1.7K/2K"


@given(st.text("ab漢🦊", max_size=30), st.text("xy字", max_size=10), st.integers(12, 60))
def test_spread__any_text__exactly_the_width(left: str, right: str, width: int) -> None:
    if cell_len(right) < width:
        assert spread(Content(left), Content(right), width).cell_length in (width, width - 1)


SNAPSHOT = EngineSnapshot(
    state=EngineState.WRITING, wait_share=0.38, step_ms=32.4,
    tier_share=(0.003, 0.036, 0.919, 0.042),
    counters=TierCounters(lookups=9, bytes_ram_to_slot=3 * 2**30, bytes_nvme_to_ram=2**20),
    sizes=TierSizes(base_slots=80, base_slots_used=77, fine_slots=8, fine_slots_used=8,
                    arena_rows=200, arena_rows_used=200, rows=256),
)  # fmt: skip


def test_tier_lines__four_tiers__counts_and_shares() -> None:
    lines = [line.plain for line in tier_lines(SNAPSHOT, 80, UNICODE)]
    assert [line[1] for line in lines] == ["G", "Q", "R", "N"]
    assert "77 of     80" in lines[0]
    assert "30.1 %" in lines[0]
    assert "91.9 %" in lines[0]
    assert "0.3 %" in lines[3]
    assert all(cell_len(line) <= 80 for line in lines)


def test_tier_lines__nothing_known__dashes_not_zeros() -> None:
    line = tier_lines(EngineSnapshot(), 80, UNICODE)[0].plain
    assert line.count("–") == 2


def a_second_ago() -> History:
    """Two seconds in which all was moved."""
    history = History()
    history.add(replace(SNAPSHOT, counters=TierCounters()), 1.0)
    history.add(SNAPSHOT, 3.0)
    return history


def test_wait_line__first_words_are_waiting() -> None:
    text = wait_line(SNAPSHOT, a_second_ago(), width=120, glyphs=UNICODE).plain
    assert text.startswith("waiting 38 % of time ██  32 ms/step")
    assert text.endswith("   –   hits 96.1 %")
    unknown = wait_line(EngineSnapshot(), History(), width=79, glyphs=UNICODE)
    assert unknown.plain.startswith("waiting – of time")
    assert unknown.plain.endswith("hits –")


def test_move_line__totals_and_rates_of_both_ways() -> None:
    line = move_line(SNAPSHOT, a_second_ago(), width=79, glyphs=UNICODE).plain
    assert line == "moved 3.0 GiB █ 1.6 GB/s   disk 1.0 MiB █ 524.3 kB/s"
    unknown = move_line(EngineSnapshot(), History(), width=79, glyphs=UNICODE).plain
    assert unknown == "moved –  –   disk –  –"


def test_history__time_went_back__empty_until_it_grows_again() -> None:
    history = a_second_ago()
    history.add(SNAPSHOT, 0.5)
    assert len(history.slot_rate) == 1
    history.clear()
    history.add(SNAPSHOT, 0.5)
    assert (len(history.wait_share), len(history.slot_rate), len(history.disk_rate)) == (1, 0, 0)


@pytest.mark.parametrize(("direct", "shown"), [(True, "p95 1.2 ms"), (False, "p95 1.2 ms, cached")])
def test_move_line__rows_read_from_disk__how_long(direct: bool, shown: str) -> None:
    snapshot = replace(SNAPSHOT, reads=ReadTimes(0.8, 1.23, 4.0, direct))
    assert move_line(snapshot, History(), width=120, glyphs=UNICODE).plain.endswith(f", {shown}")
    assert "p95" not in move_line(snapshot, History(), width=100, glyphs=UNICODE).plain


def test_move_line__promoted_experts__counted_where_there_is_room() -> None:
    promoted = replace(SNAPSHOT, counters=replace(SNAPSHOT.counters, promotions=1234))
    wide = move_line(promoted, History(), width=120, glyphs=UNICODE).plain
    assert wide.endswith("1,234 promoted")
    assert "promoted" not in move_line(promoted, History(), width=100, glyphs=UNICODE).plain


MTP = DraftChoice(
    "auto", "mtp", 2, gain=1.424, acceptance=(0.71, 0.444), rows_ms=((1, 20.0), (3, 26.0))
)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (DraftChoice(), ""),
        (DraftChoice("auto"), "off"),
        (MTP, "mtp 2, x1.42"),
        (replace(MTP, is_probe=True), "mtp 2?"),
        (DraftChoice("lookup", "lookup", 3), "lookup 3"),
    ],
)
def test_guessing__choice__who_how_far_and_for_what(choice: DraftChoice, words: str) -> None:
    assert guessing(replace(SNAPSHOT, draft_choice=choice)) == words


def test_guesses__made__steps_tokens_and_shares_shown() -> None:
    snapshot = replace(SNAPSHOT, draft_choice=MTP, tokens_per_step=1.923, step_ms=25.0)
    assert [line.plain for line in guess_lines(snapshot)] == [
        "per step   1.92 tok, 40.0 /s",
        "guesses    mtp 2, x1.42",
        "right      71 % 44 %",
    ]
    wide = wait_line(snapshot, History(), width=120, glyphs=UNICODE).plain
    assert "25 ms/step, 1.92 tok (mtp 2, x1.42)   –   hits" in wide
    assert "mtp" not in wait_line(snapshot, History(), width=100, glyphs=UNICODE).plain
    assert all(cell_len(line.plain) <= 32 for line in guess_lines(snapshot))


def test_guesses__nobody_may__no_lines() -> None:
    assert guess_lines(replace(SNAPSHOT, tokens_per_step=1.0)) == []
    unknown = replace(EngineSnapshot(), draft_choice=DraftChoice("auto"))
    assert [line.plain[11:] for line in guess_lines(unknown)] == ["off"]


def test_loading_lines__steps__glyph_bar_numbers_seconds() -> None:
    steps = (
        LoadStep("Pack the model", done=72, total=288, unit="rows"),
        LoadStep("Read the index", seconds=0.3, finished=True),
        LoadStep("Experts to RAM", done=5 * 2**20, total=10 * 2**20, seconds=2.0),
        LoadStep("Self-test"),
    )
    lines = [
        line.plain
        for line in loading_lines(steps, width=80, glyphs=UNICODE, pack_rate=(7_000_000, 4e6))
    ]
    assert lines[0].startswith(" ▸ Pack the model  ▇")
    assert "72 of 288 rows  7.0 MB  4.0 MB/s" in lines[0]
    assert lines[1].startswith(" ✓ Read the index")
    assert lines[1].rstrip().endswith("0.3 s")
    assert "5.0 of 10.0 MiB  2.5 MiB/s" in lines[2]
    assert lines[3].startswith(" · Self-test")
    assert all(cell_len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("vram", "words"),
    [
        (None, ""),
        (VramView(slots=5 * GIB, planned=5 * GIB, why="as it should be"), ""),
        (
            VramView(slots=3 * GIB, planned=5 * GIB, why="memory.vram_limit is lower"),
            "   Slots: 3.0 GiB, planned 5.0 GiB: memory.vram_limit is lower",
        ),
    ],
)
def test_vram_words__only_where_slots_are_not_as_planned(vram: VramView | None, words: str) -> None:
    assert vram_words(vram) == words


@pytest.mark.parametrize(("width", "shown"), [(110, True), (109, False)])
def test_move_line__a_card__says_what_is_free_where_there_is_room(
    width: int, *, shown: bool
) -> None:
    snapshot = EngineSnapshot(vram=VramView(free=3 * GIB))
    line = move_line(snapshot, History(), width=width, glyphs=UNICODE).plain
    assert ("card: 3.0 GiB free" in line) == shown
    assert "card" not in move_line(EngineSnapshot(), History(), width=200, glyphs=UNICODE).plain


@pytest.mark.parametrize(
    ("base", "fine", "words"),
    [
        (16, 16, " All 16 experts are in slots. Nothing to fetch."),
        (16, 15, " All 16 experts are in 2-bit slots. Fast fetches nothing."),
        (15, 16, " All 16 experts are in 4-bit slots. Exact fetches nothing."),
        (15, 15, ""),
    ],
)
def test_resident_words__promise_only_what_is_in_slots(base: int, fine: int, words: str) -> None:
    view = CacheView((1, 2), 8, (bytes(8),) * 2, (bytes(8),) * 2, (0, 0), (None, None))
    sizes = TierSizes(base_slots=16, base_slots_used=base, fine_slots=16, fine_slots_used=fine)
    assert resident_words(view, sizes) == words
