"""The dialog that asks for a hub token: where it comes from, a masked field, what went wrong.

It hands the token to the desk in a thread and forgets it. Dismissed with True when whatever was
refused may be tried again. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, Static

from moet_desk.errors import MoetError
from moet_desk.ui.background import Background
from moet_desk.ui.desk import Desk
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs

_POLL_S = 0.1


def wants_consent(error: MoetError | None) -> bool:
    """Whether the hub asks who is there: the dialog opens by itself."""
    return error is not None and error.code == "MD-HUB-02"


def may_sign_in(error: MoetError | None) -> bool:
    """Whether signing in may help: also when the hub does not say that a model is there."""
    return error is not None and error.code in ("MD-HUB-01", "MD-HUB-02")


class SignInDialog(ModalScreen[bool]):
    """`error` is what the hub refused with; None: nothing was, it was asked for."""

    DEFAULT_CSS = """
    SignInDialog { align: center middle; }
    SignInDialog > Vertical {
        width: 72; max-width: 100%; height: auto; padding: 1 2;
        background: $surface; border: round $primary;
    }
    SignInDialog Static { height: auto; }
    SignInDialog Input { height: 1; border: none; padding: 0 1; margin: 1 0; }
    SignInDialog Horizontal { height: auto; align-horizontal: right; padding-top: 1; }
    SignInDialog Button { margin-left: 2; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Not now", id="sign_in.leave"),
    ]

    def __init__(self, desk: Desk, glyphs: Glyphs, error: MoetError | None = None) -> None:
        super().__init__()
        self._desk = desk
        self._glyphs = glyphs
        self._error = error
        self._asking: Background[None] | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Content.styled("Sign in to the hub\n", "bold"), markup=False)
            yield Static(self._words(), markup=False)
            yield Input(placeholder="hf_...", password=True, compact=True)
            yield Static("", id="said", markup=False)
            with Horizontal():
                yield Button(Content("[ Not now ]"), id="leave", compact=True)
                yield Button(Content("[ Sign in ]"), id="act", compact=True)

    def _words(self) -> Content:
        error, lines = self._error, list[str]()
        facts = {} if error is None else error.facts
        page = clean_line(str(facts.get("page", "")), 200)
        if error is not None:
            lines += [clean_line(error.cause, 300), ""]
        if page:
            lines.append(f"Accept its terms:  {page}")
        lines.append(f"Make a token:      {self._desk.token_page}")
        lines.append("It only has to read. Paste it here; huggingface_hub keeps it in a")
        lines.append("file that you alone can read.")
        if error is not None:
            lines.append("Enter on the empty field tries again as you are.")
        return Content("\n".join(lines))

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self.set_interval(_POLL_S, self._poll)

    @property
    def searching(self) -> bool:
        """Whether the hub is asked."""
        return self._asking is not None

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._act()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "act":
            self._act()
        else:
            self.action_leave()

    def _act(self) -> None:
        field = self.query_one(Input)
        token, field.value = field.value.strip(), ""
        if self._asking is not None:
            return
        if not token:
            if self._error is not None:
                self.dismiss(True)
            return
        self.query_one("#said", Static).update(Content(f"{self._glyphs.now} The hub is asked"))
        self._asking = Background(partial(self._desk.sign_in, token), name="sign-in")

    def _poll(self) -> None:
        asking = self._asking
        if asking is None or not asking.ended:
            return
        self._asking = None
        if asking.error is None:
            self.dismiss(True)
        else:
            self.query_one("#said", Static).update(_failure(asking.error, self._glyphs))

    def action_leave(self) -> None:
        self.dismiss(False)


class HubGate:
    """Opens the dialog on a screen: once by itself for each refusal that asks for it, and when it
    is wanted. `again` is called when what `refusal` tells of may be tried again.
    """

    def __init__(
        self,
        screen: Screen[None],
        desk: Desk,
        glyphs: Glyphs,
        refusal: Callable[[], MoetError | None],
        again: Callable[[], None],
    ) -> None:
        self._screen = screen
        self._desk = desk
        self._glyphs = glyphs
        self._refusal = refusal
        self._again = again
        self._known: MoetError | None = None

    def poll(self) -> None:
        """Look whether the hub has refused something."""
        error = self._refusal()
        is_new = wants_consent(error) and not _is_same(error, self._known)
        self._known = error
        if is_new and self._screen.is_current:
            self.ask()

    def ask(self) -> None:
        """Open the dialog."""
        error = self._refusal()
        refused = error if may_sign_in(error) else None
        dialog = SignInDialog(self._desk, self._glyphs, refused)
        self._screen.app.push_screen(dialog, lambda yes: self._answered(refused) if yes else None)

    def _answered(self, refused: MoetError | None) -> None:
        self._known = None
        if refused is None:
            self._screen.notify("You are signed in.")
        else:
            self._again()


def _is_same(error: MoetError | None, before: MoetError | None) -> bool:
    """Whether two reports are of one refusal: a job's error is read anew each time."""
    return error is not None and before is not None and error.to_dict() == before.to_dict()


def _failure(error: MoetError, glyphs: Glyphs) -> Content:
    """What went wrong, in the few rows that there are; what to do stands above the field."""
    head = (f"{glyphs.bad} {error.title}", "bold $status-bad")
    return Content.assemble(head, (f"  {error.code}\n", "$dim"), clean_line(error.cause, 180))
