"""Whether answers at temperature 1 keep to random JSON schemas, and what the masks take.

    python -m bench.forms [SCHEMAS]

One JSON object: the demo model answers each schema once, on a CPU; the check of the values is that
of tests/engine/json_forms.py, which knows no grammars.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from moet_desk.engine.grammar import Constraint
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Grammar,
    GrammarKind,
    Sampling,
    start_engine,
)
from moet_desk.telemetry import Finished, TextDelta
from tests.conftest import DEMO, pack_source
from tests.engine.json_forms import fits, random_schema

PROMPT = "Tell me about the harbour, as JSON."
HOT = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def main(pack: Path, count: int) -> None:
    mask_ms: list[float] = []
    plain_apply = Constraint.apply

    def timed_apply(self: Constraint, logits: object) -> object:
        began = time.perf_counter()
        masked = plain_apply(self, logits)
        mask_ms.append((time.perf_counter() - began) * 1e3)
        return masked

    Constraint.apply = timed_apply
    handle = start_engine(pack, EngineOptions(save_heat=False))
    handle.wait_ready(120)
    submit_ms: list[float] = []
    tokens = 0
    wrong: list[dict[str, object]] = []
    for seed in range(count):
        schema = random_schema(seed)
        request = GenerateRequest(
            messages=[{"role": "user", "content": PROMPT}],
            grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            sampling=replace(HOT, seed=seed),
            max_tokens=1000,
        )
        began = time.perf_counter()
        stream = handle.submit(request)
        submit_ms.append((time.perf_counter() - began) * 1e3)
        events = list(stream)
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        last = events[-1]
        assert isinstance(last, Finished), last
        tokens += last.usage.completion_tokens
        try:
            good = fits(json.loads(text), schema)
        except ValueError:
            good = False
        if not good:
            wrong.append({"seed": seed, "text": text, "reason": last.reason.value})
    handle.close()
    record = {
        "what": "answers of random JSON schemas, temperature 1, no filters",
        "device": "cpu",
        "shape": "demo",
        "schemas": count,
        "valid": count - len(wrong),
        "wrong": wrong,
        "tokens": tokens,
        "mask_ms": {"median": round(statistics.median(mask_ms), 3), "most": round(max(mask_ms), 3)},
        "submit_ms": {
            "median": round(statistics.median(submit_ms), 2),
            "most": round(max(submit_ms), 2),
        },
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        source = pack_source(DEMO, Path(folder) / "demo")
        main(source, int(sys.argv[1]) if len(sys.argv) > 1 else 200)
