"""The lines of the endpoint screen: its head, one row per call, and what is known of one. Pure."""

from __future__ import annotations

from datetime import datetime

from textual.content import Content

from moet_desk.agents import Target
from moet_desk.settings import Endpoint
from moet_desk.telemetry import (
    CallState,
    EndpointCall,
    EndpointState,
    EndpointView,
    EngineSnapshot,
    EngineState,
)
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.units import show_duration

_STATES = {
    EndpointState.OFF: ("todo", "$dim"),
    EndpointState.WAITS: ("warn", "$status-warn"),
    EndpointState.RUNNING: ("ok", "$status-ok"),
    EndpointState.FAILED: ("bad", "$status-bad"),
}
_HEADINGS = ("Time", "Client", "Call", "In", "Out", "First", "Speed")
_STYLES = {CallState.FAILED: "$status-bad", CallState.STOPPED: "$dim", CallState.DONE: "$dim"}


def head(
    view: EndpointView,
    target: Target,
    own: Endpoint,
    now: EngineSnapshot,
    glyphs: Glyphs,
    *,
    asked: str,
) -> Content:
    """State, address, key, model and load, one line each. `asked`: what asking the address said."""
    local = own.host.startswith("127.") or own.host in ("localhost", "::1")
    reach = "this computer only" if local else "! open to your network, not encrypted"
    key = "needed; K copies it" if own.key else "none is needed"
    address = f"{target.openai}   {reach}"
    if view.error is not None:
        address = f"{view.error['code']}  {view.error['cause']}"
    pairs = (
        ("Address", address),
        ("Key", key),
        ("Model", now.model or "none is loaded"),
        ("Requests", f"{now.requests_running} answered now, {now.requests_waiting} waiting"),
    )
    mark, style = _STATES[view.state]
    state = f"{getattr(glyphs, mark)} {view.state.value}{asked}"
    lines = [
        Content.styled(" Endpoint for OpenAI's and Anthropic's clients   ", "bold")
        + Content.styled(state, style)
    ]
    lines += [
        Content.styled(f"   {name:<10}", "$dim") + Content(clean_line(text, 66))
        for name, text in pairs
    ]
    return Content("\n").join(lines)


def headings() -> Content:
    """Over the calls."""
    return Content.styled(_columns(*_HEADINGS), "$dim")


def row(call: EndpointCall, glyphs: Glyphs) -> Content:
    """One call."""
    mark = {
        CallState.QUEUED: glyphs.todo,
        CallState.READING: glyphs.states[EngineState.READING],
        CallState.WRITING: glyphs.states[EngineState.WRITING],
        CallState.DONE: glyphs.ok,
        CallState.FAILED: glyphs.bad,
        CallState.STOPPED: glyphs.dot,
    }[call.state]
    first = "" if call.first_s is None else show_duration(call.first_s)
    if call.state is CallState.READING and call.prompt_tokens:
        first = f"{100 * call.prompt_done // call.prompt_tokens} %"
    speed = "" if call.tok_per_s is None else f"{call.tok_per_s:.1f}"
    text = _columns(
        f"{datetime.fromtimestamp(call.wall_s).astimezone():%H:%M:%S}",
        call.client,
        call.route,
        _number(call.prompt_tokens),
        _number(call.n_tokens),
        first,
        speed,
    )
    return Content.styled(f"{text} {mark} {call.state.value}", _STYLES.get(call.state, ""))


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _columns(when: str, client: str, call: str, into: str, out: str, first: str, speed: str) -> str:
    client, call = clean_line(client, 12), clean_line(call, 16)
    return f" {when:<8}  {client:<12} {call:<16} {into:>7} {out:>6} {first:>6} {speed:>5}"


def details(call: EndpointCall) -> str:
    """The way of one call through the engine, and what went wrong."""
    steps: list[str] = []
    if call.queue_s is not None:
        steps.append(f"waited {show_duration(call.queue_s)}")
    if call.prompt_tokens is not None:
        steps.append(f"{call.prompt_tokens:,} tokens to read")
    if call.first_s is not None:
        steps.append(f"first word after {show_duration(call.first_s)}")
    if call.n_tokens:
        steps.append(f"{call.n_tokens:,} tokens written")
    steps.append(f"{call.state.value} after {show_duration(call.total_s)}")
    status = "" if call.status is None else f"   HTTP {call.status}"
    model = f"   {call.model}" if call.model else ""
    lines = [f"{call.client}   {call.route}{model}{status}", ", ".join(steps)]
    return "\n".join(clean_line(line, 300) for line in [*lines, *filter(None, [call.error])])
