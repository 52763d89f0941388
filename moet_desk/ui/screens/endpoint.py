"""The Endpoint screen: where other programs reach the model, who asks now, and texts to copy.

It lists the newest calls as they go on, stops one, starts and stops the endpoint (in a thread), and
asks the address itself whether it answers, in a thread, on R. UI thread.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList, Static

from moet_desk.agents import NO_KEY, Target, snippets
from moet_desk.settings import Endpoint
from moet_desk.telemetry import EndpointCall, EndpointState, EndpointView, EngineSnapshot
from moet_desk.ui.background import Background
from moet_desk.ui.desk import EndpointControl
from moet_desk.ui.endpoint_lines import details, head, headings, row
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.pick_list import ListScreen

_ASK_S = 2.0
_NOBODY = "Nobody has called yet. The texts below show how; Tab goes there, C copies one."
_OFF = "Programs on this computer cannot reach the model. S starts the endpoint."


def answers(address: str) -> bool:
    """Whether an endpoint of ours answers there, with or without a model. Waits up to 2 s."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{address}/health", timeout=_ASK_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as refused:
        return refused.code == 503  # it is there, the model is not yet
    except (OSError, ValueError):
        return False


def _elsewhere(server: str) -> Content:
    lines = [
        Content.styled(" No endpoint in this window", "bold"),
        Content(
            "   " + clean_line(f"The answers come from {server}; give programs that address.", 74)
        ),
        Content("   The endpoint needs a model of this computer: moet-desk, or moet-desk serve."),
        Content("   The texts below are for that endpoint."),
    ]
    return Content("\n").join(lines)


class EndpointScreen(ListScreen):
    """See the module's paragraph."""

    MODE = "endpoint"
    DEFAULT_CSS = """
    EndpointScreen #rows { margin-top: 0; min-height: 3; }
    EndpointScreen #words { height: 4; }
    EndpointScreen #copies {
        height: auto; max-height: 20%; border: none; background: $background;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "switch", "Start or stop", id="endpoint.switch"),
        Binding("x", "stop_call", "Stop request", id="endpoint.stop_call"),
        Binding("c", "copy", "Copy text", id="endpoint.copy"),
        Binding("a", "copy_address", "Address", id="endpoint.address"),
        Binding("k", "copy_key", "Key", id="endpoint.key"),
        Binding("r", "again", "Ask it", id="endpoint.again", show=False),
        Binding("escape", "app.go('chat')", "Chat", id="endpoint.back"),
    ]

    def __init__(
        self, control: EndpointControl, settings: Endpoint, glyphs: Glyphs, *, plain: bool
    ) -> None:
        super().__init__(glyphs, plain=plain)
        self._control = control
        self._settings = settings
        self._snapshot = EngineSnapshot()
        self._view = EndpointView()
        self._shown: tuple[EndpointCall, ...] = ()
        self._texts: dict[str, str] = {}
        self._asking: Background[bool] | None = None
        self._changing: Background[None] | None = None
        self._answers: bool | None = None

    def more(self) -> ComposeResult:
        yield Static(Content.styled(" Texts to copy", "bold"), markup=False)
        yield OptionList(id="copies", markup=False)

    @property
    def searching(self) -> bool:
        """Whether the address is being asked, or the endpoint is being started or stopped."""
        return self._asking is not None or self._changing is not None

    @property
    def target(self) -> Target:
        """The endpoint as a program on this computer sees it."""
        own = self._settings
        host = "127.0.0.1" if own.host in ("0.0.0.0", "::", "") else own.host
        address = f"http://{f'[{host}]' if ':' in host else host}:{own.port}"
        context = self._snapshot.context or None
        model = self._snapshot.model or "demo"
        return Target(self._view.address or address, model, own.key or NO_KEY, context)

    @property
    def copies(self) -> OptionList:
        """The texts to copy."""
        return self.query_one("#copies", OptionList)

    # -- drawing -------------------------------------------------------------------------------

    def fill(self) -> None:
        self._view = self._control.view()
        self._draw()

    def tick(self, snapshot: EngineSnapshot) -> None:
        self._snapshot = snapshot
        self._view = self._control.view()
        if self._asking is not None and self._asking.ended:
            self._answers, self._asking = self._asking.result, None
        if self._changing is not None and self._changing.ended:
            self._changing, self._answers = None, None
        self._draw()

    def _draw(self) -> None:
        asked = {None: "", True: ", it answers", False: ", does not answer"}[self._answers]
        if self._changing is not None:
            asked = ", one moment"
        if self._snapshot.remote:
            top = _elsewhere(self._snapshot.remote)
        else:
            top = head(
                self._view, self.target, self._settings, self._snapshot, self._glyphs, asked=asked
            )
        self.put("top", top + Content("\n\n") + headings())
        self._draw_calls()
        self._draw_words()
        self._draw_copies()

    def _draw_calls(self) -> None:
        calls, before = self._view.calls, self._shown
        if calls == before:
            return
        marked = self.call
        self._shown = calls
        if [call.number for call in calls] != [call.number for call in before]:
            self.set_rows([row(call, self._glyphs) for call in calls])
            numbers = [call.number for call in calls]
            if marked is not None and marked.number in numbers:
                self.list.highlighted = numbers.index(marked.number)
            return
        for at, (new, old) in enumerate(zip(calls, before, strict=True)):
            if new != old:
                self.list.replace_option_prompt_at_index(at, row(new, self._glyphs))

    def _draw_words(self) -> None:
        is_off = self._view.state is not EndpointState.RUNNING
        words = _OFF if is_off else _NOBODY
        self.put("words", Content(words if self.call is None else details(self.call)))

    def _draw_copies(self) -> None:
        texts = dict(snippets(self.target))
        if texts == self._texts:
            return
        self._texts = texts
        at = self.copies.highlighted or 0
        self.copies.clear_options()
        self.copies.add_options(
            [
                Content(f" {name:<22}") + Content(clean_line(text, 52))
                for name, text in texts.items()
            ]
        )
        self.copies.highlighted = at

    @property
    def call(self) -> EndpointCall | None:
        """The one under the cursor."""
        at = self.list.highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        self._draw_words()

    # -- actions -------------------------------------------------------------------------------

    def _copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(text)
        self.notify(f"{what} is on the clipboard, if the terminal allows it.", markup=False)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_list is self.copies:
            self.action_copy()

    def action_copy(self) -> None:
        """Copy the text under the cursor of the texts."""
        name, text = list(self._texts.items())[self.copies.highlighted or 0]
        self._copy(text, name)

    def action_copy_address(self) -> None:
        self._copy(self.target.openai, "The address")

    def action_copy_key(self) -> None:
        if self._settings.key:
            self._copy(self._settings.key, "The key")
        else:
            self.notify("This endpoint asks for no key.")

    def action_switch(self) -> None:
        """Start the endpoint if it does not run, else stop it."""
        if self._changing is not None:
            return
        on = self._view.state in (EndpointState.RUNNING, EndpointState.WAITS)
        work = self._control.stop if on else self._control.start
        self._changing = Background(work, name="endpoint-switch")
        self._draw()

    def action_stop_call(self) -> None:
        """Stop the answer of the call under the cursor."""
        call = self.call
        if call is None or not call.goes_on or not self._control.stop_call(call.number):
            self.notify("No answer of this row is being made.")

    def action_again(self) -> None:
        """Ask the address whether it answers."""
        if self._asking is None:
            self._answers = None
            self._asking = Background(partial(answers, self.target.address), name="endpoint-ask")
