"""Median time of a launch inside a CUDA graph, printed as one JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

DEVICE = torch.device("cuda")

_TARGET_US = 400.0
"""A graph holds about this much work, so that a replay's own cost does not count."""


def report(
    kernel: str,
    calls: Sequence[Callable[[], object]],
    *,
    moved: int | None = None,
    flops: int | None = None,
    repeats: int = 15,
    **facts: Any,
) -> float:
    """Print and return microseconds per call; the calls run in turn.

    Args:
        kernel: its name.
        calls: the same work on different data.
        moved: bytes that one call must read and write.
        flops: operations of one call that count.
        repeats: graph replays.
        facts: further fields of the line.
    """
    us = per_call_us(calls, repeats=repeats)
    line: dict[str, Any] = {"kernel": kernel, **facts, "us": round(us, 2)}
    if moved is not None:
        line |= {"bytes": moved, "gb_per_s": round(moved / us / 1e3, 1)}
    if flops is not None:
        line["tflops"] = round(flops / us / 1e6, 1)
    print(json.dumps(line), flush=True)
    return us


def per_call_us(calls: Sequence[Callable[[], object]], *, repeats: int = 15) -> float:
    """Median microseconds per call."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    once = replayed_us(captured(calls), 3) / len(calls)
    rounds = max(1, min(64, round(_TARGET_US / (once * len(calls)))))
    graph = captured(list(calls) * rounds)
    return replayed_us(graph, repeats) / (rounds * len(calls))


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls as one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replayed_us(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Median microseconds of a graph."""
    graph.replay()
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3)
    return median(times)
