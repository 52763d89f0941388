"""How many likely experts are brought ahead, by what was needed of those before."""

from __future__ import annotations

from moet_desk.engine.lookahead_control import JUDGED_ROWS, REST_STEPS, AheadControl


def test_note__most_were_needed__as_many_as_a_token_has() -> None:
    control = AheadControl(6)
    assert [control.note(100, 80, 64) for _ in range(3)] == [6, 6, 6]


def test_note__few_were_needed__half_each_time_then_none_and_later_one_again() -> None:
    control = AheadControl(6)
    assert [control.note(100, 20, 64) for _ in range(3)] == [3, 1, 0]
    assert control.note(0, 0, REST_STEPS - 1) == 0
    assert control.note(0, 0, 1) == 1
    assert [control.note(100, 90, 64) for _ in range(4)] == [2, 4, 6, 6]


def test_note__hardly_any_was_needed__none_at_once() -> None:
    assert AheadControl(8).note(1000, 50, 64) == 0


def test_note__between__stays() -> None:
    control = AheadControl(8)
    assert [control.note(100, 45, 64) for _ in range(3)] == [8, 8, 8]


def test_note__too_few_rows__are_added_up_before_they_count() -> None:
    control = AheadControl(8)
    assert control.note(JUDGED_ROWS - 1, 0, 64) == 8
    assert control.note(1, 0, 64) == 0
