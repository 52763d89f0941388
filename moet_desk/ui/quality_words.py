"""Words about the three qualities: what is made again, when, what it costs, how prompts are read.

Pure functions over what the engine says of itself; screens put the words where there is room.
"""

from __future__ import annotations

from moet_desk.engine.handle import GateInfo, GateSource, ModelInfo, PromptReading, Quality
from moet_desk.ui.widgets.gauges import show_percent

_MEANING = {
    Quality.FAST: "2-bit experts",
    Quality.BALANCED: "2-bit experts, and the model as shipped where they are unsure",
    Quality.EXACT: "the model as shipped",
}
_READING = {
    PromptReading.FP4: "FP4",
    PromptReading.NO_ROOM: "2 bits (FP4 rows do not fit RAM)",
    PromptReading.CPU: "2 bits (always so on the CPU)",
}


def again_words(n_reran: int, n_tokens: int, rerun_s: float | None) -> str:
    """Part of an answer's tokens that was made again, and what that cost for each token of it:
    "7 % again, +0.8 ms/token". Old chats do not know the cost.
    """
    if n_tokens <= 0:
        return ""
    words = f"{show_percent(min(1.0, n_reran / n_tokens), 0)} again"
    return words if rerun_s is None else f"{words}, +{rerun_s * 1000 / n_tokens:.1f} ms/token"


def gate_in_use(info: ModelInfo | None, wished: float | None) -> GateInfo | None:
    """The threshold of the next balanced answer; None while there is no model to ask."""
    if wished is not None:
        return GateInfo(wished, GateSource.SETTINGS)
    return None if info is None else info.gate


def gate_words(gate: GateInfo, *, short: bool = False) -> str:
    """Below which probability a token is made again, and who says so."""
    words = f"below {gate.tau:.2f}"
    if gate.source is not GateSource.PACK:
        return f"{words} ({gate.source.value})"
    if short:
        return f"{words} (pack)"
    if gate.caught is None:
        return f"{words} (calibrated {gate.date})"
    found = f"catches {show_percent(gate.caught, 0)} of flips"
    budget = f", budget {show_percent(gate.budget, 0)}"
    return f"{words} (calibrated {gate.date}: {found}{budget})"


def quality_words(quality: Quality, gate: GateInfo | None) -> str:
    """What a quality means, for the one who has just chosen it."""
    words = f"{quality.value}, {_MEANING[quality]}"
    if quality is Quality.BALANCED and gate is not None:
        words += f": {gate_words(gate)}"
    return words


def precision_line(
    info: ModelInfo | None, quality: Quality, wished_gate: float | None, *, width: int
) -> str:
    """How the next prompt is read, and when a balanced answer computes again; for one row."""
    gate = gate_in_use(info, wished_gate)
    if info is None or gate is None:
        return ""
    again = f"balanced: again {gate_words(gate, short=width < 120)}"
    return f"{prompt_words(info, quality)}   {again}"


def prompt_words(info: ModelInfo, quality: Quality) -> str:
    """With which experts the prompt of the next message is read: "prompts: FP4"."""
    reading = PromptReading.FP4 if quality is Quality.EXACT else info.prompts
    return f"prompts: {_READING[reading]}"
