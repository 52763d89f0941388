"""An answer while it is written: rows as the widgets draw them, few layouts, small repaints."""

from __future__ import annotations

from typing import Any

import pytest
from textual._compositor import Compositor
from textual.geometry import Offset, Region
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from moet_desk.engine.scripted import DEFAULT_ANSWER, Script
from moet_desk.marked_text import MarkedText
from moet_desk.ui.lean_screen import LeanUpdate
from moet_desk.ui.look import Look
from moet_desk.ui.widgets.blocks import AnswerBlock
from moet_desk.ui.widgets.live_text import LiveText
from moet_desk.ui.widgets.segments import Segment
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage, count_layouts, dump

pytestmark = pytest.mark.asyncio

EVERYTHING = """# One *h*

## Two

### Three with `code`

text **bold** and *em* and ~~gone~~ and a [link](https://example.org/x), then much more of it so
that it wraps at any width; wide 漢字 and 😀

> quote **b** one two three
> more
>
> - a
> - b
>
> > inner

---

- a
  - b
    - c `x`

    para
- long words long words long words long words long words long words long words long words long

9. nine

   second para

   ```py
   x = 1\t# tab
   ```
10. ten
    > q

| a | bb |
|---|---|
| 1 | some text |
| [l](http://x) | y |

```python
def f(x: int) -> str:

    return "a line that is much longer than the window is wide, so that it is cut off somewhere"
```

    indented code

![im](http://x.y) end
hard
"""


def cells(strips: list[Strip]) -> list[list[tuple[Any, ...]]]:
    """What is seen of each cell: of blanks only what is behind them."""
    rows = []
    for strip in strips:
        row: list[tuple[Any, ...]] = []
        for text, style, _ in strip:
            assert style is not None
            looks = (style.bold, style.italic, style.strike, style.underline, style.reverse)
            ink = (style.color, *map(bool, looks))
            row += [(c, style.bgcolor, *(ink if c != " " else ())) for c in text]
        rows.append(row)
    return rows


def picture(widget: Widget) -> list[Strip]:
    compositor = Compositor()
    compositor.reflow(widget, widget.size)
    return compositor.render_strips(widget.size)


async def settle(stage: Stage, pilot: Any) -> None:
    for _ in range(3):
        await stage.settle(pilot)


@pytest.mark.parametrize("theme", ["moet-dark", pytest.param("moet-light", marks=pytest.mark.slow)])
async def test_rows__everything_markdown_has__picture_of_the_widgets(theme: str) -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode", theme=theme))
    async with stage.open(70, 30) as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await stage.settle(pilot)
        block = stage.app.chat.query_one(AnswerBlock)
        live, finished = LiveText(plain=False), Segment(EVERYTHING)
        await block._body.mount(finished, live)
        await settle(stage, pilot)
        live.show(MarkedText(EVERYTHING))
        await settle(stage, pilot)
        wanted = cells(picture(finished))
        assert len(wanted) > 40
        assert cells(picture(live)) == wanted

        pieces = LiveText(plain=False)
        await block._body.mount(pieces)
        await settle(stage, pilot)
        for end in range(0, len(EVERYTHING) + 11, 11):
            pieces.show(MarkedText(EVERYTHING[:end]))
        await settle(stage, pilot)
        assert cells(picture(pieces)) == wanted
        await pilot.resize_terminal(54, 30)
        await settle(stage, pilot)
        assert live.size.width == 49
        assert cells(picture(live)) == cells(picture(finished))


async def test_answer__grows_and_ends__few_layouts_no_jump_and_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    text = "\n\n".join([DEFAULT_ANSWER] * 12)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        transcript = stage.app.chat.query_one(Transcript)
        await block.append(MarkedText(text[:-300]), room=6)
        await settle(stage, pilot)
        live = block.live
        assert live is not None
        assert live.n_rows_held == live.size.height >= live.n_rows
        transcript.follow()
        await block.append(MarkedText(text[-300:-100]), room=8)
        await settle(stage, pilot)
        free = live.n_rows_held - live.n_rows
        assert free == 8
        layouts = count_layouts(monkeypatch, stage.app.screen)
        for start in range(-100, 0, 20):
            await block.append(MarkedText(text[start : start + 20 or None]))
            await stage.settle(pilot)
        assert layouts == []
        assert live.n_rows > live.n_rows_held - free
        rows = live.n_rows
        shown = [row for row in dump(stage.app).splitlines() if "most weights rest" in row]
        await block.finish()
        assert block.live is None
        assert "".join(segment.text for segment in block.segments) == text
        parked = [segment.parked for segment in block.segments]
        assert parked[0]
        assert not parked[-1]
        await settle(stage, pilot)
        assert sum(segment.size.height for segment in block.segments) == rows
        assert shown[-1] in dump(stage.app)


async def test_answer__looked_for_while_written__found_when_it_is_complete() -> None:
    stage = Stage(Script(answers=("one fox runs",), tokens_per_s=10))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.3, step_s=0.1)
        block = stage.app.chat.query_one(AnswerBlock)
        await block.seek("fox")
        await stage.play(pilot, 3.0)
        await settle(stage, pilot)
        strips = stage.app.screen._compositor.render_strips()
        pieces = [piece for row in strips for piece in row if piece.text == "fox"]
        assert [piece.style is not None and piece.style.reverse for piece in pieces] == [True]


async def test_selection__over_rows__words_as_they_stand() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        await block.append(MarkedText("first *line*\n\n- second line\n\nthird"))
        await settle(stage, pilot)
        assert block.live is not None
        selection = Selection(Offset(6, 0), Offset(8, 2))
        assert block.live.get_selection(selection) == ("line\n\n• second", "\n")


REPAINTED = (
    [Region(4, 8, 9, 1)],
    [Region(0, 5, 20, 3), Region(70, 20, 30, 2)],
    [Region(95, 2, 12, 30)],
)


async def test_repaint__some_cells__as_in_the_whole_picture() -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 3.0)
        lean, screen = stage.app.screen._compositor, stage.app.screen
        plain = Compositor()
        plain.reflow(screen, screen.size)
        whole = cells(plain.render_strips(screen.size))
        assert cells(lean.render_strips(screen.size)) == whole
        asked: list[Region] = []
        for widget in screen.query("*"):
            intact = widget.render_lines
            widget.render_lines = lambda crop, do=intact: (asked.append(crop), do(crop))[1]  # type: ignore[method-assign]
        for regions in REPAINTED:
            asked.clear()
            lean._dirty_regions.update(regions)
            update = lean.render_update()
            assert isinstance(update, LeanUpdate)
            sent: list[tuple[int, int]] = []
            for y, x, strip in update.pieces:
                assert cells([strip])[0] == whole[y][x : x + strip.cell_length]
                sent += [(x + i, y) for i in range(strip.cell_length)]
            assert len(sent) == len(set(sent))
            assert set(sent) >= {
                (x, y) for r in regions for y in r.line_range for x in r.column_range
            }
            assert sum(crop.height for crop in asked) < 3 * sum(r.height for r in regions)
