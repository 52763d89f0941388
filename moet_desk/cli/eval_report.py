"""The figures of `moet-desk eval`: as a document (docs/quality.md has its schema), and as tables.

Absent figures are null in a document and "-" in a table, never 0. Runs in the main thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moet_desk.cli.bench_record import command_line, machine, rounded
from moet_desk.cli.context import Invocation
from moet_desk.cli.eval_answers import DEPTHS, Found, LengthRatio, TaskFigures, TaskScore
from moet_desk.cli.output import Format, print_document, print_event, print_table, print_text
from moet_desk.engine.handle import Codebook
from moet_desk.telemetry import CPU

if TYPE_CHECKING:
    from moet_desk.engine.evaluate import TextFigures


class Report:
    """Prints each part when it comes, in the format that was asked for."""

    def __init__(self, invocation: Invocation, model: str, codebook: Codebook) -> None:
        self._format = invocation.format
        self.quiet = invocation.quiet
        self._head = {**machine(), "command": command_line(), "model": model, "device": CPU}
        self._head["codebook"] = codebook.value
        self._parts: dict[str, Any] = {"texts": None, "tasks": None, "needle": None}
        if self._format is Format.HUMAN and codebook is not Codebook.SYMMETRIC:
            print_text(f"2-bit levels: {codebook.value}. No pack holds them.")

    def text(self, part: dict[str, Any]) -> None:
        self._parts["texts"] = [*(self._parts["texts"] or ()), part]
        self._show("text", part, _text_rows)

    def tasks(self, part: dict[str, Any]) -> None:
        self._parts["tasks"] = part
        self._show("tasks", part, _task_rows)

    def needle(self, part: dict[str, Any]) -> None:
        self._parts["needle"] = part
        self._show("needle", part, _needle_rows)

    def end(self) -> None:
        if self._format is Format.JSON:
            print_document({**self._head, **self._parts})
        elif self._format is Format.NDJSON:
            print_event("finished", **self._head)

    def _show(
        self, name: str, part: dict[str, Any], rows: Callable[[dict[str, Any]], list[list[str]]]
    ) -> None:
        if self._format is Format.HUMAN:
            print_text(_title(name, part))
            print_table(rows(part))
            print_text("")
        elif self._format is Format.NDJSON:
            print_event(name, **part)


# -- figures as a document -------------------------------------------------------------------


def text_part(path: Path, figures: TextFigures, size: int, n_windows: int) -> dict[str, Any]:
    qualities: dict[str, Any] = {}
    for quality, nll in figures.nll.items():
        distance = figures.distance.get(quality)
        against = asdict(distance) if distance is not None else {}
        qualities[quality.value] = {
            "nll": rounded(nll, 6),
            "perplexity": rounded(math.exp(nll), 4) if nll < _LARGEST_NLL else None,
            "kl_mean": rounded(against.get("kl_mean"), 6),
            "top1_agreement": rounded(against.get("top1_agreement"), 6),
            "largest_margin": rounded(against.get("largest_margin"), 4),
        }
    head = {
        "file": path.name,
        "tokens": figures.tokens,
        "windows": n_windows,
        "window_tokens": size,
    }
    return {**head, "qualities": qualities}


_LARGEST_NLL = 700.0
"""Beyond it the perplexity is no float any more."""


def task_part(
    path: Path, figures: TaskFigures, max_tokens: int, gate: float | None
) -> dict[str, Any]:
    """`gate` is that of "balanced" among the qualities; None: the answers are a sweep."""
    qualities: dict[str, Any] = {}
    sweep: list[dict[str, Any]] = []
    for way, score in figures.scores.items():
        one = _score_part(score, figures.lengths.get(way), figures.tasks)
        if way.gate is not None and gate is None:
            sweep.append({"gate": way.gate, **one})
        else:
            qualities[way.quality.value] = one
    head = {"file": path.name, "tasks": figures.tasks, "max_tokens": max_tokens, "gate": gate}
    return {**head, "qualities": qualities, "sweep": sweep or None}


def _score_part(score: TaskScore, ratio: LengthRatio | None, n_tasks: int) -> dict[str, Any]:
    against = asdict(ratio) if ratio is not None else {}
    return {
        "right": score.right,
        "share": rounded(score.right / n_tasks, 4),
        "tokens": score.tokens,
        "cut": score.cut,
        "rerun_share": rounded(score.rerun_share, 4),
        "tok_per_s": rounded(score.tok_per_s, 2),
        "length_ratio_median": rounded(against.get("median"), 4),
        "length_ratio_geometric_mean": rounded(against.get("geometric_mean"), 4),
    }


def needle_part(found: Sequence[Found], trials: int, gate: float) -> dict[str, Any]:
    places = [
        {
            "quality": one.quality.value,
            "context": one.context,
            "depth": one.depth,
            "found": one.found,
            "share": rounded(one.found / one.trials, 4),
        }
        for one in found
    ]
    return {"trials": trials, "gate": gate, "places": places}


# -- figures for people ----------------------------------------------------------------------


def _title(name: str, part: dict[str, Any]) -> str:
    if name == "text":
        return f"{part['file']}, {part['tokens']} tokens, {part['windows']} windows"
    if name == "tasks":
        return f"{part['file']}, {part['tasks']} tasks"
    return f"Hidden numbers found, {part['trials']} for each place"


def _text_rows(part: dict[str, Any]) -> list[list[str]]:
    head = ["quality", "nll", "perplexity", "KL to exact", "same top token", "largest margin"]
    rows = [
        [
            quality,
            _figure(one["nll"], ".4f"),
            _figure(one["perplexity"], ".2f"),
            _figure(one["kl_mean"], ".4f"),
            _figure(one["top1_agreement"], ".2%"),
            _figure(one["largest_margin"], ".2f"),
        ]
        for quality, one in part["qualities"].items()
    ]
    return [head, *rows]


def _task_rows(part: dict[str, Any]) -> list[list[str]]:
    head = ["quality", "right", "share", "cut", "made again", "tokens/s", "length, median"]
    head.append("length, geometric mean")
    found = list(part["qualities"].items())
    found += [(f"balanced, gate {one['gate']:g}", one) for one in part["sweep"] or ()]
    rows = [
        [
            name,
            str(one["right"]),
            _figure(one["share"], ".1%"),
            str(one["cut"]),
            _figure(one["rerun_share"], ".1%"),
            _figure(one["tok_per_s"], ".1f"),
            _figure(one["length_ratio_median"], ".3f"),
            _figure(one["length_ratio_geometric_mean"], ".3f"),
        ]
        for name, one in found
    ]
    return [head, *rows]


def _needle_rows(part: dict[str, Any]) -> list[list[str]]:
    places = part["places"]
    shares = {(one["quality"], one["context"], one["depth"]): one["share"] for one in places}
    lines = dict.fromkeys((one["quality"], one["context"]) for one in places)
    head = ["quality", "context", *(f"at {depth:.0%}" for depth in DEPTHS)]
    rows = [
        [quality, str(context), *(f"{shares[quality, context, depth]:.0%}" for depth in DEPTHS)]
        for quality, context in lines
    ]
    return [head, *rows]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
