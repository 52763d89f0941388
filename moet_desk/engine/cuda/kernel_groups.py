"""Where the time of a step goes: kernels seen by the profiler, summed by what they do.

Owns the table of kernels. The router's product runs in the kernel of all dense products and counts
there. Called by the thread that measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

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
"""The rest of a step: gaps between kernels, launching, copying out."""

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


def kernel_times(run: Callable[[], object]) -> list[tuple[str, float]]:
    """(name, microseconds) of everything that ran on the CUDA device during `run`.

    Empty where the driver does not let programs be traced.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.elapsed_us())
        for event in seen.events() or ()
        if event.device_type.name == "CUDA"
    ]


def by_kernel(
    times: Iterable[tuple[str, float]], *, n_steps: int
) -> dict[str, tuple[float, float]]:
    """Launches and milliseconds per step by kernel, the longest first; arguments as `split`. All
    of torch's elementwise kernels, whose names are their types, count as one.
    """
    found: dict[str, tuple[float, float]] = {}
    for name, us in times:
        kernel = "elementwise of torch" if name.startswith("void at::native") else name
        launches, ms = found.get(kernel, (0.0, 0.0))
        found[kernel] = launches + 1 / n_steps, ms + us / (1e3 * n_steps)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def split(times: Iterable[tuple[str, float]], *, n_steps: int, step_ms: float) -> dict[str, float]:
    """Milliseconds per step by group, and what of `step_ms` is left.

    Args:
        times: (kernel, microseconds) of `n_steps` steps together.
        n_steps: how many.
        step_ms: a whole step, measured without the profiler, which slows launches down.
    """
    by_group = {group.value: 0.0 for group in Group}
    for kernel, us in times:
        by_group[group_of(kernel).value] += us / (1e3 * n_steps)
    return {**by_group, GAPS: max(0.0, step_ms - sum(by_group.values()))}
