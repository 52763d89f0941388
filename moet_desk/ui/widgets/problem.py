"""How a failure looks, and the questions that need an answer: error panel and confirm dialog.

The panel prints one catalogue record: title, code, cause, what to do, what is safe. It decides
nothing; pressing one of its buttons posts `ProblemPanel.Chosen`. UI thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from moet_desk.errors import MoetError
from moet_desk.ui.text import clean
from moet_desk.ui.theme import Glyphs


def error_record(error: MoetError | Mapping[str, Any]) -> Mapping[str, Any]:
    """The words of an error, as `MoetError.to_dict` gives them."""
    return error.to_dict() if isinstance(error, MoetError) else error


def problem_content(error: MoetError | Mapping[str, Any], glyphs: Glyphs) -> Content:
    """Title and code, cause, what to do, what is safe: four parts, one per line."""
    record = {key: clean(str(value)) for key, value in error_record(error).items()}
    head = (f"{glyphs.bad} {record.get('title', '')}", "bold $status-bad")
    code = (f"   {record.get('code', '')}", "$dim")
    lines = [Content.assemble(head, code), Content(f"  {record.get('cause', '')}")]
    if record.get("do"):
        lines.append(Content.assemble(("  Do: ", "bold"), record["do"]))
    if record.get("safe"):
        lines.append(Content.styled(f"  {record['safe']}", "$dim"))
    return Content("\n").join(lines)


class ProblemPanel(Vertical):
    """An error with its buttons. `actions` maps an action's id to its label."""

    DEFAULT_CSS = """
    ProblemPanel { height: auto; padding: 1 0 1 2; }
    ProblemPanel > Static { width: 1fr; height: auto; }
    ProblemPanel > Horizontal { height: auto; padding-top: 1; }
    ProblemPanel Button { margin-right: 2; }
    """

    class Chosen(Message):
        """A button of the panel was pressed."""

        def __init__(self, panel: ProblemPanel, action: str) -> None:
            super().__init__()
            self.panel = panel
            self.action = action

    def __init__(
        self,
        error: MoetError | Mapping[str, Any],
        *,
        glyphs: Glyphs,
        actions: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.error = error
        self._glyphs = glyphs
        self._actions = actions

    @property
    def code(self) -> str:
        """The code of its record."""
        return str(error_record(self.error).get("code", ""))

    def compose(self) -> ComposeResult:
        yield Static(problem_content(self.error, self._glyphs), markup=False)
        if self._actions:
            with Horizontal():
                for action, label in self._actions.items():
                    yield Button(Content(f"[ {label} ]"), name=action, compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.post_message(self.Chosen(self, event.button.name or ""))


class ConfirmDialog(ModalScreen[bool]):
    """A question with a safe default: the safe button has the focus, Esc is the safe choice."""

    DEFAULT_CSS = """
    ConfirmDialog { align: center middle; }
    ConfirmDialog > Vertical {
        width: 64; max-width: 100%; height: auto; padding: 1 2;
        background: $surface; border: round $primary;
    }
    ConfirmDialog Static { height: auto; }
    ConfirmDialog Horizontal { height: auto; align-horizontal: right; padding-top: 1; }
    ConfirmDialog Button { margin-left: 2; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "answer(False)", "Keep", id="dialog.safe"),
        Binding("left", "app.focus_previous", show=False, id="dialog.left"),
        Binding("right", "app.focus_next", show=False, id="dialog.right"),
    ]

    def __init__(self, title: str, *, body: str, act: str, keep: str = "Cancel") -> None:
        super().__init__()
        self._title = title
        self._body = body
        self._act = act
        self._keep = keep

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content.styled(f"{self._title}\n", "bold"), markup=False)
            yield Static(Content(self._body), markup=False)
            with Horizontal():
                yield Button(Content(f"[ {self._keep} ]"), id="keep", compact=True)
                yield Button(Content(f"[ {self._act} ]"), id="act", compact=True)

    def on_mount(self) -> None:
        self.query_one("#keep", Button).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "act")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
