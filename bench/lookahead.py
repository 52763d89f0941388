"""Would it pay to fetch the experts that the next layer's router would choose for this layer's input?

    python -m bench.lookahead [TEXTS [TOKENS]]
    python -m bench.lookahead cuda [PROMPTS [TOKENS]]     answers on a card, with lookahead and without

Routing of the demo model over held-out texts (tests/data/heldout/chat.jsonl), token by token in the
order of decoding: what each layer's router chose, and what it would have chosen one layer early. Then
steps are played with the engine's cache tables and one link: a layer's rows come one after another, guessed
ones behind those that are needed, and before those of the layer that they are for. Times are those of DeepSeek-V4-Flash's shape on an
H200: 130 us a layer, 144 us a row. One JSON line for each share of slots and number of guesses. On the
CPU; writes nothing. For routers that score with a sigmoid and a bias.

On a card engines with few slots answer held-out chats in turn; the texts must be the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.same_text import CHATS, Speed, first_turns, running
from moet_desk.cli.eval_data import read_texts
from moet_desk.engine.blocks import ffn
from moet_desk.engine.evaluate import opened_core, windows_of
from moet_desk.engine.handle import EngineOptions, GenerateRequest, Sampling
from moet_desk.engine.loader import Core
from moet_desk.kernels.reference.cache import CacheTables, lookup
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import Finished, TextDelta
from moet_desk.units import GIB
from tests.conftest import DEMO, pack_source

LAYER_US, ROW_US = 130.0, 144.0
SHARES = (0.5, 0.75, 0.85, 0.9)
GUESSES = (0, 1, 2, 4)


@dataclass(frozen=True)
class Routing:
    """Experts by token and layer, the likeliest first: chosen ones, and those guessed for each layer
    behind the first (of layer 0 nothing is guessed: its line repeats the chosen ones).
    """

    chosen: Tensor  # [T, L, K]
    guessed: Tensor  # [T, L, K]


@contextmanager
def moe_inputs_noted() -> Iterator[list[tuple[ffn.MoeBlock, Tensor]]]:
    """Note each MoE layer and its input, in the order of the layers, chunk by chunk."""
    noted: list[tuple[ffn.MoeBlock, Tensor]] = []
    real = ffn.MoeBlock.__call__

    def noting(self: ffn.MoeBlock, x: Tensor, *rest: Any) -> Tensor:
        noted.append((self, x.clone()))
        return real(self, x, *rest)

    ffn.MoeBlock.__call__ = noting  # type: ignore[method-assign,assignment]
    try:
        yield noted
    finally:
        ffn.MoeBlock.__call__ = real  # type: ignore[method-assign]


def choices(block: ffn.MoeBlock, x: Tensor) -> Tensor:
    """Experts [T, K] that the layer's router chooses for x [T, H], the likeliest first."""
    scores = torch.sigmoid(x @ block._w_router.float().T)
    if block._bias is not None:
        scores = scores + block._bias
    return scores.topk(block._router.top_k, -1).indices


@torch.inference_mode()
def routing_of(core: Core, ids: Tensor) -> Routing:
    sequence = core.kv.reserve(len(ids))
    if sequence is None:
        raise RuntimeError("the window is longer than the context")
    chosen, guessed = [], []
    try:
        for start in range(0, len(ids), core.prefiller.chunk):
            with moe_inputs_noted() as noted:
                part = ids[start : start + core.prefiller.chunk].long()
                core.prefiller.hidden(part, sequence, Plane.BASE)
            early = [noted[0][1], *(x for _, x in noted[:-1])]
            chosen.append(torch.stack([choices(block, x) for block, x in noted], 1))
            guessed.append(
                torch.stack(
                    [choices(block, x) for (block, _), x in zip(noted, early, strict=True)], 1
                )
            )
    finally:
        core.kv.release(sequence)
    return Routing(torch.cat(chosen), torch.cat(guessed))


@dataclass
class Link:
    """Transfers, one behind the other; `coming` are guessed rows with begin and end."""

    free_us: float = 0.0
    coming: dict[int, tuple[float, float]] = field(default_factory=dict)

    def bring(self, now_us: float) -> tuple[float, float]:
        begin = max(self.free_us, now_us)
        self.free_us = begin + ROW_US
        return begin, self.free_us


@dataclass
class Played:
    """Sums over all tokens."""

    tokens: int = 0
    us: float = 0.0
    asked: int = 0
    missed: int = 0  # needed rows that were neither in a slot nor on their way
    guessed: int = 0  # rows brought by guesses
    useful: int = 0  # of those, needed by the next layer


def play(parts: Sequence[Routing], n_experts: int, n_slots: int, most: int) -> Played:
    """Decode all tokens with so many slots, and at most so many guessed rows per layer."""
    n_layers = parts[0].chosen.shape[1]
    tables, link, played, clock = CacheTables(n_layers, n_experts, n_slots), Link(), Played(), 0
    for chosen, guessed in ((p.chosen.tolist(), p.guessed.tolist()) for p in parts):
        for its, guesses in zip(chosen, guessed, strict=True):
            played.tokens += 1
            for layer in range(n_layers):
                clock += 2
                played.us += LAYER_US
                began = played.us
                rows = {layer * n_experts + e for e in its[layer]}
                known = {row for row in rows if tables.slot_of[layer][row - layer * n_experts] >= 0}
                found = lookup(tables, layer, its[layer], now=clock)
                ready = max((link.coming[r][1] for r in rows & link.coming.keys()), default=began)
                for _ in found.misses:
                    ready = max(ready, link.bring(began)[1])
                played.us = max(played.us, ready)
                played.asked += len(rows)
                played.missed += len(rows - known)
                played.useful += len(rows & link.coming.keys())
                link.coming.clear()
                if most and layer + 1 < n_layers:
                    _guess(tables, link, guesses[layer + 1][:most], layer + 1, played, clock + 1)
    return played


def _guess(
    tables: CacheTables, link: Link, experts: list[int], layer: int, played: Played, clock: int
) -> None:
    """Bring guessed rows that have no slot. They count as used only when they are."""
    wanted = [e for e in experts if tables.slot_of[layer][e] < 0]
    base = layer * tables.n_experts
    before = {e: tables.warmth[base + e] for e in wanted}
    lookup(tables, layer, wanted, now=clock)
    for e in wanted:
        tables.warmth[base + e] = before[e]
        link.coming[base + e] = link.bring(played.us)
        played.guessed += 1


def main(texts: Path = CHATS, most_tokens: int = 8000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pack = pack_source(DEMO, Path(folder) / "pack")
        with opened_core(pack, EngineOptions(save_heat=False)) as (core, text):
            windows = windows_of(
                text, read_texts(texts), size=core.plan.context, most_tokens=most_tokens
            )
            parts = [routing_of(core, window) for window in windows]
            n_experts = core.spec.moe_ffn.router.n_experts
    chosen, guessed = (
        torch.cat([getattr(p, name)[:, 1:] for p in parts]) for name in ("chosen", "guessed")
    )
    same = (chosen[..., :, None] == guessed[..., None, :]).any(-1).double()
    last = (chosen[1:, ..., :, None] == chosen[:-1, ..., None, :]).any(-1).double()
    print(json.dumps({
        "tokens": len(chosen), "guessed_right": round(float(same.mean()), 4),
        "chosen_for_the_token_before_too": round(float(last.mean()), 4),
    }), flush=True)  # fmt: skip
    n_rows = parts[0].chosen.shape[1] * n_experts
    for share in SHARES:
        for most in GUESSES:
            done = play(parts, n_experts, round(share * n_rows), most)
            print(json.dumps({
                "slots": share, "guesses": most, "hit_rate": round(1 - done.missed / done.asked, 4),
                "us_per_token": round(done.us / done.tokens, 1),
                "guessed_rows_per_token": round(done.guessed / done.tokens, 3),
                "of_them_needed": round(done.useful / max(1, done.guessed), 4),
            }), flush=True)  # fmt: skip


def on_card(n_prompts: int = 30, n_tokens: int = 96) -> None:
    ways = [(slots, ahead) for slots in (96, 192) for ahead in (False, True)]
    prompts = first_turns(CHATS, n_prompts)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pack = pack_source(DEMO, Path(folder) / "pack")
        handles = [
            stack.enter_context(
                running(
                    pack, device="cuda", vram_bytes=4 * GIB, pool_slots=slots, lookahead=ahead,
                    hot_set=False,
                )
            )
            for slots, ahead in ways
        ]  # fmt: skip
        speeds = [Speed() for _ in ways]
        for prompt in prompts:
            texts = set()
            for handle, speed in zip(handles, speeds, strict=True):
                request = GenerateRequest(
                    prompt=prompt, max_tokens=n_tokens, sampling=Sampling(temperature=0)
                )
                events = list(handle.submit(request))
                texts.add("".join(e.text for e in events if isinstance(e, TextDelta)))
                done = events[-1]
                assert isinstance(done, Finished), done
                speed.tokens += done.usage.completion_tokens - 1
                speed.decode_s += done.usage.decode_s
            assert len(texts) == 1, texts
        for (slots, ahead), handle, speed in zip(ways, handles, speeds, strict=True):
            tiers = handle.snapshot().counters
            print(json.dumps({
                "slots": slots, "lookahead": ahead, "tokens": speed.tokens,
                "tok_per_s": round(speed.tokens / speed.decode_s, 1),
                "hit_rate": round(tiers.hits_base / tiers.lookups, 4),
                "rows_per_token": round(tiers.from_ram / speed.tokens, 3),
            }), flush=True)  # fmt: skip


if __name__ == "__main__" and sys.argv[1:2] == ["cuda"]:
    on_card(*map(int, sys.argv[2:]))
elif __name__ == "__main__":
    main(*([Path(sys.argv[1])] if sys.argv[1:] else []), *map(int, sys.argv[2:3]))
