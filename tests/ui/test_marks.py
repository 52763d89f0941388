"""Marks of text that was made again: where they end up in Markdown, and on the screen."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.widgets.markdown import MarkdownBlock

from moet_desk.engine.handle import Quality
from moet_desk.engine.scripted import DEFAULT_ANSWER, Script
from moet_desk.marked_text import MarkedText, ranges_of
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.look import Look
from moet_desk.ui.markdown_marks import DRAWN, MARKS, mark_tokens
from moet_desk.ui.text import Cleaner, markdown_parser
from moet_desk.ui.widgets.blocks import AnswerBlock
from moet_desk.ui.widgets.marked_markdown import MarkedMarkdown
from moet_desk.ui.widgets.segments import Segment
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage, count_layouts, dump

EVERYTHING = """\
# A *head* with `code` ##

Some **bold `c d` x** &amp; \\* and [a li*n*k](http://x.y/(z) "t (t)") too,
soft ~~struck~~ ![pict](u) <http://q.r> end  
hard break. A * star and a \\\\ slash, 1 < 2 & 3.

> quoted *one*
> two

- first item
  goes on
  - nested **deep**
1. number

| name | a value |
|------|---|
| c \\| x | `d e` |
| name | last |

```py
def f(x):
\treturn  x

# name
```

    old code
"""  # noqa: W291


def marked_texts(source: str, marks: Any) -> list[str]:
    """The marked stretches of drawn text, in order."""
    tokens = markdown_parser().parse(source)
    mark_tokens(tokens, source, marks)
    return [
        token.meta[DRAWN][start:end] for token in tokens for start, end in token.meta.get(MARKS, ())
    ]


@pytest.mark.parametrize(
    "word",
    ["head", "code", "Some ", "bold ", "c d", " x", "too,", "struck", "pict", "http://q.r",
     "end", "hard break", "star", "1 < 2", " 3.", "quoted ", "two", "first item", "goes on",
     "deep", "number", "a value", "d e", "last", "def f(x):", "return  x", "old code"],
)  # fmt: skip
def test_marks__a_stretch_of_the_source__same_words_are_marked(word: str) -> None:
    start = EVERYTHING.rindex(word)
    found = marked_texts(EVERYTHING, ((start, start + len(word)),))
    assert found == [word]


def test_marks__markup_escapes_and_entities__what_they_draw() -> None:
    def drawn(source: str, part: str) -> list[str]:
        start = source.index(part)
        return marked_texts(source, ((start, start + len(part)),))

    assert drawn("a **b** c", "**") == []
    assert drawn("a **b** c", "**b** c") == ["b c"]
    assert drawn("a &amp; b", "&amp;") == ["&"]
    assert drawn("a \\* b", "\\* ") == ["* "]
    assert drawn("a\n  b", "\n  b") == [" b"]
    assert drawn("[a b](c 'd e') d", "d") == []
    assert drawn("[a](b) b", ") b") == [" b"]
    assert drawn("| a | a |\n|---|---|\n| a | a |", " a |\n|---") == ["a"]
    assert drawn("| a \\| b | c |\n|---|---|", "| c") == ["c"]
    assert drawn("# a # a", "a # a") == ["a # a"]
    assert drawn("``` py\nx\n```", "``` py\nx") == ["x"]
    assert drawn("http://a.b/c%20d e", "e") in ([], ["e"])  # drawn decoded; never a wrong word


WORDS = st.sampled_from(
    ["word", "one two", "*em*", "**strong**", "`co de`", "\\*", "&lt;", "[li](x)", "a\nb", "~~s~~",
     "日本 ", "1.", "<http://a.b>", "![p](q)", "\\\\"]
)  # fmt: skip
BLOCKS = st.lists(WORDS, min_size=1, max_size=5).map(" ".join).flatmap(
    lambda text: st.sampled_from(
        [text, f"# {text}".replace("\n", " "), "> " + text.replace("\n", "\n> "),
         "- " + text.replace("\n", "\n  "), f"```\n{text}\n```"]
    )
)  # fmt: skip
SOURCES = st.lists(BLOCKS, max_size=4).map("\n\n".join)


@given(SOURCES, st.data())
@settings(max_examples=300, deadline=None)
def test_marks__any_markdown__overlay_of_the_right_characters(source: str, data: Any) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(source), max_size=len(source)))
    before = markdown_parser().parse(source)
    tokens = markdown_parser().parse(source)
    mark_tokens(tokens, source, ranges_of(flags))
    for plain, token in zip(before, tokens, strict=True):
        marks = token.meta.pop(MARKS, ())
        drawn = token.meta.pop(DRAWN, "")
        assert token == plain  # nothing else of a token is touched
        here = source.split("\n")[slice(*(token.map or (0, 0)))]
        for start, end in marks:
            assert 0 <= start < end <= len(drawn)
            for char in drawn[start:end]:
                lines = "\n".join(here)
                assert char in lines or char == " " or f"&{'lt'};" in lines
    # All marked: all that is drawn is marked, but for the widget's own sign of a picture.
    mark_tokens(tokens, source, ((0, len(source)),) if source else ())
    for token in tokens:
        if token.type == "inline" and token.content and "![" not in token.content:
            assert token.meta[MARKS] == ((0, len(token.meta[DRAWN])),), token


@given(st.text(alphabet="ab\r\n\x1b[m;1\x07]", max_size=30), st.data())
@settings(max_examples=300, deadline=None)
def test_cleaner__marked_pieces__text_as_without_and_marks_on_their_characters(
    text: str, data: Any
) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    cut = data.draw(st.integers(0, len(text)))
    piece = MarkedText(text, ranges_of(flags))
    cleaner, plain, each = Cleaner(), Cleaner(), Cleaner()
    found = cleaner.feed_marked(piece.cut(0, cut)) + cleaner.feed_marked(piece.cut(cut))
    assert found.text == plain.feed(text)
    single = MarkedText()
    for char, flag in zip(text, flags, strict=True):
        single += MarkedText.whole(each.feed(char), marked=flag)
    assert found == single


# -- on the screen ---------------------------------------------------------------------------


def underlines(app: App[Any], region: Region) -> list[str]:
    """Underlined stretches of each row of a region, blanks at their ends removed."""
    found = []
    strips = app.screen._compositor.render_strips()
    for strip in strips[region.y : region.bottom]:
        run = ""
        for segment in [*strip.crop(region.x, region.right), None]:
            if segment is not None and segment.style is not None and segment.style.underline:
                run += segment.text
                continue
            if run.strip():
                found.append(run.strip())
            run = ""
    return found


def answer_region(stage: Stage) -> Region:
    return stage.app.chat.query_one(Transcript).region


BALANCED = Wishes(quality=Quality.BALANCED)
# Tokens are at most five characters with the blanks before them: each second one is made again.
SCRIPT = Script(answers=("alpha bravo **carry** delta `eagle` foxes",), rerun_every=2)
MARKED = ["alpha", "car", "delta", "e"]


class Sheet(App[None]):
    """A Markdown with marks, and one without."""

    def __init__(self, marks: Any) -> None:
        super().__init__()
        self.marks = marks

    def compose(self) -> ComposeResult:
        yield VerticalScroll(MarkedMarkdown(EVERYTHING, marks=self.marks, shows_marks=True))


@pytest.mark.asyncio
async def test_widget__everything_marked__same_picture_but_underlined() -> None:
    pictures, found = [], []
    for marks in ((), ((0, len(EVERYTHING)),)):
        app = Sheet(marks)
        async with app.run_test(size=(70, 60)) as pilot:
            await pilot.pause()
            pictures.append(dump(app))
            found.append(underlines(app, app.screen.region))
    assert pictures[0] == pictures[1]
    words = " ".join(found[1])
    for part in ("struck", "deep", "a value", "d e", "def f(x):", "return  x", "old code"):
        assert part in words
    assert len(found[1]) > len(found[0])


@pytest.mark.asyncio
async def test_answer__switch_in_the_palette__underlines_while_written_and_after() -> None:
    stage = Stage(SCRIPT, wishes=BALANCED)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.2, step_s=0.05)
        assert underlines(stage.app, answer_region(stage)) == []
        await choose(pilot, stage, "Underline")
        assert underlines(stage.app, answer_region(stage))[0] == "alpha"
        await stage.play(pilot, 2.0)
        written = underlines(stage.app, answer_region(stage))
        assert not stage.app.conversation.busy
        await choose(pilot, stage, "Underline")
        assert underlines(stage.app, answer_region(stage)) == []
        await choose(pilot, stage, "Underline")
        assert underlines(stage.app, answer_region(stage)) == written
        assert stage.app.conversation.turns[-1].text == SCRIPT.answers[0]
        stored = next(iter(stage.chats.chats.values())).messages[-1]
        assert stored.content == SCRIPT.answers[0]
        assert "marks" not in stored.meta
    assert written == MARKED


async def choose(pilot: Any, stage: Stage, words: str) -> None:
    """Run a command of the palette by typing its name."""
    await pilot.press("ctrl+p")
    await pilot.press(*words.replace(" ", "_"))
    for _ in range(50):
        await pilot.pause(0.02)
        if words in dump(stage.app):
            break
    await pilot.pause(0.2)
    await pilot.press("enter")
    for _ in range(10):
        await pilot.pause(0.02)


async def at_rest(stage: Stage, pilot: Any) -> list[str]:
    """Underlines of the answer, once they do not change any more."""
    before, now = None, underlines(stage.app, answer_region(stage))
    for _ in range(50):
        if before == now:
            break
        await pilot.pause(0.05)
        before, now = now, underlines(stage.app, answer_region(stage))
    return now


@pytest.mark.asyncio
@pytest.mark.parametrize("colour", [True, False], ids=["colour", "no colour"])
async def test_answer__setting_on__resize_theme_and_redraw_keep_the_underlines(
    colour: bool,
) -> None:
    code = "```py\nalpha = bravo\n```\n\n" + SCRIPT.answers[0]
    look = Look(motion="none", glyphs="unicode", marks_reruns=True, colour=colour)
    stage = Stage(replace(SCRIPT, answers=(code,)), wishes=BALANCED, look=look)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 2.0)
        first = await at_rest(stage, pilot)
        assert first == ["=", "bravo", "ry", "eagl", "foxes"]
        await pilot.resize_terminal(100, 30)
        assert await at_rest(stage, pilot) == first
        stage.app.theme = "moet-light"
        assert await at_rest(stage, pilot) == first
        await pilot.press("ctrl+l", "escape")  # draws the open chat anew
        assert await at_rest(stage, pilot) == first
        chat_id = stage.app.conversation.chat_id
        await pilot.press("ctrl+n")
        assert chat_id is not None
        stage.app.conversation.open(chat_id)
        assert stage.app.conversation.turns[-1].marks == ()  # not stored


@pytest.mark.asyncio
async def test_answer__long__scrolled_away_and_back_and_switched_while_parked() -> None:
    paragraphs = [f"word{i:02} *more* text" for i in range(200)]
    long = Script(answers=("\n\n".join(paragraphs),), rerun_every=1, tokens_per_s=800)
    stage = Stage(long, wishes=BALANCED)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 3.0)
        segments = list(stage.app.chat.query(Segment))
        assert len(segments) > 2
        assert segments[0].parked
        await stage.app.chat.action_mark_reruns()
        bottom = await at_rest(stage, pilot)
        assert bottom[-1] == "word199 more text"
        stage.app.chat.query_one(Transcript).page(-100)
        await at_rest(stage, pilot)
        assert not segments[0].parked
        top = await at_rest(stage, pilot)
        await stage.app.chat.action_mark_reruns()
        assert await at_rest(stage, pilot) == []
    assert top[:2] == ["word00 more text", "word01 more text"]


@pytest.mark.asyncio
@pytest.mark.parametrize("switches", [1, 2])
async def test_block__switched_between_pieces__same_text_and_marks_as_at_once(
    switches: int,
) -> None:
    """The growing part is drawn anew with each switch; what comes behind must still fit."""
    source = "First *line*\nsecond line\n\n- a\n- b\n\n" + DEFAULT_ANSWER
    stage = Stage()
    async with stage.open(80, 60) as pilot:
        await stage.ready(pilot)
        stage.app.chat.query_one(Transcript).display = True
        block, whole = (
            AnswerBlock("m", when="", glyphs=stage.app.glyphs, shows_marks=True) for _ in range(2)
        )
        await stage.app.chat.query_one(Transcript).mount(block, whole)
        text = MarkedText(source, ((0, 9), (15, 40), (60, len(source))))
        await whole.set_text(text)
        for start in range(0, len(source), 7):
            await asyncio.gather(
                block.append(text.cut(start, start + 7)),
                *(block.show_marks((start + i) % 2 == 0) for i in range(switches)),
            )
        await block.finish()
        await block.show_marks(True)
        await pilot.pause()
        assert "".join(segment.text for segment in block.segments) == source
        assert blocks_of(block) == blocks_of(whole)


def blocks_of(block: AnswerBlock) -> list[tuple[str, Any]]:
    """What each Markdown block draws, with its underlines."""
    return [
        (child._content.plain, [s for s in child._content.spans if s.style == "underline"])
        for child in block.query("MarkdownBlock").results(MarkdownBlock)
    ]


@pytest.mark.asyncio
async def test_growing_text__same_rows__not_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(look=Look(motion="none", glyphs="unicode"))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        await block.append(MarkedText("some words"))
        await pilot.pause()
        layouts = count_layouts(monkeypatch, stage.app.screen)
        await block.append(MarkedText(" and more"))
        await pilot.pause()
        assert "some words and more" in dump(stage.app)
        assert layouts == []
        await block.append(MarkedText(" and more" * 12))
        await pilot.pause()
        assert layouts != []
        shown = [line for line in dump(stage.app).splitlines() if "and more" in line]
        assert len(shown) == 2
