"""Markdown drawn as rows of cells, without a widget for each of its blocks.

Rows, words and looks are those of `MarkedMarkdown`; only a text that is still being written is
drawn this way. A widget for each block costs 2 to 4 ms of CPU until it is on the screen and makes
each layout longer, a row here about 0.05 ms (measured on 2 cores, 2026-11-30). UI thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import cast

from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions
from textual.widget import Widget
from textual.widgets.markdown import MarkdownBlock

from moet_desk.ui.lean_rows import is_one_row, one_row
from moet_desk.ui.widgets.marked_markdown import underlined
from moet_desk.ui.widgets.open_rows import OpenWords

LOOKS = {
    "h1", "h2", "h3", "h4", "h5", "h6", "bullet", "code", "quote", "quote-edge", "line", "table",
    "table-head", "table-line", "em", "strong", "s", "code_inline",
}  # fmt: skip
"""Component classes of a widget that rows are drawn for."""

STYLES = """
    & > .h1 { color: $markdown-h1-color; text-style: $markdown-h1-text-style; }
    & > .h2 { color: $markdown-h2-color; text-style: $markdown-h2-text-style; }
    & > .h3 { color: $markdown-h3-color; text-style: $markdown-h3-text-style; }
    & > .h4 { color: $markdown-h4-color; text-style: $markdown-h4-text-style; }
    & > .h5 { color: $markdown-h5-color; text-style: $markdown-h5-text-style; }
    & > .h6 { color: $markdown-h6-color; text-style: $markdown-h6-text-style; }
    & > .bullet { color: $text-primary; }
    &:light > .bullet { color: $text-secondary; }
    & > .code { background: $panel; color: $foreground; }
    & > .quote { background: $boost; }
    & > .quote-edge { color: $text-primary 50%; }
    &:light > .quote-edge { color: $text-secondary; }
    & > .line { color: $secondary; }
    &:light > .table { background: white 30%; }
    & > .table-head { color: $primary; }
    & > .table-line { color: $foreground 20%; }
    & > .em { text-style: italic; }
    & > .strong { text-style: bold; }
    & > .s { text-style: strike; }
    &:dark > .code_inline { background: $warning 10%; color: $text-warning 95%; }
    &:light > .code_inline { background: $error 5%; color: $text-error 95%; }
"""
"""Their looks: those of Textual's Markdown with the changes of our style sheet."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where blocks stand: their columns, the looks around them, and what they are inside of."""

    width: int
    looks: tuple[str, ...] = ()
    n_bullets: int = 0
    in_list: bool = False
    is_top: bool = False


class RowDrawer:
    """Draws Markdown for one widget, which has the component classes `LOOKS`.

    Args:
        widget: its styles are used; it must be on a screen.
        bullets: of unordered lists, one for each depth.
        code: draws the lines of a block of code, given its token and style, in any width.
    """

    def __init__(
        self, widget: Widget, bullets: Sequence[str], code: Callable[[Token, Style], list[Strip]]
    ) -> None:
        self._widget = widget
        self._bullets = bullets
        self._lines_of_code = code
        self._options = RenderOptions(widget._get_style, {})
        self._styles: dict[tuple[str, ...], Style] = {}
        self._last: tuple[Content, list[Strip], _Place] | None = None  # the paragraph at the end

    def forget_looks(self) -> None:
        """The widget looks different now."""
        self._styles.clear()

    def open_words(self, source: str, rows: Sequence[Strip]) -> OpenWords | None:
        """The paragraph at the end of what was drawn last, None if something else is there.

        Args:
            source: Markdown of what was drawn.
            rows: what `draw` has returned.
        """
        if self._last is None or source.endswith("\n"):
            return None
        content, drawn, place = self._last
        text = drawn[-1].text.rstrip(" ")
        if not text or not content.plain.endswith(text):
            return None
        at, edges = len(rows) - 2, None
        left = rows[at].cell_length - place.width
        if left:
            edges = rows[at].crop(0, left), self._blank(replace(place, width=left))
        return OpenWords(
            source, content.divide([len(content) - len(text)])[-1],
            partial(self._strips, place=place), edges, list(rows[at + 1 :]), at,
        )  # fmt: skip

    def code_rows(self, lines: Sequence[Strip], width: int) -> list[Strip]:
        """Rows of a block of code at the top."""
        return self._rows_of_code(lines, _Place(width), self._style(("code",)))

    @property
    def code_style(self) -> Style:
        """The look of code at the top."""
        return self._style(("code",))

    def draw(self, tokens: Sequence[Token], width: int) -> list[Strip]:
        """Rows of `width` cells, with the blank rows below each block."""
        place = _Place(width, is_top=True)
        self._last = None
        return self._stack(SyntaxTreeNode(tokens).children, place)

    def _stack(self, nodes: Sequence[SyntaxTreeNode], place: _Place) -> list[Strip]:
        rows: list[Strip] = []
        for node in nodes:
            rows += self._block(node, place)
            if _has_blank_below(node.type, place):
                rows.append(self._blank(place))
        return rows

    def _block(self, node: SyntaxTreeNode, place: _Place) -> list[Strip]:
        if node.type not in ("bullet_list", "ordered_list"):
            self._last = None
        match node.type:
            case "paragraph":
                content = _inline(node)
                rows = self._strips(content, place)
                self._last = (content, rows, place)
                return rows
            case "heading":
                return self._text(node, place, node.tag)
            case "bullet_list" | "ordered_list":
                return self._list(node, place)
            case "blockquote":
                return self._quote(node, place)
            case "fence" | "code_block":
                return self._code(node, place)
            case "hr":
                line = Content("─" * place.width)
                return [self._blank(place), *self._strips(line, place, "line")]
            case "table":
                return self._table(node, place)
            case _:
                return []

    # -- kinds of blocks -----------------------------------------------------------------------

    def _text(self, node: SyntaxTreeNode, place: _Place, *looks: str) -> list[Strip]:
        return self._strips(_inline(node), place, *looks)

    def _list(self, node: SyntaxTreeNode, place: _Place) -> list[Strip]:
        items = node.children
        if node.type == "ordered_list":
            start = int(items[0].info or 1)
            marks = [f"{number}. " for number, _ in enumerate(items, start)]
            longest = max(map(len, marks))
            marks = [mark.rjust(longest + 1) for mark in marks]
            depth = place.n_bullets
        else:
            marks = [self._bullets[place.n_bullets % len(self._bullets)]] * len(items)
            depth = place.n_bullets + 1
        rows: list[Strip] = []
        for mark, item in zip(marks, items, strict=True):
            inner = replace(
                place, width=max(1, place.width - len(mark)), n_bullets=depth,
                in_list=True, is_top=False,
            )  # fmt: skip
            edge = replace(place, width=len(mark))
            if not item.children:
                self._last = None
            content = self._stack(item.children, inner) or [self._blank(inner)]
            first = self._strips(Content(mark), edge, "bullet")[0]
            edges = [first, *([self._blank(edge)] * (len(content) - 1))]
            rows += [Strip.join(pair) for pair in zip(edges, content, strict=True)]
        return rows

    def _quote(self, node: SyntaxTreeNode, place: _Place) -> list[Strip]:
        looks = (*place.looks, "quote")
        inner = replace(place, width=max(1, place.width - 3), looks=looks, is_top=False)
        edge = self._strips(Content("▌"), replace(place, width=1), "quote-edge")[0]
        gap = self._blank(replace(inner, width=1))
        content = self._stack(node.children, inner)
        self._last = None  # there is an edge on the right
        return [Strip.join((edge, gap, row, gap)) for row in content]

    def _code(self, node: SyntaxTreeNode, place: _Place) -> list[Strip]:
        style = self._style((*place.looks, "code"))
        return self._rows_of_code(
            self._lines_of_code(cast("Token", node.token), style), place, style
        )

    def _rows_of_code(self, lines: Sequence[Strip], place: _Place, style: Style) -> list[Strip]:
        edge = Strip.blank(1, style.rich_style)
        return [
            Strip.join((edge, line)).adjust_cell_length(place.width, style.rich_style)
            for line in lines
        ]

    def _table(self, node: SyntaxTreeNode, place: _Place) -> list[Strip]:
        cells = [
            [_inline(cell) for cell in row.children]
            for part in node.children
            for row in part.children
        ]
        if len(cells) > 1 and not cells[-1]:
            cells.pop()
        columns = zip(*cells, strict=True)
        wanted = [max(cell.cell_length for cell in column) + 2 for column in columns]
        widths = _spread(wanted, place.width - len(wanted) - 1)
        place = replace(place, looks=(*place.looks, "table"))
        edge = self._strips(Content("│"), replace(place, width=1), "table-line")[0]
        rows = [self._rule("┌┬┐", widths, place)]
        for number, row in enumerate(cells):
            looks = ("table-head",) if number == 0 else ()
            rows += self._table_row(row, widths, place, looks, edge)
            rows.append(self._rule("├┼┤" if number < len(cells) - 1 else "└┴┘", widths, place))
        return rows

    def _table_row(
        self, row: Sequence[Content], widths: Sequence[int], place: _Place,
        looks: tuple[str, ...], edge: Strip,
    ) -> list[Strip]:  # fmt: skip
        drawn = [
            self._strips(cell, replace(place, width=max(1, width - 2)), *looks)
            for cell, width in zip(row, widths, strict=True)
        ]
        height = max(map(len, drawn))
        gap = self._blank(replace(place, width=1))
        rows = []
        for y in range(height):
            parts = [edge]
            for cell, width in zip(drawn, widths, strict=True):
                at = y - (height - len(cell)) if looks else y  # heads stand at the bottom
                blank = self._blank(replace(place, width=max(1, width - 2)))
                parts += [gap, cell[at] if 0 <= at < len(cell) else blank, gap, edge]
            rows.append(Strip.join(parts))
        return rows

    def _rule(self, corners: str, widths: Sequence[int], place: _Place) -> Strip:
        middle = corners[1].join("─" * width for width in widths)
        line = Content(f"{corners[0]}{middle}{corners[2]}")
        return self._strips(line, place, "table-line")[0]

    # -- parts ---------------------------------------------------------------------------------

    def _strips(self, content: Content, place: _Place, *looks: str) -> list[Strip]:
        style = self._style((*place.looks, *looks))
        ground = self._style(place.looks).background_style.rich_style
        text, get_style = content.plain, self._options.get_style
        fits = len(text) <= place.width and content.cell_length <= place.width
        lines = [content] if fits and is_one_row(text) else content.wrap(place.width)
        rows = [one_row(line, style, get_style) for line in lines]
        if any(not isinstance(span.style, str) for span in content.spans):  # links
            rows = [row._apply_link_style(self._widget.link_style) for row in rows]
        return [row.adjust_cell_length(place.width, ground) for row in rows]

    def _blank(self, place: _Place) -> Strip:
        ground = self._style(place.looks).background_style.rich_style
        return Strip.blank(place.width, ground)

    def _style(self, looks: tuple[str, ...]) -> Style:
        if looks not in self._styles:
            widget = self._widget
            self._styles[looks] = widget.get_visual_style(*looks) if looks else widget.visual_style
        return self._styles[looks]


def _has_blank_below(kind: str, place: _Place) -> bool:
    match kind:
        case "paragraph":
            return place.is_top
        case "bullet_list" | "ordered_list":
            return not place.in_list
        case _:
            return True


def _inline(node: SyntaxTreeNode) -> Content:
    """The text of a block as the Markdown widgets draw it, with its marks."""
    if not node.children:
        return Content("")
    token = cast("Token", node.children[0].token)
    of_nobody = cast("MarkdownBlock", None)  # the method asks only for its token
    return underlined(MarkdownBlock._token_to_content(of_nobody, token), token)


def _spread(wanted: Sequence[int], room: int) -> list[int]:
    """Widths that fill the room, in the proportion of what is wanted."""
    total = sum(wanted)
    if room < 3 * len(wanted):
        return [3] * len(wanted)
    ends = [0, *(room * done // total for done in accumulate(wanted))]
    return [max(3, end - start) for start, end in pairwise(ends)]
