"""Lines of the Chat screen made from data alone: the welcome, and an answer's last line."""

from __future__ import annotations

from textual.content import Content

from moet_desk import __version__
from moet_desk.engine.handle import Quality
from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.chat_records import Status, Turn
from moet_desk.ui.live_answer import LiveAnswer
from moet_desk.ui.quality_words import again_words
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import show_number, show_percent
from moet_desk.units import show_duration

_SILENT_S = 2.0  # without a word; then that is said in place of the speed
_EXAMPLES = "Tell me a short story about a fox.", "What is 17 + 25?", "/help"


def welcome_content(model: str) -> Content:
    """The empty chat: what is ready, and what to try."""
    lines = [
        Content.styled(f"moet-desk {__version__}", "bold"),
        Content(""),
        Content(f"{model} is ready"),
        Content(""),
        *(Content(example) for example in _EXAMPLES),
        Content(""),
        Content.styled("/ for commands, Ctrl+O attaches a file, Ctrl+L earlier chats", "$dim"),
        Content.styled("Alt+Up picks a message to copy, edit or answer again, F1 helps", "$dim"),
    ]
    return Content("\n").join(lines)


def recorded_content(model: str) -> Content:
    """The empty chat while a recording is played."""
    lines = [
        Content.styled(f"A recording of {model}", "bold"),
        Content(""),
        Content("Questions that were asked then come by themselves. F3 shows the experts."),
        Content.styled("No model is loaded: what you ask here is not answered.", "$dim"),
    ]
    return Content("\n").join(lines)


def no_model_content() -> Content:
    """The empty chat while no model was ever chosen."""
    lines = [
        Content.styled("No model yet", "bold"),
        Content(""),
        Content("F4 lists the models of this computer, and A there adds one."),
        Content.styled("What you write already is sent when a model is ready.", "$dim"),
    ]
    return Content("\n").join(lines)


def closing_line(turn: Turn, glyphs: Glyphs) -> Content:
    """The line under a finished answer: how it ended, tokens, speed, waiting, quality."""
    meta, parts = turn.meta, []
    if turn.status is Status.STOPPED:
        parts.append("stopped by you" if "tokens" in meta else "stopped")
    if meta.get("reason") == "length":
        parts.append("cut at the length limit")
    if meta.get("tokens"):
        tokens, decode_s = int(meta["tokens"]), float(meta.get("decode_s") or 0.0)
        parts.append(f"{tokens} tokens")
        if decode_s > 0:
            parts.append(f"{tokens / decode_s:.1f} tok/s")
            waiting = float(meta.get("wait_s") or 0.0) / decode_s
            parts.append("" if "server" in meta else f"waiting {show_percent(waiting, 0)} of time")
        if meta.get("first_token_s") is not None:
            parts.append(f"first token {show_duration(float(meta['first_token_s']))}")
        parts.append(str(meta.get("quality", "")))
        parts.append("opportunistic" if meta.get("opportunistic") else "")
        if meta.get("rerun_tokens") is not None:
            parts.append(again_words(int(meta["rerun_tokens"]), tokens, meta.get("rerun_s")))
    return Content(f" {glyphs.dot} ".join(part for part in parts if part))


def live_closing_line(live: LiveAnswer | None, snapshot: EngineSnapshot, glyphs: Glyphs) -> Content:
    """The line under an answer that is written: speed, tokens, waiting, what was made again."""
    if live is None or live.n_tokens == 0:
        return Content(f"{glyphs.caret} waiting for the first token")
    rate, silent_s = live.tok_per_s, live.silent_s
    speed = "" if rate is None else show_number(rate, "tok/s")
    if silent_s >= _SILENT_S:
        speed = f"no word for {show_duration(silent_s)}"
    waits = f"waiting {show_percent(snapshot.wait_share, 0)} of time"
    parts = ["writing"]
    parts += [speed] if speed else []
    parts += [f"{live.n_tokens} tokens"]
    parts += [] if snapshot.remote else [waits]
    parts += [live_again_words(live)] if live.quality is Quality.BALANCED else []
    return Content(f"{glyphs.caret} " + f" {glyphs.dot} ".join(parts))


def live_again_words(live: LiveAnswer | None) -> str:
    """What a balanced answer made again so far; empty: it is none, or nothing yet."""
    if live is None or live.quality is not Quality.BALANCED:
        return ""
    return again_words(live.n_reran, live.n_tokens, live.rerun_s)
