"""The Endpoint screen: where other programs reach the model, who asks now, and texts to copy.

It asks the address itself whether it answers, in a thread, when it is opened and on R. UI thread.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import partial
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList

from moet_desk.agents import NO_KEY, Target, snippets
from moet_desk.settings import Endpoint
from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.background import Background
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.pick_list import ListScreen

_ASK_S = 2.0


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
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "Copy", id="endpoint.copy"),
        Binding("a", "copy_address", "Copy address", id="endpoint.address"),
        Binding("k", "copy_key", "Copy key", id="endpoint.key"),
        Binding("r", "again", "Look again", id="endpoint.again"),
        Binding("escape", "app.go('chat')", "Chat", id="endpoint.back"),
    ]

    def __init__(self, settings: Endpoint, glyphs: Glyphs, *, plain: bool) -> None:
        super().__init__(glyphs, plain=plain)
        self._settings = settings
        self._snapshot = EngineSnapshot()
        self._asking: Background[bool] | None = None
        self._answers: bool | None = None

    @property
    def searching(self) -> bool:
        """Whether the address is being asked."""
        return self._asking is not None

    @property
    def target(self) -> Target:
        """The endpoint as a program on this computer sees it."""
        own = self._settings
        host = "127.0.0.1" if own.host in ("0.0.0.0", "::", "") else own.host
        address = f"http://{f'[{host}]' if ':' in host else host}:{own.port}"
        return Target(address, self._snapshot.model or "demo", own.key or NO_KEY)

    def fill(self) -> None:
        self.action_again()
        self._draw_rows()

    def _draw_rows(self) -> None:
        texts = snippets(self.target)
        self.set_rows([Content(f" {name:<22}") + Content(clean_line(text, 52))
                       for name, text in texts.items()])  # fmt: skip

    def tick(self, snapshot: EngineSnapshot) -> None:
        renamed = snapshot.model != self._snapshot.model
        self._snapshot = snapshot
        if renamed:
            self._draw_rows()
        if self._asking is not None and self._asking.ended:
            self._answers, self._asking = self._asking.result, None
        self.put("top", self._top())

    def _top(self) -> Content:
        own, now = self._settings, self._snapshot
        if now.remote:
            return _elsewhere(now.remote)
        states = {None: "looking", True: "answers", False: "does not answer; F8 may say why"}
        local = own.host.startswith("127.") or own.host in ("localhost", "::1")
        reach = "this computer only" if local else "! open to your network, not encrypted"
        key = "needed; K copies it" if own.key else "none is needed"
        busy = f"{now.requests_running} answered now, {now.requests_waiting} waiting"
        pairs = (
            ("Address", f"{self.target.openai}   {reach}"),
            ("State", states[self._answers]),
            ("Key", key),
            ("Model", now.model or "none is loaded"),
            ("Requests", busy),
        )
        lines = [Content.styled(" Endpoint for OpenAI's and Anthropic's clients", "bold")]
        lines += [
            Content.styled(f"   {name:<10}", "$dim") + Content(clean_line(text, 64))
            for name, text in pairs
        ]
        return Content("\n").join(lines)

    def _copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(text)
        self.notify(f"{what} is on the clipboard, if the terminal allows it.", markup=False)

    def on_option_list_option_selected(self, _event: OptionList.OptionSelected) -> None:
        self.action_copy()

    def action_copy(self) -> None:
        """Copy the text under the cursor."""
        name, text = list(snippets(self.target).items())[self.list.highlighted or 0]
        self._copy(text, name)

    def action_copy_address(self) -> None:
        self._copy(self.target.openai, "The address")

    def action_copy_key(self) -> None:
        if self._settings.key:
            self._copy(self._settings.key, "The key")
        else:
            self.notify("This endpoint asks for no key.")

    def action_again(self) -> None:
        if self._asking is None:
            self._answers = None
            self._asking = Background(partial(answers, self.target.address), name="endpoint-ask")
