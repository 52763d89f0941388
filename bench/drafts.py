"""How often guesses of the demo model are right, and what they gain, over answers to held-out chats.

    python -m bench.drafts [PROMPTS [TOKENS [DEVICE [WAYS]]]]

One JSON line for each quality and way to guess: greedy answers, the first turns of
tests/data/heldout/chat.jsonl. All engines are open at once and take turns, prompt by prompt, so that
whatever else the computer does meets all of them; on a GPU each may take 4 GiB. On a CPU (default) rows
are read one by one, so a right guess saves nothing: tokens per step is what a GPU can use.
`cpu_ms_per_token` is this process's own time.
WAYS are places in the list below, 0,4,5; all if there are none.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.same_text import CHATS, first_turns, running
from moet_desk.engine.handle import EngineHandle, GenerateRequest, Quality, Sampling
from moet_desk.telemetry import Finished
from moet_desk.units import GIB
from tests.conftest import DEMO, pack_source

WAYS: Sequence[Mapping[str, Any]] = (
    {"drafts": "off"},
    {"drafts": "mtp", "draft_depth": 1},
    {"drafts": "mtp", "draft_depth": 2},
    {"drafts": "lookup", "draft_depth": 2},
    {"drafts": "auto", "draft_depth": 3},
    {"drafts": "auto", "draft_depth": 3, "draft_head": True},
)
ROOM = {"cuda": 4 * GIB}


@dataclass(slots=True)
class Sums:
    """What the answers of one engine took."""

    tokens: int = 0
    steps: int = 0
    decode_s: float = 0.0
    cpu_s: float = 0.0


def answer(handle: EngineHandle, prompt: str, quality: Quality, n_tokens: int, sums: Sums) -> None:
    """One greedy answer, without the reading of its prompt."""
    request = GenerateRequest(
        prompt=prompt, quality=quality, max_tokens=n_tokens, sampling=Sampling(temperature=0)
    )
    began = None
    for event in handle.submit(request):
        began = time.process_time() if began is None and not _is_reading(event) else began
    assert isinstance(event, Finished), event
    assert began is not None
    sums.cpu_s += time.process_time() - began
    sums.steps += event.usage.steps
    sums.decode_s += event.usage.decode_s
    sums.tokens += event.usage.completion_tokens - 1  # the first one is behind the prompt


def _is_reading(event: object) -> bool:
    return type(event).__name__ == "PrefillProgress"


def line(quality: Quality, way: Mapping[str, Any], handle: EngineHandle, sums: Sums) -> str:
    """The figures of one engine."""
    now = handle.snapshot()
    shares = [round(r / g, 3) for r, g in zip(now.drafts.right, now.drafts.guessed, strict=True)]
    figures = {
        "quality": quality.value,
        **way,
        "tokens": sums.tokens,
        "tokens_per_step": round(sums.tokens / sums.steps, 3),
        "right_by_place": shares,
        "guessed": list(now.drafts.guessed),
        "tok_per_s": round(sums.tokens / sums.decode_s, 1),
        "cpu_ms_per_token": round(1e3 * sums.cpu_s / sums.tokens, 2),
        "settled_at": now.draft_choice.source,
        "probes": now.draft_choice.probes,
    }
    return json.dumps(figures)


def main() -> None:
    everyone = ",".join(map(str, range(len(WAYS))))
    given = [*sys.argv[1:], *("60", "64", "cpu", everyone)[len(sys.argv) - 1 :]]
    n_prompts, n_tokens, device = int(given[0]), int(given[1]), given[2]
    ways = [WAYS[int(place)] for place in given[3].split(",")]
    with tempfile.TemporaryDirectory() as folder:
        pack = pack_source(DEMO, Path(folder) / "demo")
        prompts = first_turns(CHATS, n_prompts)
        for quality in (Quality.FAST, Quality.EXACT):
            compare(pack, prompts, quality, n_tokens, ways, device)


def compare(
    pack: Path,
    prompts: Sequence[str],
    quality: Quality,
    n_tokens: int,
    ways: Sequence[Mapping[str, Any]],
    device: str,
) -> None:
    """Print a line for each of some ways, whose engines take turns."""
    with ExitStack() as stack:
        handles = [
            stack.enter_context(
                running(pack, device=device, hot_set=False, vram_bytes=ROOM.get(device), **way)
            )
            for way in ways
        ]
        sums = [Sums() for _ in ways]
        for prompt in prompts:
            for handle, its in zip(handles, sums, strict=True):
                answer(handle, prompt, quality, n_tokens, its)
        time.sleep(0.2)  # until the last step is in the pictures
        for way, handle, its in zip(ways, handles, sums, strict=True):
            print(line(quality, way, handle, its), flush=True)


if __name__ == "__main__":
    main()
