"""The wizard's list of models, with a last row for a repository or a folder. UI thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from moet_desk.ui.desk import Offer
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.setup_pages import offer_row, pointed

_OTHER = "other"
"""Id of the line that takes a repository's name or a folder."""

_OTHER_ROW = " From Hugging Face, or from a folder...       its name, link or path"


class Offers(OptionList):
    """Enter takes the row under the cursor. `listed` is None until there is something to list."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "Next", id="setup.choose"),
    ]

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__(id="offers")
        self._glyphs = glyphs
        self.listed: tuple[Offer, ...] | None = None
        self._width = 80

    def show(self, offers: Sequence[Offer], *, wanted: str | None, width: int) -> None:
        """List these offers, with the cursor on the one of this id, else on the first."""
        self.listed, self._width = tuple(offers), width
        self.clear_options()
        rows = [offer_row(offer, self._glyphs, width) for offer in offers]
        ids = [offer.id for offer in offers]
        self.add_options(
            [Option(row, id=f"offer-{name}") for row, name in zip(rows, ids, strict=True)]
        )
        self.add_option(Option(Content(_OTHER_ROW), id=_OTHER))
        self.highlighted = ids.index(wanted) if wanted in ids else 0
        self.call_after_refresh(self.scroll_to_highlight)  # an empty list has no room to scroll in

    def point(self) -> None:
        """Put the cursor's mark before the row it is on."""
        drawn = [offer_row(offer, self._glyphs, self._width) for offer in self.listed or ()]
        for at, row in enumerate([*drawn, Content(_OTHER_ROW)]):
            text = pointed(row, self._glyphs, here=at == self.highlighted)
            if at < self.option_count and self.get_option_at_index(at).prompt != text:
                self.replace_option_prompt_at_index(at, text)

    def chosen(self) -> Offer | None:
        """The offer under the cursor; None on the last row."""
        at, offers = self.highlighted, self.listed or ()
        return offers[at] if at is not None and at < len(offers) else None
