"""Packs in child processes that die: by SIGKILL from outside, or in the middle of a disk operation.

A program of its own that never packs itself: so it can fork, as torch and blake3 have started no
threads in it.

    python -m tests.store.crash_driver kill SOURCE WORK N   kill -9 after random delays, N times
    python -m tests.store.crash_driver cut SOURCE WORK      die at every disk operation in turn, and
                                                            lose what was not synced (a power cut)

Prints one JSON object with what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moet_desk.store.journal import read_journal
from moet_desk.store.pack_format import PackPlan
from moet_desk.store.pack_writer import write_pack
from tests.store.tiny import Tiny, plan_of, snapshot

BUDGET = 158_000  # four rows to a batch, so that there are many moments to die in


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a forked child and return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def pack(source: Path, plan: PackPlan, dest: Path) -> None:
    write_pack(source, plan, dest, memory_budget=BUDGET, threads=2)


def whole(source: Path, plan: PackPlan, dest: Path) -> None:
    """Pack to the end."""
    status = os.waitpid(in_child(lambda: pack(source, plan, dest)), 0)[1]
    if status:
        raise SystemExit(f"packing {dest} ended with {status}")


def done_rows(dest: Path) -> int:
    return len(read_journal(dest / "journal").rows)


# -- kill -9 -----------------------------------------------------------------------------------


def kill(source: Path, plan: PackPlan, work: Path, n_kills: int) -> dict[str, Any]:
    """Kill packers at random moments until `n_kills` were alive to die; resume each to the end."""
    rng = random.Random(20261129)
    began = time.monotonic()
    whole(source, plan, work / "whole")
    took = time.monotonic() - began
    want = snapshot(work / "whole")
    kept: list[int] = []
    finished = equal = 0
    dest = work / "killed"
    while len(kept) < n_kills:
        pid = in_child(lambda: pack(source, plan, dest))
        time.sleep(rng.uniform(0.0, 0.6) * took)
        os.kill(pid, signal.SIGKILL)
        died = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        if died and not (dest / "pack.json").exists():
            kept.append(done_rows(dest))
        if not died or rng.random() < 0.25:
            # finish this one, compare, and start another
            whole(source, plan, dest)
            finished += 1
            equal += snapshot(dest) == want
            shutil.rmtree(dest)
    whole(source, plan, dest)
    return {
        "kept": kept,
        "finished": finished + 1,
        "equal": equal + (snapshot(dest) == want),
        "files": sorted(want),
    }


# -- power cut ---------------------------------------------------------------------------------


class Disk:
    """Counts disk operations, remembers what is not synced, and dies at one of them."""

    def __init__(self, dies_at: int, seed: int) -> None:
        self.left = dies_at
        self.rng = random.Random(seed)
        self.unsynced: list[tuple[int, bytes, int]] = []  # what lay there before
        self.real = {name: getattr(os, name) for name in ("pwrite", "fsync")}
        self.replace = Path.replace

    def install(self) -> None:
        os.pwrite, os.fsync, os.fdatasync = self.pwrite, self.sync, self.sync
        Path.replace = lambda path, target: self.rename(path, target)

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.die()

    def die(self) -> None:
        """Lose a random part of the unsynced writes, newest first, then stop like a power cut."""
        for fd, before, offset in reversed(self.unsynced):
            if self.rng.random() < 0.7:
                with contextlib.suppress(OSError):
                    self.real["pwrite"](fd, before, offset)
        os.kill(os.getpid(), signal.SIGKILL)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.count()
        before = b""
        with contextlib.suppress(OSError):  # a file opened for writing only has no past to keep
            before = os.pread(fd, len(data), offset)
        self.unsynced.append((fd, before or bytes(len(data)), offset))
        # the last write before the end is torn: only a part of it arrives
        size = max(1, len(data) // 2) if self.left == 0 else len(data)
        return int(self.real["pwrite"](fd, data[:size], offset))

    def sync(self, fd: int) -> None:
        self.count()
        self.real["fsync"](fd)
        self.unsynced = [entry for entry in self.unsynced if entry[0] != fd]

    def rename(self, path: Path, target: Path) -> Path:
        self.count()
        return self.replace(path, target)


def cut(source: Path, plan: PackPlan, work: Path) -> dict[str, Any]:
    """Die at every disk operation of a pack in turn; then resume without dying."""
    whole(source, plan, work / "whole")
    want = snapshot(work / "whole")
    n_crashes = n_equal = 0
    for at in range(10_000):
        dest = work / f"cut{at}"

        def dies(at: int = at, dest: Path = dest) -> None:
            Disk(at, seed=at).install()
            pack(source, plan, dest)

        status = os.waitpid(in_child(dies), 0)[1]
        if status == 0:
            break  # that was the whole pack
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"packing {dest} ended with {status}")
        n_crashes += 1
        whole(source, plan, dest)
        n_equal += snapshot(dest) == want
        shutil.rmtree(dest)
    return {"crashes": n_crashes, "equal": n_equal}


def main() -> None:
    torch.set_num_threads(1)
    mode, source, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    tiny = Tiny(**json.loads((source / "tiny.json").read_text()))
    tiny = Tiny(tiny.hidden, tiny.inter, tiny.n_experts, tuple(tiny.layers))
    plan = plan_of(tiny, source)
    result = (
        kill(source, plan, work, int(sys.argv[4])) if mode == "kill" else cut(source, plan, work)
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
