"""The wizard's second step below its heading: models, a filter, a field for others, notes.

It shows what it is handed and says what is wanted; the screen decides. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList, Static

from moet_desk.ui.desk import Offer
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.filter_line import FilterLine, matches
from moet_desk.ui.widgets.offer_list import Offers


class ModelChoice(Vertical):
    """`changed` is called when another row or a filter asks for a new drawing."""

    DEFAULT_CSS = """
    ModelChoice { height: auto; }
    ModelChoice Offers { height: auto; max-height: 50vh; }
    ModelChoice Offers, ModelChoice Offers:focus { border: none; padding: 0; }
    ModelChoice #repository { height: 1; border: none; padding: 0 1; margin: 1 0 0 0; }
    ModelChoice #repository { display: none; }
    ModelChoice #about { height: auto; padding-top: 1; }
    """

    class LookUp(Message):
        """A repository or folder was named."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, glyphs: Glyphs, changed: Callable[[], None]) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._changed = changed

    def compose(self) -> ComposeResult:
        yield Offers(self._glyphs)
        yield FilterLine(self._changed, self.focus_list)
        yield Input(
            id="repository",
            placeholder="owner/name or a link, or a folder or .gguf file",
            compact=True,
        )
        yield Static("", id="about", markup=False)

    def show(self, offers: Sequence[Offer], *, first: str | None, width: int, is_all: bool) -> None:
        """List the offers that the filter leaves, the cursor on `first`; `is_all`: more will not
        come, so that an empty list is one too.
        """
        wanted, options = self.query_one(FilterLine).text, self.query_one(Offers)
        left = tuple(o for o in offers if matches(wanted, o.title, o.id, *o.about))
        if left != options.listed and (left or is_all):
            options.show(left, wanted=first, width=width)

    def say(self, words: Content) -> None:
        """Put words under the list."""
        about = self.query_one("#about", Static)
        if about.content != words:
            about.update(words)

    @property
    def chosen(self) -> Offer | None:
        """The offer under the cursor; None on the last row, or while nothing is listed."""
        return self.query_one(Offers).chosen()

    @property
    def is_listed(self) -> bool:
        return self.query_one(Offers).listed is not None

    def forget(self) -> None:
        """List everything anew when it is shown next."""
        self.query_one(Offers).listed = None

    def focus_list(self) -> None:
        """Let the arrows move the cursor."""
        self.query_one(Offers).focus()

    def open_filter(self) -> None:
        """Type which rows are wanted."""
        self.query_one(FilterLine).open()

    @property
    def field_is_open(self) -> bool:
        """Whether a repository or folder is typed."""
        return self.query_one("#repository", Input).display

    def open_field(self) -> None:
        """Type a repository or a folder."""
        field = self.query_one("#repository", Input)
        field.display = True
        field.focus()

    def close_field(self) -> None:
        """Go back to the list."""
        self.query_one("#repository", Input).display = False
        self.focus_list()

    def close_all(self) -> None:
        """Hide the field and the filter; another step begins."""
        self.query_one("#repository", Input).display = False
        self.query_one(FilterLine).display = False

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self.query_one(Offers).point()
        self._changed()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.strip():
            self.post_message(self.LookUp(event.value.strip()))
