"""Which signal of a 2-bit step tells best that FP4 experts would find another token likeliest.

    python bench/gate_signals.py PACK TASKS.jsonl CHAT.jsonl PROSE.jsonl

Reads texts in both precisions and prints a JSON line per text and signal: how many steps have to be
rerun to catch half, 80, 90 and 95 % of the flips, the least sure steps first. On TASKS, steps are
the tokens of the answers that `exact` gives; on CHAT, all tokens. PROSE is where the noise of each
word's score is measured, so that no signal is judged on what it was made from. On the CPU; writes
nothing. For routers that score with a sigmoid and a bias, as DeepSeek-V3's.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moet_desk.cli.eval_data import read_tasks, read_texts
from moet_desk.engine.blocks import ffn
from moet_desk.engine.evaluate import Answered, answer_exactly, opened_core, windows_of
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.loader import Core
from moet_desk.store.pack_format import Plane

CATCHES = (0.5, 0.8, 0.9, 0.95)
MAX_TOKENS = 256
SLICE = 64
"""Tokens whose scores are in memory at once."""


@dataclass(frozen=True)
class Routing:
    """What routers did with the tokens of a window."""

    ids: Tensor  # [L, T, K] chosen experts
    gap: Tensor  # [L, T] score of the last one chosen above the first one left out


@dataclass(frozen=True)
class Steps:
    """A text's steps: how unsure each signal is (larger: rerun sooner), and where flips are."""

    unsure: dict[str, Tensor]  # each [N]
    flip: Tensor  # [N] bool


@contextmanager
def routes_noted() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Note ids and gap of each layer's routing, one entry per layer and chunk."""
    noted: list[tuple[Tensor, Tensor]] = []
    real = ffn.route

    def noting(logits: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        ids, weights = real(logits, **how)
        scores = torch.sigmoid(logits)
        if how["selection_bias"] is not None:
            scores = scores + how["selection_bias"]
        best = scores.topk(how["top_k"] + 1).values
        noted.append((ids.sort(-1).values, best[:, -2] - best[:, -1]))
        return ids, weights

    ffn.route = noting  # type: ignore[assignment]
    try:
        yield noted
    finally:
        ffn.route = real


@torch.inference_mode()
def read_window(core: Core, ids: Tensor, plane: Plane) -> tuple[Tensor, Routing]:
    """Hidden states [T, H] of a window and its routing."""
    sequence = core.kv.reserve(len(ids))
    if sequence is None:
        raise RuntimeError("the window is longer than the context")
    hidden, parts = [], []
    n_layers = len(core.spec.main_moe_layers)
    try:
        for start in range(0, len(ids), core.prefiller.chunk):
            with routes_noted() as noted:
                part = ids[start : start + core.prefiller.chunk].long()
                hidden.append(core.prefiller.hidden(part, sequence, plane))
            assert len(noted) == n_layers
            parts.append(noted)
    finally:
        core.kv.release(sequence)
    chosen = torch.stack([torch.cat([p[i][0] for p in parts]) for i in range(n_layers)])
    gaps = torch.stack([torch.cat([p[i][1] for p in parts]) for i in range(n_layers)])
    return torch.cat(hidden), Routing(chosen, gaps)


@torch.inference_mode()
def word_noise(core: Core, windows: Sequence[Tensor]) -> Tensor:
    """Root mean square of fast - exact of each word's score, centred per token: float64 [V]."""
    total, count = torch.zeros(core.spec.vocab, dtype=torch.float64), 0
    for window in windows:
        states = [read_window(core, window, plane)[0] for plane in (Plane.BASE, Plane.FINE)]
        for at in range(0, len(window), SLICE):
            fast, exact = (core.model.logits(x[at : at + SLICE]).double() for x in states)
            off = fast - exact
            off -= off.mean(-1, keepdim=True)
            total += off.square().sum(0)
            count += len(off)
    return (total / count).sqrt()


@torch.inference_mode()
def judge(core: Core, window: Tensor, first: int, noise: Tensor) -> Steps:
    """Every signal at the steps that write the window's tokens from `first` on."""
    fast_states, fast_routes = read_window(core, window, Plane.BASE)
    exact_states, exact_routes = read_window(core, window, Plane.FINE)
    found: list[dict[str, Tensor]] = []
    flips: list[Tensor] = []
    for at in range(first - 1, len(window) - 1, SLICE):
        upto = min(at + SLICE, len(window) - 1)
        fast, exact = (core.model.logits(x[at:upto]).double() for x in (fast_states, exact_states))
        top, words = fast.topk(2)
        margin = top[:, 0] - top[:, 1]
        log_p = fast.log_softmax(-1)
        gap = fast_routes.gap[:, at:upto].double()
        here = (fast - exact).std(-1)
        moved = routes_moved(fast_routes.ids[:, at:upto], exact_routes.ids[:, at:upto])
        found.append({
            "max probability": -log_p.amax(-1),
            "margin": -margin,
            "margin / noise of the two words": -margin / noise[words].square().sum(-1).sqrt(),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "router gap, smallest": -gap.amin(0),
            "router gap, mean": -gap.mean(0),
            "margin / noise of the step (needs exact)": -margin / here,
            "router disagreement (needs exact)": moved,
        })  # fmt: skip
        flips.append(words[:, 0] != exact.argmax(-1))
    return joined([Steps(one, flip) for one, flip in zip(found, flips, strict=True)])


def routes_moved(fast: Tensor, exact: Tensor) -> Tensor:
    """Chosen experts of `exact` that `fast` did not choose, all layers together: [T] float64."""
    same = (fast[..., :, None] == exact[..., None, :]).any(-1).sum(-1)  # [L, T]
    return (fast.shape[-1] - same).sum(0).double()


def joined(parts: Sequence[Steps]) -> Steps:
    names = parts[0].unsure
    unsure = {name: torch.cat([part.unsure[name] for part in parts]) for name in names}
    return Steps(unsure, torch.cat([part.flip for part in parts]))


def rerun_shares(unsure: Tensor, flip: Tensor) -> dict[str, float]:
    """Share of steps at or above the threshold that catches each share of the flips."""
    of_flips = unsure[flip].sort(descending=True).values
    shares = {}
    for catch in CATCHES:
        threshold = of_flips[math.ceil(catch * len(of_flips)) - 1]
        shares[f"{catch:g}"] = round(float((unsure >= threshold).double().mean()), 4)
    return shares


def report(text: str, steps: Steps) -> None:
    head = {"text": text, "steps": len(steps.flip), "flips": int(steps.flip.sum())}
    for name, unsure in steps.unsure.items():
        shares = rerun_shares(unsure, steps.flip)
        print(json.dumps({**head, "signal": name, "rerun": shares}), flush=True)


def main(pack: Path, tasks: Path, chat: Path, prose: Path) -> None:
    with opened_core(pack, EngineOptions(save_heat=False)) as (core, text):
        size = core.plan.context
        noise = word_noise(core, windows_of(text, read_texts(prose), size=size, most_tokens=8000))
        answers: list[Answered] = []
        for task in read_tasks(tasks):
            ids = text.encode_prompt(task.prompt or "")
            answers.append(answer_exactly(core, text, ids, MAX_TOKENS))
        judged = [judge(core, one.ids, one.n_prompt, noise) for one in answers]
        report(tasks.name, joined(judged))
        windows = windows_of(text, read_texts(chat), size=size)
        report(chat.name, joined([judge(core, window, 1, noise) for window in windows]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
