"""What can be wished for a chat: names and ranges, and reading what was typed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moet_desk.engine.handle import ModelInfo, Quality


@dataclass(frozen=True, slots=True)
class WishField:
    """One number of `Wishes`. An empty field means: as the model recommends."""

    name: str
    label: str
    help: str
    least: float
    largest: float
    whole: bool = False

    def show(self, value: float | None) -> str:
        """The value as it is typed."""
        return "" if value is None else f"{value:g}" if not self.whole else str(value)

    def read(self, text: str) -> float | int | None:
        """The value that was typed.

        Raises:
            ValueError: it is none; the text says what would be.
        """
        text = text.strip()
        if not text:
            return None
        kind = "a whole number" if self.whole else "a number"
        wrong = f"{self.label}: {kind} from {self.least:g} to {self.largest:,.0f}, or nothing."
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            raise ValueError(wrong) from None
        if not self.least <= value <= self.largest:
            raise ValueError(wrong)
        return value


FIELDS: Sequence[WishField] = (
    WishField("temperature", "Temperature", "0: likeliest word, 1: freer", 0, 2),
    WishField("top_p", "Top p", "share of likely words; 1: all", 0, 1),
    WishField("top_k", "Top k", "so many likely words; 0: all", 0, 100_000, whole=True),
    WishField("min_p", "Min p", "none much less likely; 0: all", 0, 1),
    WishField("max_tokens", "Longest answer", "in tokens", 1, 10_000_000, whole=True),
    WishField("seed", "Seed", "makes answers repeatable", 0, 2**63 - 1, whole=True),
)

QUALITIES = tuple(quality.value for quality in Quality)


def effort_choices(model: ModelInfo | None, wished: str) -> tuple[str, ...]:
    """Levels of reasoning that a model knows, "" as it does by itself first; one that was wished
    for another model stays in the list.
    """
    known: tuple[str, ...] = ()
    if model is not None and model.switches:
        on_off = any(name != "reasoning_effort" for name in model.switches)
        levels = model.efforts if "reasoning_effort" in model.switches else ("high",)
        known = (*(("none",) if on_off else ()), *levels)
    return ("", *known, *((wished,) if wished and wished not in known else ()))
