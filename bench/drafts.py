"""How often guesses of the demo model are right, and what they gain, over answers to held-out chats.

    python -m bench.drafts [PROMPTS [TOKENS [DEVICE]]]

One JSON line for each quality and way to guess: greedy answers, the first turns of
tests/data/heldout/chat.jsonl. On a CPU (default) rows are read one by one, so a right guess saves
nothing there: tokens per step is what a GPU can use.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Quality,
    Sampling,
    start_engine,
)
from moet_desk.telemetry import Finished
from tests.conftest import DEMO, pack_source

CHATS = Path(__file__).parent.parent / "tests" / "data" / "heldout" / "chat.jsonl"
TURN = "<|assistant|>"


def prompts(count: int) -> list[str]:
    texts = [json.loads(line)["text"] for line in CHATS.read_text().splitlines()[:count]]
    return [text[: text.index(TURN) + len(TURN)] for text in texts]


def measure(pack: Path, quality: Quality, n_prompts: int, n_tokens: int, **options: Any) -> None:
    handle = start_engine(pack, EngineOptions(save_heat=False, **options))
    handle.wait_ready(120)
    steps = tokens = 0
    began, decode_s = time.perf_counter(), 0.0
    for prompt in prompts(n_prompts):
        request = GenerateRequest(
            prompt=prompt, quality=quality, max_tokens=n_tokens, sampling=Sampling(temperature=0)
        )
        *_, last = handle.submit(request)
        assert isinstance(last, Finished), last
        steps += last.usage.steps
        decode_s += last.usage.decode_s
        tokens += last.usage.completion_tokens - 1  # the first one is behind the prompt
    seconds = time.perf_counter() - began
    time.sleep(0.2)
    drafts = handle.snapshot().drafts
    handle.close()
    shares = [round(r / g, 3) for r, g in zip(drafts.right, drafts.guessed, strict=True)]
    print(
        json.dumps(
            {
                "quality": quality.value,
                **options,
                "tokens": tokens,
                "tokens_per_step": round(tokens / steps, 3),
                "right_by_place": shares,
                "guessed": list(drafts.guessed),
                "tok_per_s": round(tokens / decode_s, 1),
                "seconds": round(seconds, 1),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    given = [*sys.argv[1:], *("60", "64", "cpu")[len(sys.argv) - 1 :]]
    n_prompts, n_tokens, device = int(given[0]), int(given[1]), given[2]
    with tempfile.TemporaryDirectory() as folder:
        pack = pack_source(DEMO, Path(folder) / "demo")
        for quality in (Quality.FAST, Quality.EXACT):
            for options in (
                {"drafts": "off"},
                {"drafts": "mtp", "draft_depth": 2},
                {"drafts": "lookup", "draft_depth": 2},
            ):
                measure(pack, quality, n_prompts, n_tokens, device=device, **options)
