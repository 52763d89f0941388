"""Compiling candidates of kernels in processes of their own, which touch no card.

Owns what such a process does instead of launching, and whose answers are in. A script measures what
is compiled while the rest still compiles, and stops in time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import Pool
from typing import Any, Protocol, TypeVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moet_desk.kernels.triton.compile import CompiledInfo, read_cubin

_Job = TypeVar("_Job")
Found = dict[str, list[Any]]  # tiles that passed, by kernel


class _Target:
    """A driver for compiling alone: of one card that nothing is launched on."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def only_compile(capability: int, modules: Sequence[str]) -> None:
    """From now on a launch of this process puts the kernel's code for `capability` (90, 120) into
    the cache and does no more, and tensors on the `DEVICE` of the modules have no memory.
    """
    torch.set_num_threads(1)
    for name in modules:
        vars(sys.modules[name])["DEVICE"] = torch.device("meta")
    triton.runtime.driver.set_active(_Target(capability))
    launch = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_it


def compilers(
    capability: int,
    modules: Sequence[str],
    *,
    begin: Callable[[int, Sequence[str]], None] = only_compile,
) -> Pool:
    """Processes that do so, on all cores but the one that measures; `begin` is called in each."""
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    context = multiprocessing.get_context("spawn")
    return context.Pool(workers, begin, (capability, tuple(modules)))


def newest(kernel: Any) -> CompiledInfo:
    """What the code takes that this process compiled last of a kernel."""
    made = next(reversed(kernel.device_caches[0][0].values()))
    return read_cubin(made.asm["cubin"], shared_bytes=int(made.metadata.shared))


class Answer(Protocol):
    """What a process will say of a candidate, such as `AsyncResult`."""

    def ready(self) -> bool: ...

    def get(self) -> bool: ...


Answers = Sequence[tuple[str, Any, Answer]]  # kernel, tile


def compiled(waiting: Mapping[_Job, Answers], *, until: float) -> Iterator[tuple[_Job, Found]]:
    """Each job once all of its candidates are compiled, with those that passed; ends in time."""
    left = dict(waiting)
    while left and time.monotonic() < until:
        job = next((j for j, parts in left.items() if all(p[2].ready() for p in parts)), None)
        if job is None:
            time.sleep(0.05)
        else:
            yield job, _passed(job, left.pop(job))


def _passed(job: Any, answers: Answers) -> Found:
    found: Found = {name: [] for name, _, _ in answers}
    for name, tile, answer in answers:
        try:
            if answer.get():
                found[name].append(tile)
        except Exception as problem:  # whatever a compiler refuses
            print(f"left out: {job} {name} {tile}: {problem!r}"[:200], file=sys.stderr)
    return found
