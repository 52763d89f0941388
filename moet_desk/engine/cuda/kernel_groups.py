"""Where the time of a step goes: kernels seen by the profiler, summed by what they do.

Owns the table of kernels. The router's product runs in the kernel of all dense products and counts
there. Called by the thread that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Group(Enum):
    """What part of a step a kernel belongs to."""

    ATTENTION = "attention"
    DENSE = "dense"
    ROUTER = "router_lookup"
    FETCH = "fetch"
    EXPERTS = "experts"
    SAMPLING = "sampling"
    OTHER = "norms_other"


GAPS = "gaps_host"
"""The rest of a step, in which no kernel ran: launching, gaps, copying out."""

GROUP_OF_KERNEL: Mapping[str, Group] = {
    "_mla_prepare_kernel": Group.ATTENTION,
    "_rotate_queries_kernel": Group.ATTENTION,
    "_mla_decode_kernel": Group.ATTENTION,
    "_mla_write_kernel": Group.ATTENTION,
    "_gqa_write_kernel": Group.ATTENTION,
    "_gqa_prepare_kernel": Group.ATTENTION,
    "_gqa_decode_kernel": Group.ATTENTION,
    "_join_kernel": Group.ATTENTION,
    "_join_back_kernel": Group.ATTENTION,
    "_prepare_kernel": Group.ATTENTION,  # of an indexer, as the next two
    "_scores_kernel": Group.ATTENTION,
    "_choose_kernel": Group.ATTENTION,
    "_conv_kernel": Group.ATTENTION,
    "_delta_step_kernel": Group.ATTENTION,
    "_gated_norm_kernel": Group.ATTENTION,
    "_places_kernel": Group.ATTENTION,  # of pooled attention, as those up to the next comment
    "_list_kernel": Group.ATTENTION,
    "_pool_kernel": Group.ATTENTION,
    "_pool_run_kernel": Group.ATTENTION,
    "_entry_kernel": Group.ATTENTION,
    "_key_kernel": Group.ATTENTION,
    "_query_kernel": Group.ATTENTION,
    "_score_kernel": Group.ATTENTION,
    "_shared_decode_kernel": Group.ATTENTION,
    "_sliced_decode_kernel": Group.ATTENTION,
    "_advance_kernel": Group.OTHER,  # of streams, as the next three
    "_enter_kernel": Group.OTHER,
    "_many_kernel": Group.OTHER,
    "_after_kernel": Group.OTHER,
    "_gate_kernel": Group.OTHER,
    "_gemv_kernel": Group.DENSE,
    "_swiglu_gemv_kernel": Group.DENSE,
    "_absorb_kernel": Group.DENSE,
    "_route_kernel": Group.ROUTER,
    "_named_kernel": Group.ROUTER,
    "_lookup_kernel": Group.ROUTER,
    "_routed_lookup_kernel": Group.ROUTER,
    "_fetch_kernel": Group.FETCH,
    "_routed_fetch_kernel": Group.FETCH,
    "_post_kernel": Group.FETCH,
    "_wait_kernel": Group.FETCH,
    "_gate_up_kernel": Group.EXPERTS,
    "_quantize_kernel": Group.EXPERTS,
    "_down_kernel": Group.EXPERTS,
    "_combine_kernel": Group.EXPERTS,
    "_scan_kernel": Group.SAMPLING,
    "_settle_kernel": Group.SAMPLING,
    "_weigh_kernel": Group.SAMPLING,
    "_pass_kernel": Group.SAMPLING,
    "_finish_kernel": Group.SAMPLING,
    "_rms_norm_kernel": Group.OTHER,
    "_norm_kernel": Group.OTHER,  # with int8 activations
    "_embed_kernel": Group.OTHER,
}
"""Triton's name of a kernel -> its group. A kernel that is not here counts as other."""


def group_of(kernel: str) -> Group:
    """The group of a kernel by the name that the profiler gives it."""
    known = GROUP_OF_KERNEL.get(kernel)
    if known is not None:
        return known
    # some versions of Triton append how the arguments were specialised
    ours = (name for name in GROUP_OF_KERNEL if kernel.startswith(name + "_"))
    found = max(ours, key=len, default=None)
    return Group.OTHER if found is None else GROUP_OF_KERNEL[found]


class KernelRun(NamedTuple):
    """One kernel or copy that ran on the card, in microseconds of the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What a kernel takes of a step.

    Attributes:
        launches: per step.
        ms: of all its launches together.
        share_ms: of the step's time: an instant in which n kernels run is 1/n of it for each.
        before_ms: in which nothing ran until one of its launches began.
    """

    launches: float
    ms: float
    share_ms: float
    before_ms: float


def kernel_runs(run: Callable[[], object]) -> list[KernelRun]:
    """Everything that ran on the CUDA device during `run`, in the order of its beginnings.

    Empty where the driver does not let programs be traced.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    ranges = (
        (event.name, event.time_range)
        for event in seen.events() or ()
        if event.device_type.name == "CUDA"
    )
    runs = [KernelRun(name, at.start, at.end) for name, at in ranges]
    return sorted(runs, key=lambda each: (each.start_us, each.end_us))


def by_kernel(runs: Sequence[KernelRun], *, n_steps: int) -> dict[str, KernelTime]:
    """What each kernel takes of a step, the longest first. All of torch's elementwise kernels,
    whose names are their types, count as one.

    Args:
        runs: of `n_steps` steps together, by their beginnings.
        n_steps: how many.
    """
    found: dict[str, list[float]] = {}
    for run, (share, before) in zip(runs, shares_of(runs), strict=True):
        torchs = run.name.startswith("void at::native")
        sums = found.setdefault("elementwise of torch" if torchs else run.name, [0.0] * 4)
        for i, more in enumerate((1.0, run.end_us - run.start_us, share, before)):
            sums[i] += more / n_steps
    times = {
        name: KernelTime(launches, *(us / 1e3 for us in of_it))
        for name, (launches, *of_it) in found.items()
    }
    return dict(sorted(times.items(), key=lambda item: -item[1].ms))


def shares_of(runs: Sequence[KernelRun]) -> list[tuple[float, float]]:
    """Microseconds that are each run's when an instant is shared by all that run then, and those in
    which nothing ran before it.

    Args:
        runs: by their beginnings.
    """
    shares, before = [0.0] * len(runs), [0.0] * len(runs)
    ends = sorted(range(len(runs)), key=lambda i: runs[i].end_us)
    running: set[int] = set()
    now, i, j = (runs[0].start_us if runs else 0.0), 0, 0
    while j < len(runs):
        begins = i < len(runs) and runs[i].start_us <= runs[ends[j]].end_us
        at = runs[i].start_us if begins else runs[ends[j]].end_us
        for each in running:
            shares[each] += (at - now) / len(running)
        if begins:
            if not running:
                before[i] = at - now
            running.add(i)
            i += 1
        else:
            running.discard(ends[j])
            j += 1
        now = at
    return list(zip(shares, before, strict=True))


def split(runs: Sequence[KernelRun], *, n_steps: int, step_ms: float) -> dict[str, float]:
    """Milliseconds per step by group, and what of `step_ms` is left in which nothing ran. Groups
    together may take more than a step, because kernels run side by side.

    Args:
        runs: of `n_steps` steps together, by their beginnings.
        n_steps: how many.
        step_ms: a whole step, measured without the profiler, which slows launches down.
    """
    by_group = {group.value: 0.0 for group in Group}
    busy_ms = 0.0
    for run, (share, _) in zip(runs, shares_of(runs), strict=True):
        by_group[group_of(run.name).value] += (run.end_us - run.start_us) / (1e3 * n_steps)
        busy_ms += share / (1e3 * n_steps)
    return {**by_group, GAPS: max(0.0, step_ms - busy_ms)}
