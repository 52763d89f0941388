"""Pulls in child processes that are killed or stopped at drawn moments, until the pack is whole.
Moments are counted in steps of the pull, so that a slow computer has the same ones.

A program of its own that never pulls itself: so it can fork, as its libraries have started no
threads in it.

    python -m tests.store.pull_driver URL SOURCE WORK SEED...

Prints one JSON object per seed with how the runs ended.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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
POLLS = 45
"""A pull of the tiny model asks some 55 times whether it should stop, on any computer. One that
goes on, or whose network fails, asks less often, so early questions are drawn more often.
"""


@dataclass(frozen=True)
class Course:
    """How one run goes: with which settings, and at which question of whether to stop it ends.

    Attributes:
        stops_at: a person pauses it there, if not None.
        dies_at: it is killed so many seconds (`later`) behind that, if not None; 0: as it begins.
    """

    reclaim: bool
    parallel: int
    threads: int
    stops_at: int | None
    dies_at: int | None
    later: float

    @classmethod
    def draw(cls, rng: random.Random) -> Course:
        stops, dies = (rng.randrange(1 + rng.randrange(POLLS)) for _ in range(2))
        return cls(
            rng.random() < 0.7, rng.choice([1, 2, 3]), rng.choice([1, 2]),
            stops if rng.random() < 0.2 else None, dies if rng.random() < 0.5 else None,
            rng.uniform(1e-4, 0.02),
        )  # fmt: skip

    def stopper(self) -> Callable[[], bool]:
        """Answers the questions, and has the process killed: by an alarm nobody handles, which
        comes in the middle of whatever runs then.
        """
        asked_so_far = itertools.count(1)

        def stop() -> bool:
            number = next(asked_so_far)
            if number == self.dies_at:
                signal.setitimer(signal.ITIMER_REAL, self.later)
            return self.stops_at is not None and number > self.stops_at

        if self.dies_at == 0:
            signal.setitimer(signal.ITIMER_REAL, self.later)
        return stop


def attempt(url: str, make: Any, work: Path, course: Course) -> None:
    """One run as a person's: it ends whole (0), paused (3), or is killed."""
    stop = course.stopper()
    wanted = asked(work, reclaim=course.reclaim, parallel=course.parallel)
    line = line_to(url)
    try:
        prepared = prepare(wanted, line, make)
        if prepared is None:  # the last run was killed behind its last step: the pack is there
            return
        pull(prepared, line, memory_budget=BUDGET, threads=course.threads, stop=stop)
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
        course = Course.draw(rng)
        pid = in_child(functools.partial(attempt, url, make, work, course))
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            ended["killed"] += 1
        elif not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) == PAUSED:
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
