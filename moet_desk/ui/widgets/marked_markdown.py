"""Markdown that can underline a part of its text.

Only an overlay on what Textual's own widgets draw: the parse, the layout, the source and what is
copied are the same with marks and without. UI thread; parsing may happen in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from moet_desk.marked_text import Ranges, cut_ranges
from moet_desk.ui.lean_rows import is_one_row
from moet_desk.ui.markdown_marks import DRAWN, MARKS, mark_tokens
from moet_desk.ui.text import find_all, markdown_parser

UNDERLINE = "underline"
SOUGHT = "reverse"
PLAIN_BULLETS = ["* ", "- ", "+ "]

if TYPE_CHECKING:
    from textual.css.styles import RulesMap

    _Block = MarkdownBlock
else:
    _Block = object  # so that the Textual class stays the first of its kind, for its style sheet


def underlined(content: Content, token: Token) -> Content:
    """The content with the token's marks, if it is what the marks were worked out for."""
    if content.plain != token.meta.get(DRAWN):
        return content
    for start, end in token.meta[MARKS]:
        content = content.stylize(UNDERLINE, start, end)
    return content


def mark_sought(markdown: Markdown, wanted: str) -> None:
    """Reverse a text that is looked for in all that a widget has drawn."""
    for block in markdown.query(MarkdownBlock):
        if isinstance(block, _MarkedCode | _MarkedText):
            block.mark_sought(wanted)
    for cell in markdown.query("MarkdownTableCellContents").results(Static):
        drawn = cell.content
        content = sought(drawn, wanted) if isinstance(drawn, Content) else None
        if content is not None:
            cell.update(content)


def sought(content: Content, wanted: str) -> Content | None:
    """The content with each place of a text reversed; None: it is not there."""
    places = find_all(content.plain, wanted)
    for start, end in places:
        content = content.stylize(SOUGHT, start, end)
    return content if places else None


def needs_other_rows(widget: Widget, content: Content) -> bool:
    """Whether a text would not fit the rows that a widget has for its text just so.

    To lay a long chat out anew is most of what a flush of a few words costs.
    """
    width, rows = widget.content_size
    if rows == 1 and content.cell_length <= width and is_one_row(content.plain):
        return False
    return not width or content.get_height(cast("RulesMap", widget.styles), width) != rows


class _MarkedText(_Block):
    """A block of text: paragraph, heading, table cell."""

    def build_from_token(self, token: Token) -> None:
        super().build_from_token(token)
        if MARKS in token.meta:
            self.set_content(underlined(self._content, token))

    def mark_sought(self, wanted: str) -> None:
        """See the function."""
        content = sought(self._content, wanted)
        if content is not None:
            self.set_content(content)

    def set_content(self, content: Content) -> None:
        """Draw another text; the screen is laid out anew only if it needs other rows."""
        self._content = content
        self.update(content, layout=needs_other_rows(self, content))


class _MarkedCode(MarkdownFence):
    """A block of code. Its colours are made anew with each theme, and marked again."""

    def compose(self) -> ComposeResult:
        self._highlighted_code = underlined(self._highlighted_code, self._token)
        yield from super().compose()

    def set_content(self, content: Content) -> None:
        super().set_content(underlined(content, self._token))

    def mark_sought(self, wanted: str) -> None:
        """See the function."""
        content = sought(self._highlighted_code, wanted)
        if content is not None:
            self.set_content(content)


def _marked(block: type[MarkdownBlock]) -> type[MarkdownBlock]:
    return cast("type[MarkdownBlock]", type(f"Marked{block.__name__}", (_MarkedText, block), {}))


_TEXT_BLOCKS = ("h1", "h2", "h3", "h4", "h5", "h6", "paragraph_open", "th_open", "td_open")
_MARKED_BLOCKS: Mapping[str, type[MarkdownBlock]] = {
    **{name: _marked(Markdown.BLOCKS[name]) for name in _TEXT_BLOCKS},
    **dict.fromkeys(("fence", "code_block"), _MarkedCode),
}


class _MarkingParser:
    """The parser of all model text, which adds marks to the tokens."""

    def __init__(self, marks_of: Callable[[str], Ranges]) -> None:
        self._marks_of = marks_of

    def parse(self, source: str) -> list[Token]:
        """Parse; nothing but `meta` of the tokens differs from the parser's."""
        tokens = markdown_parser().parse(source)
        marks = self._marks_of(source)
        if marks:
            mark_tokens(tokens, source, marks)
        return tokens


class MarkedMarkdown(Markdown):
    """Markdown with marks, which are ranges of its source. Links never open by themselves."""

    def __init__(
        self,
        text: str = "",
        *,
        marks: Ranges = (),
        shows_marks: bool = False,
        plain: bool = False,
    ) -> None:
        """`plain`: bullets in ASCII."""
        parser: Any = _MarkingParser(self._marks_of)
        super().__init__(text, parser_factory=lambda: parser, open_links=False)
        self.marks = marks  # may reach beyond the text that is drawn already
        self.shows_marks = shows_marks
        if plain:
            self.BULLETS = PLAIN_BULLETS

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """Our own class where text is drawn."""
        return _MARKED_BLOCKS.get(block_name) or super().get_block_class(block_name)

    def _marks_of(self, part: str) -> Ranges:
        """Marks of what is parsed: the whole source, or its end when text was appended."""
        source = self.source
        if not self.shows_marks or not self.marks or not source.endswith(part):
            return ()
        return cut_ranges(self.marks, len(source) - len(part), len(source))

    async def show_marks(self, shown: bool) -> None:
        """Switch the underlines on or off; draws anew if there is something to underline."""
        if shown is self.shows_marks:
            return
        self.shows_marks = shown
        if self.marks and self.source:
            await self.redraw()

    async def redraw(self) -> None:
        """Draw anew what does not grow."""
        await self.update(self.source)
