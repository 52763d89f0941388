"""How soon an answer begins when its prompt was read before: in the same run, and after a restart.

    python -m bench.kept_prompts PACK [TOKENS]

Prints a JSON document. The text is made up; the first token is greedy.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Sampling,
    start_engine,
)
from moet_desk.telemetry import Finished

ROUNDS = 5


def main(pack: Path, n_tokens: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            save_heat=False, prefix_bytes=None, saved_prefixes=Path(folder), saved_bytes=2**33
        )
        handle = _started(pack, options)
        fresh, _ = _first_token_s(handle, n_tokens)
        kept = [_first_token_s(handle, n_tokens) for _ in range(ROUNDS)]
        handle.close()
        files = list(Path(folder).iterdir())
        restarted = []
        for _ in range(ROUNDS):
            handle = _started(pack, options)
            restarted.append(_first_token_s(handle, n_tokens))
            handle.close()
        document = {
            "prompt_tokens": n_tokens,
            "files": len(files),
            "bytes": sum(file.stat().st_size for file in files),
            "first_token_s": {
                "read": round(fresh, 4),
                "kept": _of(kept),
                "restarted": _of(restarted),
            },
            "cached_tokens": {"kept": kept[0][1], "restarted": restarted[0][1]},
        }
    print(json.dumps(document, indent=1))


def _started(pack: Path, options: EngineOptions) -> EngineHandle:
    handle = start_engine(pack, options)
    handle.wait_ready()
    return handle


def _first_token_s(handle: EngineHandle, n_tokens: int) -> tuple[float, int]:
    model = handle.model()
    assert model is not None
    ids = tuple((7 * i * i + 3 * i) % (model.vocab - 300) + 300 for i in range(n_tokens))
    request = GenerateRequest(prompt_ids=ids, sampling=Sampling(temperature=0), max_tokens=2)
    began = time.monotonic()
    stream = handle.submit(request)
    for event in stream:
        if isinstance(event, Finished):
            assert event.usage.first_token_s is not None
            return event.usage.first_token_s, event.usage.cached_tokens
    raise SystemExit(f"no answer after {time.monotonic() - began:.1f} s")


def _of(rounds: list[tuple[float, int]]) -> dict[str, float]:
    times = [seconds for seconds, _ in rounds]
    return {
        "median": round(statistics.median(times), 4),
        "least": round(min(times), 4),
        "most": round(max(times), 4),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4000)
