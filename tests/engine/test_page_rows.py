"""Rows on pages: written in any steps and read in any way, they are what was written."""

from __future__ import annotations

import pytest
import torch

from moet_desk.engine.page_rows import PageRows

PAGES = [5, 1, 2, 7]  # of a sequence, four tokens each


@pytest.mark.parametrize(("ratio", "n_rows"), [(1, 14), (2, 7), (4, 4), (8, 2), (16, 1)])
@pytest.mark.parametrize("step", [1, 3])
def test_rows__stored_in_steps__read_whole_and_by_place(ratio: int, n_rows: int, step: int) -> None:
    rows = torch.randint(1, 256, (n_rows, 7), dtype=torch.uint8)
    held = PageRows.make(8, 4, ratio, 7, None)
    for at in range(0, n_rows, step):
        held.store(PAGES, at, rows[at : at + step])
    for count in range(n_rows + 1):
        assert torch.equal(held.first(PAGES, count, in_a_row=False), rows[:count])
    places = torch.arange(n_rows).flip(0)
    assert torch.equal(held.at(PAGES, places), rows[places])
    others = [page for page in range(8) if page not in PAGES]
    assert not held.memory[others].any()


def test_rows__pages_in_a_row__the_same() -> None:
    rows = torch.randint(0, 256, (3, 6), dtype=torch.uint8)
    held = PageRows.make(8, 4, 8, 6, None)
    held.store([2, 3, 4, 5, 6, 7], 0, rows)
    assert torch.equal(held.first([2, 3, 4, 5, 6, 7], 3, in_a_row=True), rows)


def test_rows__neither_a_multiple_of_the_other__refused() -> None:
    with pytest.raises(ValueError, match="a row for 6"):
        PageRows.make(8, 4, 6, 7, None)
