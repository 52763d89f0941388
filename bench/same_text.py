"""That guesses change no text: greedy answers with them against those of runs without, token for
token.

    python -m bench.same_text [--chats FILE] [--count N] [--tokens N] [--quality Q]
                              [--pool full|tiny] [--drafts WHO] [--depth N] [--device D]

One JSON line for each quality and size of the pools. FILE has chats as tests/data/heldout/chat.jsonl
(default); the first turns are the prompts. Exit code 1 if any answer differs. A GPU chooses its tokens
itself, without telling their numbers: there texts and their lengths in tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Quality,
    Sampling,
    start_engine,
)
from moet_desk.telemetry import Finished, TextDelta
from tests.conftest import DEMO, pack_source

CHATS = Path(__file__).parent.parent / "tests" / "data" / "heldout" / "chat.jsonl"
TURN = "<|assistant|>"
POOLS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "tiny": {"pool_slots": 4, "fine_slots": 4},  # the experts of one token in one layer
}
TINY_ON_GPU = {"pool_slots": 32, "fine_slots": 32}  # a step of three rows needs more


@dataclass(frozen=True, slots=True)
class Answer:
    """What is compared; steps and right guesses are no part of it."""

    tokens: tuple[int, ...]  # none from a GPU
    text: str
    n_tokens: int
    reason: str


@dataclass(slots=True)
class Speed:
    """What some answers took."""

    tokens: int = 0
    steps: int = 0
    decode_s: float = 0.0


def first_turns(chats: Path, count: int) -> list[str]:
    """Prompts, up to where the first answer begins."""
    texts = [json.loads(line)["text"] for line in chats.read_text().splitlines()[:count]]
    return [text[: text.index(TURN) + len(TURN)] for text in texts]


@contextmanager
def running(pack: Path, **options: Any) -> Iterator[EngineHandle]:
    """An engine of one thread, closed at the end."""
    handle = start_engine(pack, EngineOptions(save_heat=False, threads=1, **options))
    try:
        handle.wait_ready(300)
        yield handle
    finally:
        handle.close()


def answers(
    handle: EngineHandle,
    prompts: Sequence[str],
    quality: Quality,
    n_tokens: int,
    *,
    on_device: bool = False,
) -> tuple[list[Answer], Speed]:
    """Greedy answers, one after the other; on_device: chosen there, without log probabilities."""
    made, speed = [], Speed()
    for prompt in prompts:
        request = GenerateRequest(
            prompt=prompt, quality=quality, max_tokens=n_tokens, sampling=Sampling(temperature=0),
            top_logprobs=None if on_device else 0,
        )  # fmt: skip
        tokens: list[int] = []
        text = ""
        for event in handle.submit(request):
            if isinstance(event, TextDelta):
                tokens += [entry.token_id for entry in event.logprobs]
                text += event.text
        assert isinstance(event, Finished), event
        count = event.usage.completion_tokens
        made.append(Answer(tuple(tokens), text, count, event.reason.value))
        speed.tokens += max(0, event.usage.completion_tokens - 1)  # the first is the prompt's
        speed.steps += event.usage.steps
        speed.decode_s += event.usage.decode_s
    return made, speed


def compared(
    pack: Path,
    prompts: Sequence[str],
    n_tokens: int,
    drafts: Mapping[str, Any],
    qualities: Sequence[Quality],
    pools: Sequence[str] = ("full", "tiny"),
    device: str = "cpu",
) -> Iterator[dict[str, Any]]:
    """For each quality and pool: how many answers differ from those without guesses."""
    gpu = device != "cpu"
    for quality in qualities:
        with running(pack, device=device) as handle:
            wanted, plain = answers(handle, prompts, quality, n_tokens, on_device=gpu)
        for name in pools:
            sizes = TINY_ON_GPU if gpu and name == "tiny" else POOLS[name]
            began = time.perf_counter()
            with running(pack, device=device, **drafts, **sizes) as handle:
                found, speed = answers(handle, prompts, quality, n_tokens, on_device=gpu)
                time.sleep(0.2)  # until the last step is in the picture
                counts = handle.snapshot().drafts
            yield {
                "quality": quality.value,
                "pool": name,
                "answers": len(prompts),
                "differ": sum(a != b for a, b in zip(wanted, found, strict=True)),
                "tokens": speed.tokens,
                "tokens_per_step": round(speed.tokens / speed.steps, 3),
                "guessed": list(counts.guessed),
                "right": list(counts.right),
                "tok_per_s": round(speed.tokens / speed.decode_s, 1),
                "tok_per_s_without": round(plain.tokens / plain.decode_s, 1),
                "seconds": round(time.perf_counter() - began, 1),
            }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chats", type=Path, default=CHATS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--quality", choices=[quality.value for quality in Quality])
    parser.add_argument("--pool", choices=list(POOLS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--drafts", default="mtp")
    parser.add_argument("--depth", type=int, default=2)
    wishes = parser.parse_args()
    prompts = first_turns(wishes.chats, wishes.count)
    drafts = {"drafts": wishes.drafts, "draft_depth": wishes.depth}
    if wishes.drafts == "auto":
        drafts["draft_head"] = True
    n_differ = 0
    with tempfile.TemporaryDirectory() as folder:
        pack = pack_source(DEMO, Path(folder) / "demo")
        qualities = [Quality(wishes.quality)] if wishes.quality else list(Quality)
        pools = [wishes.pool] if wishes.pool else list(POOLS)
        for line in compared(pack, prompts, wishes.tokens, drafts, qualities, pools, wishes.device):
            n_differ += line["differ"]
            print(json.dumps(line), flush=True)
    return int(n_differ > 0)


if __name__ == "__main__":
    sys.exit(main())
