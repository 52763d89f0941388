"""Widgets that keep their frame and go past Textual's wrapping: what they draw is the same."""

from __future__ import annotations

import random

import pytest
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from moet_desk.engine.scripted import DEFAULT_ANSWER, Script
from moet_desk.marked_text import MarkedText
from moet_desk.ui.lean_rows import Framed, LeanBar
from moet_desk.ui.look import Look
from moet_desk.ui.widgets.blocks import AnswerBlock
from moet_desk.ui.widgets.code_colours import CodeColours
from moet_desk.ui.widgets.gauges import StatusLine
from moet_desk.ui.widgets.live_text import LiveText
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage
from tests.ui.test_live_text import cells

pytestmark = pytest.mark.asyncio


def of_textual(widget: Widget, part: Region) -> list[Strip]:
    """What Textual makes of a part of a widget."""
    widget._layout_cache.clear()
    widget._set_dirty()
    rows = Widget.render_lines(widget, part)
    widget._repaint_regions.clear()
    return rows


def same_as_textual(stage: Stage) -> set[str]:
    """Compare all lean widgets in view with what Textual makes of them; returns their kinds."""
    kinds = set()
    for widget in stage.app.screen.walk_children():
        if not isinstance(widget, Framed) or not widget.region:
            continue
        size = widget.outer_size
        seen = Region(0, 0, size.width - widget.scrollbar_size_vertical, min(size.height, 30))
        assert cells(widget.render_lines(seen)) == cells(of_textual(widget, seen)), widget
        kinds.add(type(widget).__name__)
    return kinds


@pytest.mark.parametrize("colour", [True, False])
async def test_lean_widgets__themes_and_no_colour__drawn_as_textual_draws_them(
    colour: bool,
) -> None:
    look = Look(motion="none", glyphs="unicode", colour=colour)
    script = Script((DEFAULT_ANSWER * 9,), tokens_per_s=40, n_layers=43, n_experts=256)
    stage = Stage(script, look=look)
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 3.0, step_s=0.5)
        for theme in ("moet-dark", "moet-light"):
            stage.app.theme = theme
            await stage.settle(pilot)
            await stage.settle(pilot)
            assert same_as_textual(stage) >= {
                "AnswerBlock", "_Body", "LiveText", "Rail", "StatusLine", "Words",
            }  # fmt: skip
        await pilot.press("f3")
        await stage.play(pilot, 1.0, step_s=0.5)
        assert same_as_textual(stage) >= {"Heatmap", "StatusLine", "TierBars", "WaitLine"}


async def test_scroll_bar__text_grows__only_rows_that_differ_are_repainted() -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    async with stage.open(80, 40) as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        bar = stage.app.chat.query_one(Transcript).vertical_scrollbar
        assert isinstance(bar, LeanBar)
        await block.append(MarkedText("word\n\n" * 60))
        for _ in range(4):
            await stage.settle(pilot)
        height = bar.size.height
        rows = bar.render_lines(Region(0, 0, 1, height))
        assert cells(rows) == cells(of_textual(bar, Region(0, 0, 1, height)))
        bar._repaint_regions.clear()
        bar.refresh()
        assert bar._repaint_regions == set()
        bar.position -= 4
        changed = list(bar._repaint_regions)
        assert changed
        assert sum(region.height for region in changed) < height // 2
        now = bar.render_lines(Region(0, 0, 1, height))
        pairs = enumerate(zip(cells(rows), cells(now), strict=True))
        differ = {y for y, (a, b) in pairs if a != b}
        assert differ
        assert differ <= {y for region in changed for y in region.line_range}


BITS = (
    "word ", "and more, ", "end. ", "foo.", "com ", "Next: ", "x", "(par) ", "'q' ", "a@b", "** ",
    "**bold** ", "*em", "* ", "`co", "de` ", "[l](", "http://x.y", ") ", "&amp; ", "\\", "_u_ ",
    "漢字 ", "😀", "e\u0301", "a" * 75, "  ", "\n", "\n\n", "- item ", "\n- ", "\n  - ", "1. ",
    "> q ", "\n\n    ", "# head ", "| a | b |\n", "|---|---|\n", "---\n", "===\n", "<b>",
    "www.x.org ",
)  # fmt: skip
CODE_BITS = (
    "x = 1\n",
    "def f():\n",
    "    return 'a'  # why\n",
    "\n",
    "   \n",
    "wor",
    "d ",
    "``",
    "`\n",
)


async def drawn(live: LiveText) -> list[Strip]:
    return live.render_lines(Region(0, 0, live.size.width, live.n_rows))


async def test_live_text__many_texts_in_small_pieces__as_at_once() -> None:
    """What only goes on keeps its rows; whatever changes their meaning has them drawn anew."""
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    async with stage.open(60, 40) as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        for seed in range(8):
            rng = random.Random(seed)
            weights = [rng.random() ** 3 for _ in BITS]
            text = "".join(rng.choices(BITS, weights, k=40))
            if seed % 4 == 0:
                text = "```python\n" + "".join(rng.choices(CODE_BITS, k=40)) + "\n```\n\n" + text
            pieces, whole = LiveText(plain=False), LiveText(plain=False)
            await block._body.mount(pieces, whole)
            await stage.settle(pilot)
            end = 0
            while end < len(text):
                end = min(len(text), end + rng.randint(1, 25))
                pieces.show(MarkedText(text[:end]))
            whole.show(MarkedText(text))
            a, b = await drawn(pieces), await drawn(whole)
            assert [row.text for row in a] == [row.text for row in b], seed
            if "```" not in text:  # code that may go on is coloured now and then
                assert cells(a) == cells(b), seed
            await block._body.remove_children([pieces, whole])


async def test_live_text__long_block_goes_on__costs_what_its_new_words_cost() -> None:
    import sys

    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    async with stage.open(80, 40) as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        await block.append(MarkedText("Words "))
        await stage.settle(pilot)
        live, n_calls = block.live, 0
        assert live is not None

        def count(_frame: object, event: str, _arg: object) -> None:
            nonlocal n_calls
            n_calls += event in ("call", "c_call")

        costs = []
        text = "Words "
        for _ in range(60):
            text += "that go on and on, as people write them. "
            n_calls = 0
            sys.setprofile(count)
            live.show(MarkedText(text))
            sys.setprofile(None)
            costs.append(n_calls)
        assert max(costs[-20:]) < 2 * max(costs[5:15]) < 2_000


@pytest.mark.parametrize("language", ["python", "nosuchlanguage", ""])
async def test_code__any_language__colours_of_textual(language: str) -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    code = "def f(x):\n\n    return {'a': 1.5}  # why\n" * 2 + "let y = x;"
    async with stage.open(80, 30) as pilot:
        await stage.ready(pilot)
        widget = stage.app.screen.query_one(StatusLine)
        colours, style = CodeColours(widget), widget.visual_style
        lines = colours.lines(code, language, style)
        wanted = colours.draw(colours.content(code, language), style)
        assert cells(lines) == cells(wanted)
        assert [line.text for line in colours.lines("", "pyth", style)] == [""]


async def test_line__too_long_or_short__as_wide_as_asked() -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    async with stage.open(80, 30) as pilot:
        await stage.ready(pilot)
        widget = stage.app.screen.query_one(StatusLine)
        line = Content("a ") + Content.styled("bold", "bold $accent")
        row = widget._line(line, 10)
        assert row.text == "a bold    "
        assert [bool(part.style and part.style.bold) for part in row if "bold" in part.text] == [
            True
        ]
        assert widget._line(Content("one two three"), 8).text == "one two "
