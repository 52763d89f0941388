"""Pulls in child processes that are killed or stopped at random moments, until the pack is whole.

A program of its own that never pulls itself: so it can fork, as its libraries have started no
threads in it.

    python -m tests.store.pull_driver URL SOURCE WORK SEED...

Prints one JSON object per seed with how the runs ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from moet_desk.errors import JobPaused
from moet_desk.store.pull import pull
from moet_desk.store.pull_prepare import prepare
from tests.store.crash_driver import in_child
from tests.store.pulls import BUDGET, asked, line_to, planner
from tests.store.tiny import Tiny

PAUSED = 3


def attempt(url: str, make: Any, work: Path, rng: random.Random) -> None:
    """One run as a person's: it ends whole (0), paused (3), or is killed."""
    stops_at = time.monotonic() + rng.uniform(0.05, 1.0) if rng.random() < 0.2 else float("inf")
    wanted = asked(work, reclaim=rng.random() < 0.7, parallel=rng.choice([1, 2, 3]))
    line = line_to(url)
    try:
        prepared = prepare(wanted, line, make)
        if prepared is None:  # the last run was killed behind its last step: the pack is there
            return
        pull(
            prepared,
            line,
            memory_budget=BUDGET,
            threads=rng.choice([1, 2]),
            stop=lambda: time.monotonic() > stops_at,
        )
    except JobPaused as error:
        sys.stderr.write(f"{error.code} ")
        sys.stderr.flush()
        os._exit(PAUSED)
    except BaseException:
        traceback.print_exc()  # the fork ends without a word of its own
        raise


def until_whole(url: str, make: Any, work: Path, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    ended = {"killed": 0, "paused": 0, "whole": 0, "failed": 0}
    for _ in range(80):
        pid = in_child(lambda: attempt(url, make, work, rng))
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0.0, 0.8))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        rng.random()  # the child's draws do not come back; the next one gets others
        if os.WIFSIGNALED(status):
            ended["killed"] += 1
        elif os.WEXITSTATUS(status) == PAUSED:
            ended["paused"] += 1
        elif status:
            ended["failed"] += 1
            break
        else:
            ended["whole"] += 1
            break
    return ended


def main() -> None:
    torch.set_num_threads(1)
    url, source, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    tiny = Tiny(**json.loads((source.parent / "tiny.json").read_text()))
    make = planner(Tiny(tiny.hidden, tiny.inter, tiny.n_experts, tuple(tiny.layers)), source)
    for seed in map(int, sys.argv[4:]):
        folder = work / str(seed)
        folder.mkdir(parents=True)
        sys.stdout.write(json.dumps({"seed": seed, **until_whole(url, make, folder, seed)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
