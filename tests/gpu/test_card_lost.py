"""A card that is lost in the middle of an answer: the engine ends with its own error, in time.

In a process of its own, which can use the card no more afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROGRAM = """
    import json, sys, time
    from pathlib import Path
    import torch
    from moet_desk.engine.handle import EngineOptions, GenerateRequest, Sampling, start_engine
    from moet_desk.errors import MoetError
    from moet_desk.telemetry import Failed

    def break_card():
        '''An index behind the end: a kernel's assertion, which ends the context.'''
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum()

    pack, when = Path(sys.argv[1]), sys.argv[2]
    options = EngineOptions(device="cuda", save_heat=False, context=1024, pool_slots=40)
    engine = start_engine(pack, options)
    engine.wait_ready(300)
    codes = []
    if when == "writing":
        stream = engine.submit(GenerateRequest(
            prompt="A goat", max_tokens=800, ignore_eos=True, sampling=Sampling(temperature=1.0),
        ))
        for i, event in enumerate(stream):
            if i == 5:
                break_card()
            if isinstance(event, Failed):
                codes.append(event.error.code)
    else:
        break_card()
        deadline = time.monotonic() + 20
        while engine.snapshot().state.value != "fault" and time.monotonic() < deadline:
            time.sleep(0.05)
    try:
        engine.submit(GenerateRequest(prompt="A goat", max_tokens=2))
    except MoetError as error:
        codes.append(error.code)
    began = time.monotonic()
    engine.close()
    record = engine.snapshot().error or {}
    print(json.dumps({
        "codes": codes, "shown": record.get("code"), "close_s": time.monotonic() - began,
    }))
    sys.stdout.flush()
"""


@pytest.mark.parametrize("when", ["writing", "idle"])
def test_card_lost__while__every_request_and_the_screen_say_so(demo_pack: Path, when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(demo_pack), when],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[-1])
    assert set(found["codes"]) == {"MD-GPU-07"}
    assert len(found["codes"]) == (2 if when == "writing" else 1)
    assert found["shown"] == "MD-GPU-07"
    assert found["close_s"] < 10
    assert done.returncode == 0, done.stderr[-3000:]
