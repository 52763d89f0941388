"""The grid: layout, what a cell shows, and that only changed rows are painted again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.strip import Strip

from moet_desk.telemetry import CacheView, Tier
from moet_desk.ui.cache_cells import LEFT, RIGHT, Grid, Measure, describe, plan_grid, row_values
from moet_desk.ui.lean_screen import LeanScreen
from moet_desk.ui.theme import ASCII, MOET_DARK, UNICODE, Glyphs
from moet_desk.ui.widgets.heatmap import Heatmap, header_line


@given(st.integers(1, 600), st.integers(20, 400))
def test_plan_grid__any_experts_and_width__fits_and_covers(n_experts: int, width: int) -> None:
    grid = plan_grid(n_experts, width)
    assert grid.n_cells * grid.cell_width <= max(1, width - LEFT - RIGHT)
    covered = [expert for cell in range(grid.n_cells) for expert in grid.experts(cell)]
    assert covered == list(range(n_experts))


@pytest.mark.parametrize(
    ("n_experts", "width", "group", "cell_width"),
    [(32, 80, 1, 2), (32, 120, 1, 3), (256, 80, 4, 1), (256, 144, 2, 1), (256, 272, 1, 1),
     (384, 80, 6, 1), (97, 80, 2, 1), (8, 80, 1, 3)],
)  # fmt: skip
def test_plan_grid__known_models__divisors(
    n_experts: int, width: int, group: int, cell_width: int
) -> None:
    grid = plan_grid(n_experts, width)
    assert (grid.group, grid.cell_width) == (group, cell_width)


def view_of(tiers: list[list[int]], heat: list[list[int]]) -> CacheView:
    return CacheView(
        layers=tuple(range(1, len(tiers) + 1)),
        n_experts=len(tiers[0]),
        tiers=tuple(map(bytes, tiers)),
        heat=tuple(map(bytes, heat)),
        generations=(1,) * len(tiers),
        hit_share=(0.5,) * len(tiers),
    )


def test_row_values__group__tier_of_the_hottest_and_its_heat() -> None:
    view = view_of([[0, 3, 2, 1, 0, 1]], [[0, 1, 5, 0, 0, 4]])
    grid = Grid(6, 4, 1)
    assert row_values(view, 0, grid, Measure.TIER) == [Tier.BASE, Tier.RAM]
    assert row_values(view, 0, grid, Measure.HEAT) == [5, 4]


def test_row_values__never_used__none_unless_a_slot_holds_it() -> None:
    view = view_of([[0, 1, 2, 3]], [[0, 0, 0, 0]])
    shown = row_values(view, 0, Grid(4, 1, 1), Measure.TIER)
    assert shown == [None, None, Tier.BASE, Tier.FINE]
    assert row_values(view, 0, Grid(4, 4, 1), Measure.HEAT) == [None]


def test_describe__one_and_many__place_and_heat() -> None:
    view = view_of([[0, 1, 2, 3]], [[0, 1, 5, 7]])
    assert describe(view, 0, range(2, 3)) == "Layer 1, expert 2:  G 2-bit slot   heat 5 of 7"
    many = describe(view, 0, range(4))
    assert many == "Layer 1, experts 0-3:  0 N 0   1 R 1   2 G 5   3 Q 7   heat 0-7"


def test_header_line__numbers__over_their_cells() -> None:
    line = header_line(plan_grid(256, 80), 80)
    assert line.startswith(" " * LEFT + "0")
    assert line.index("64") == LEFT + 16
    assert "255 hit %" in line


class Painted(Heatmap):
    """Counts which lines are drawn."""

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__(glyphs)
        self.lines: list[int] = []

    def row(self, y: int) -> Strip:
        self.lines.append(y + self.scroll_offset.y)
        return super().row(y)


class GridApp(App[None]):
    def __init__(self, glyphs: Glyphs = UNICODE) -> None:
        super().__init__()
        self.heatmap = Painted(glyphs)
        self.register_theme(MOET_DARK)
        self.theme = "moet-dark"

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return dict(MOET_DARK.variables)

    def get_default_screen(self) -> LeanScreen:
        return LeanScreen()

    def compose(self) -> ComposeResult:
        yield self.heatmap


def text_of(heatmap: Heatmap) -> list[str]:
    return [heatmap.render_line(y).text for y in range(heatmap.size.height)]


async def shown(pilot: Any, heatmap: Heatmap, view: CacheView) -> None:
    heatmap.show(view)
    await pilot.pause()


@pytest.mark.asyncio
async def test_heatmap__one_row_changed__only_that_row_is_painted() -> None:
    app = GridApp()
    async with app.run_test(size=(80, 24)) as pilot:
        view = view_of([[1] * 32] * 12, [[1] * 32] * 12)
        await shown(pilot, app.heatmap, view)
        app.heatmap.lines.clear()
        tiers = list(view.tiers)
        tiers[7] = bytes([3] * 32)
        changed = replace(view, tiers=tuple(tiers), generations=(1,) * 7 + (2,) + (1,) * 4)
        await shown(pilot, app.heatmap, changed)
        assert set(app.heatmap.lines) == {7}
        app.heatmap.lines.clear()
        await shown(pilot, app.heatmap, replace(changed))
        assert app.heatmap.lines == []


@pytest.mark.asyncio
async def test_heatmap__hit_share_changed_visibly__its_row_is_painted() -> None:
    app = GridApp()
    async with app.run_test(size=(80, 24)) as pilot:
        view = view_of([[1] * 8] * 3, [[1] * 8] * 3)
        await shown(pilot, app.heatmap, view)
        app.heatmap.lines.clear()
        await shown(pilot, app.heatmap, replace(view, hit_share=(0.50001, 0.6, None)))
        assert set(app.heatmap.lines) == {1, 2}


@pytest.mark.asyncio
async def test_heatmap__cursor__keys_and_mouse_move_it_within_the_grid() -> None:
    app = GridApp()
    async with app.run_test(size=(80, 10)) as pilot:
        await shown(pilot, app.heatmap, view_of([[1] * 32] * 30, [[1] * 32] * 30))
        app.heatmap.focus()
        await pilot.press("right", "right", "down", "left")
        assert app.heatmap.cursor_text().startswith("Layer 2, expert 1:")
        await pilot.press("end")
        assert app.heatmap.cursor_text().startswith("Layer 30,")
        assert app.heatmap.scroll_offset.y == 20
        await pilot.press("up", "home", "up", "left", "left")
        assert app.heatmap.cursor_text().startswith("Layer 1, expert 0:")
        assert app.heatmap.scroll_offset.y == 0
        await pilot.hover(app.heatmap, offset=(LEFT + 2 * 5, 3))
        assert app.heatmap.cursor_text().startswith("Layer 4, expert 5:")


@pytest.mark.asyncio
async def test_heatmap__glyphs__tiers_and_ramp_in_both_sets() -> None:
    for glyphs in (UNICODE, ASCII):
        app = GridApp(glyphs)
        async with app.run_test(size=(80, 24)) as pilot:
            view = view_of([[0, 1, 2, 3, 0, 0, 0, 0]], [[1, 2, 3, 7, 0, 0, 0, 0]])
            await shown(pilot, app.heatmap, view)
            cells = "".join(glyph * 3 for glyph in [*glyphs.tiers, *glyphs.unused * 4])
            assert cells in text_of(app.heatmap)[0]
            app.heatmap.set_measure(Measure.HEAT)
            ramp = "".join(glyphs.ramp[step] * 3 for step in (1, 2, 3, 7))
            assert ramp + glyphs.unused * 12 in text_of(app.heatmap)[0]


@pytest.mark.asyncio
async def test_heatmap__room_for_more__taller_cells_and_still_only_changed_rows() -> None:
    app = GridApp()
    async with app.run_test(size=(120, 30)) as pilot:
        view = view_of([[1] * 32] * 8, [[1] * 32] * 8)
        app.heatmap.show(view)
        app.heatmap.fit(26)
        await pilot.pause()
        assert app.heatmap.size.height == 16
        app.heatmap.lines.clear()
        await shown(pilot, app.heatmap, replace(view, generations=(1, 2, 1, 1, 1, 1, 1, 1)))
        assert set(app.heatmap.lines) == {2, 3}


@pytest.mark.asyncio
async def test_heatmap__tall_cells_heat__one_bar_over_both_lines() -> None:
    app = GridApp()
    async with app.run_test(size=(80, 24)) as pilot:
        view = view_of([[1] * 4], [[1, 3, 5, 7]])
        app.heatmap.measure = Measure.HEAT
        app.heatmap.show(view)
        app.heatmap.fit(4)
        await pilot.pause()
        top, bottom = text_of(app.heatmap)[:2]
        assert top[LEFT : LEFT + 12] == "      ▃▃▃███"
        assert bottom[LEFT : LEFT + 12] == "▂▂▂▇▇▇██████"


@pytest.mark.asyncio
async def test_heatmap__dense__two_layers_a_line_by_their_colours() -> None:
    app = GridApp()
    async with app.run_test(size=(80, 24)) as pilot:
        view = view_of([[3] * 8, [2] * 8, [1] * 8], [[1] * 8] * 3)
        await shown(pilot, app.heatmap, view)
        app.heatmap.set_dense(True)
        await pilot.pause()
        assert app.heatmap.size.height == 2
        first, last = (app.heatmap.render_line(y) for y in range(2))
        assert first.text[LEFT : LEFT + 24] == last.text[LEFT : LEFT + 24] == "▀" * 24
        inks = [MOET_DARK.variables[f"tier-{letter}"] for letter in "qgr"]

        def colours(strip: Strip) -> list[str]:
            style = next(s.style for s in strip if "▀" in s.text)
            assert style is not None
            return [c.get_truecolor().hex for c in (style.color, style.bgcolor) if c is not None]

        assert colours(first) == inks[:2]
        assert colours(last) == [inks[2], MOET_DARK.background]
        app.heatmap.focus()
        await pilot.press("down", "right")
        assert app.heatmap.cursor_text().startswith("Layer 2, expert 1:")
        assert "L02" in app.heatmap.render_line(0).text
        await pilot.press("pagedown")
        assert app.heatmap.cursor_text().startswith("Layer 3,")
        app.heatmap.lines.clear()
        await shown(pilot, app.heatmap, replace(view, generations=(1, 1, 2)))
        assert set(app.heatmap.lines) == {1}


@pytest.mark.asyncio
async def test_heatmap__age__grows_older_without_a_new_generation() -> None:
    app = GridApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await shown(pilot, app.heatmap, view_of([[2] * 8], [[1] * 8]))
        app.heatmap.lines.clear()
        app.heatmap.grow_older()
        await pilot.pause()
        assert app.heatmap.lines == []
        app.heatmap.measure = Measure.AGE
        app.heatmap.grow_older()
        await pilot.pause()
        assert set(app.heatmap.lines) == {0}
