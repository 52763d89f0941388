"""Colours and glyphs: the three themes, the heat ramp, tier and status colours, and the glyph sets.

Everything here is data and pure functions; widgets read colours from the theme's variables and
glyphs from a `Glyphs` record, so that no meaning hangs on colour alone. The ramp and the status
colours keep their order and distance under simulated protan, deutan and tritan vision
(tests/ui/test_theme.py computes it again). Called from the UI thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from textual.theme import Theme

from moet_desk.telemetry import TIER_LETTERS, EngineState, Tier

RAMP_STEPS = 8
RAMP_DARK = (
    "#04266c", "#264279", "#475d85", "#6b778c", "#959178", "#b6ad79", "#d7ca7c", "#f8e77e",
)  # fmt: skip
RAMP_LIGHT = RAMP_DARK[::-1]
"""Reversed on light ground: "more" is always the far end from the background."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Every character with a meaning. `tiers` is in `Tier` order, `ramp` and `spark` rise."""

    tiers: str
    ramp: str
    spark: str
    unused: str
    full: str
    empty: str
    ok: str
    bad: str
    warn: str
    now: str
    todo: str
    prompt: str
    caret: str
    dot: str
    rule: str
    column: str
    down: str
    up: str
    left: str
    right: str
    unfold: str
    fold: str
    file: str
    close: str
    states: Mapping[EngineState, str]
    name: str
    stacks: bool  # whether `spark` glyphs of two lines join to one bar

    def tier(self, tier: int) -> str:
        """Glyph of a `Tier` value."""
        return self.tiers[tier]


UNICODE = Glyphs(
    tiers="░▒▓█", ramp="·▁▂▃▄▅▆▇", spark="▁▂▃▄▅▆▇█", unused="·", full="▇", empty="▁",
    ok="✓", bad="✗", warn="!", now="▸", todo="·", prompt="❯", caret="▌", dot="·", rule="─",
    column="│", down="↓", up="↑", left="‹", right="›", unfold="▸", fold="▾", file="▤",
    close="×",
    states={
        EngineState.NO_MODEL: "○", EngineState.LOADING: "◌", EngineState.READY: "●",
        EngineState.READING: "◐", EngineState.WRITING: "●", EngineState.FAULT: "✗",
    },
    name="unicode", stacks=True,
)  # fmt: skip

ASCII = Glyphs(
    tiers=TIER_LETTERS, ramp=".1234567", spark="._-=+*%#", unused=".", full="#", empty="-",
    ok="+", bad="x", warn="!", now=">", todo=".", prompt=">", caret="_", dot="-", rule="-",
    column="|", down="v", up="^", left="<", right=">", unfold="+", fold="-", file="=",
    close="x",
    states={
        EngineState.NO_MODEL: "o", EngineState.LOADING: "~", EngineState.READY: "*",
        EngineState.READING: "<", EngineState.WRITING: ">", EngineState.FAULT: "x",
    },
    name="ascii", stacks=False,
)  # fmt: skip


def choose_glyphs(wish: str, *, encoding: str, terminal: str) -> Glyphs:
    """Pick a glyph set: as wished, else ASCII where the terminal cannot be trusted with blocks.

    Args:
        wish: "auto", "unicode" or "ascii".
        encoding: of the standard output, e.g. "utf-8".
        terminal: the terminal's type, e.g. "xterm-256color".
    """
    if wish == "ascii":
        return ASCII
    if wish == "unicode":
        return UNICODE
    plain = terminal in ("linux", "dumb") or "utf" not in encoding.lower()
    return ASCII if plain else UNICODE


_STATUS_DARK = {"ok": "#56b4e9", "warn": "#f0c040", "bad": "#d55e00", "idle": "#8a8a8a"}
_STATUS_CONTRAST = {"ok": "#7cc8f2", "warn": "#ffd75f", "bad": "#ff9a4d", "idle": "#b8b8b8"}
_STATUS_LIGHT = {"ok": "#0067a3", "warn": "#8a6a00", "bad": "#8f1d00", "idle": "#5c5c5c"}
_TIERS_DARK = {"q": "#ffffff", "g": "#f8e77e", "r": "#9aa9c9", "n": "#6a7fb0"}
_TIERS_LIGHT = {"q": "#000000", "g": "#04266c", "r": "#475d85", "n": "#5f7398"}


def _variables(
    ramp: tuple[str, ...],
    tiers: Mapping[str, str],
    status: Mapping[str, str],
    *,
    dim: str,
    line: str,
) -> dict[str, str]:
    return {
        **{f"ramp-{step}": colour for step, colour in enumerate(ramp)},
        **{f"tier-{letter}": colour for letter, colour in tiers.items()},
        **{f"status-{word}": colour for word, colour in status.items()},
        "dim": dim,
        "line": line,
        "footer-key-foreground": tiers["g"],
        "markdown-h1-color": tiers["q"],
        "markdown-h2-color": tiers["q"],
        "markdown-h2-text-style": "bold underline",
        "markdown-h3-color": tiers["q"],
        "markdown-h3-text-style": "bold",
    }


MOET_DARK = Theme(
    name="moet-dark", primary="#56b4e9", secondary="#9aa9c9", accent="#f8e77e",
    warning="#f0c040", error="#d55e00", success="#56b4e9", foreground="#e4e4e4",
    background="#121212", surface="#191919", panel="#222226", dark=True,
    variables=_variables(RAMP_DARK, _TIERS_DARK, _STATUS_DARK, dim="#9a9a9a", line="#44444c"),
)  # fmt: skip

MOET_LIGHT = Theme(
    name="moet-light", primary="#00567f", secondary="#475d85", accent="#04266c",
    warning="#8a6a00", error="#8f1d00", success="#00567f", foreground="#1c1c1c",
    background="#fbfbf8", surface="#f2f2ee", panel="#e6e6e0", dark=False,
    variables=_variables(RAMP_LIGHT, _TIERS_LIGHT, _STATUS_LIGHT, dim="#5c5c5c", line="#b8b8b0"),
)  # fmt: skip

MOET_CONTRAST = Theme(
    name="moet-contrast", primary="#7cc8f2", secondary="#c8d4ee", accent="#ffee88",
    warning="#ffd75f", error="#ff9a4d", success="#7cc8f2", foreground="#ffffff",
    background="#000000", surface="#000000", panel="#101010", dark=True,
    variables=_variables(
        RAMP_DARK, {**_TIERS_DARK, "r": "#bcc8e4", "n": "#7f92d0"}, _STATUS_CONTRAST,
        dim="#c4c4c4", line="#9a9a9a",
    ),
)  # fmt: skip

THEMES = (MOET_DARK, MOET_LIGHT, MOET_CONTRAST)


def tier_variable(tier: Tier) -> str:
    """Name of the theme variable that holds a tier's colour."""
    return f"tier-{TIER_LETTERS[tier].lower()}"


_STATUS_OF_STATE = {
    EngineState.NO_MODEL: "idle",
    EngineState.LOADING: "warn",
    EngineState.READY: "ok",
    EngineState.READING: "warn",
    EngineState.WRITING: "ok",
    EngineState.FAULT: "bad",
}


def status_variable(state: EngineState) -> str:
    """Name of the theme variable that holds a state's colour."""
    return f"status-{_STATUS_OF_STATE[state]}"
