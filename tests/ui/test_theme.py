"""Colours: contrast, order of the ramp, distance of the status colours, in colour blindness too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from rich.cells import cell_len
from rich.color import Color as RichColor
from rich.color import ColorSystem
from textual.color import Color
from textual.theme import Theme

from moet_desk.ui.theme import (
    ASCII,
    MOET_CONTRAST,
    MOET_LIGHT,
    RAMP_DARK,
    RAMP_STEPS,
    THEMES,
    UNICODE,
    Glyphs,
    choose_glyphs,
)

Rgb = tuple[float, float, float]
# Viénot, Brettel and Mollon (1999) for protan and deutan; Brettel-style single plane for tritan.
# Rows act on linear RGB.
VISION: dict[str, Sequence[Sequence[float]]] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.1124, 0.8876, 0.0), (0.1124, 0.8876, 0.0), (0.0040, -0.0040, 1.0)),
    "deutan": ((0.2927, 0.7073, 0.0), (0.2927, 0.7073, 0.0), (-0.0223, 0.0223, 1.0)),
    "tritan": ((1.0, 0.1446, -0.1446), (0.0, 0.8593, 0.1407), (0.0, 0.8593, 0.1407)),
}


def linear(colour: str) -> Rgb:
    red, green, blue = Color.parse(colour).normalized
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
               for c in (red, green, blue))  # fmt: skip
    return (r, g, b)


def seen(colour: str, vision: str) -> Rgb:
    rgb = linear(colour)
    r, g, b = (
        min(1.0, max(0.0, sum(weight * c for weight, c in zip(row, rgb, strict=True))))
        for row in VISION[vision]
    )
    return (r, g, b)


def oklab(rgb: Rgb) -> Rgb:
    """Björn Ottosson's OKLab (2020) of linear sRGB."""
    r, g, b = rgb
    l_ = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    m_ = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s_ = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * l_ + 0.7936177850 * m_ - 0.0040720468 * s_,
        1.9779984951 * l_ - 2.4285922050 * m_ + 0.4505937099 * s_,
        0.0259040371 * l_ + 0.7827717662 * m_ - 0.8086757660 * s_,
    )


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""

    def light(colour: str) -> float:
        r, g, b = linear(colour)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05

    high, low = sorted((light(one), light(other)), reverse=True)
    return high / low


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_theme__text_roles__contrast(theme: Theme) -> None:
    ground = str(theme.background)
    wanted = 7.0 if theme is MOET_CONTRAST else 4.5
    roles = {
        "foreground": str(theme.foreground), "primary": theme.primary,
        "accent": str(theme.accent), "dim": theme.variables["dim"],
        **{name: theme.variables[f"status-{name}"] for name in ("ok", "warn", "bad")},
    }  # fmt: skip
    low = {name: contrast(colour, ground) for name, colour in roles.items()}
    assert all(value >= wanted for value in low.values()), low
    for letter in "qgrn":
        assert contrast(theme.variables[f"tier-{letter}"], ground) >= 3.0, letter


@pytest.mark.parametrize("vision", VISION)
def test_ramp__any_vision__lightness_rises(vision: str) -> None:
    lightness = [oklab(seen(colour, vision))[0] for colour in RAMP_DARK]
    steps = [after - before for before, after in itertools.pairwise(lightness)]
    assert min(steps) > 0.05, steps


def of_256(colour: str) -> str:
    """What a terminal of 256 colours shows for it."""
    return RichColor.parse(colour).downgrade(ColorSystem.EIGHT_BIT).get_truecolor().hex


@pytest.mark.parametrize("vision", VISION)
def test_ramp__256_colours__lightness_rises_too(vision: str) -> None:
    lightness = [oklab(seen(of_256(colour), vision))[0] for colour in RAMP_DARK]
    steps = [after - before for before, after in itertools.pairwise(lightness)]
    assert min(steps) > 0.005, steps


@pytest.mark.parametrize("shown", [str, of_256], ids=["truecolor", "256"])
@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_tier_colours__any_vision__stay_apart(
    theme: Theme, vision: str, shown: Callable[[str], str]
) -> None:
    colours = [shown(theme.variables[f"tier-{letter}"]) for letter in "qgrn"]
    labs = [oklab(seen(colour, vision)) for colour in colours]
    near = min(
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for one, other in itertools.combinations(labs, 2)
    )
    assert near > 0.03, near


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_status_colours__any_vision__stay_apart(theme: Theme, vision: str) -> None:
    colours = [theme.variables[f"status-{word}"] for word in ("ok", "warn", "bad", "idle")]
    labs = [oklab(seen(colour, vision)) for colour in colours]
    near = min(
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for one, other in itertools.combinations(labs, 2)
    )
    assert near > 0.05


def test_light_theme__ramp__reversed() -> None:
    assert [MOET_LIGHT.variables[f"ramp-{i}"] for i in range(RAMP_STEPS)] == list(RAMP_DARK[::-1])


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=lambda g: g.name)
def test_glyphs__all__one_column_and_complete(glyphs: Glyphs) -> None:
    drawn = [
        *glyphs.tiers, *glyphs.ramp, *glyphs.spark, glyphs.unused, glyphs.full, glyphs.empty,
        glyphs.ok, glyphs.bad, glyphs.warn, glyphs.now, glyphs.todo, glyphs.prompt, glyphs.caret,
        glyphs.dot, glyphs.rule, glyphs.column, glyphs.down, glyphs.up, *glyphs.states.values(),
    ]  # fmt: skip
    assert all(cell_len(glyph) == 1 for glyph in drawn)
    assert len(set(glyphs.tiers)) == 4
    assert len(set(glyphs.ramp)) == RAMP_STEPS
    if glyphs is ASCII:
        assert all(glyph.isascii() for glyph in drawn)


@pytest.mark.parametrize(
    ("wish", "encoding", "terminal", "expected"),
    [
        ("auto", "utf-8", "xterm-256color", UNICODE),
        ("auto", "UTF8", "", UNICODE),
        ("auto", "ascii", "xterm", ASCII),
        ("auto", "utf-8", "linux", ASCII),
        ("unicode", "ascii", "linux", UNICODE),
        ("ascii", "utf-8", "xterm", ASCII),
    ],
)
def test_choose_glyphs__wish_and_terminal(
    wish: str, encoding: str, terminal: str, expected: Glyphs
) -> None:
    assert choose_glyphs(wish, encoding=encoding, terminal=terminal) is expected
