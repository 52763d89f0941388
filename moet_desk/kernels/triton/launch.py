"""Launches that begin while the one before them still runs (programmatic dependent launch, SM90).

A step is hundreds of short launches. The way of each onto the card, its index arithmetic and its
first look at the weights can overlap the tail of its predecessor. The order of memory accesses
stays as it was, by one rule: every program of every kernel in a chain waits for its predecessor's
end before it touches anything that a kernel of the step writes or reads. The predecessor had waited
for its own in the same way, so it does not matter how far back a buffer was used. Before the wait a
kernel may read only what nobody writes during a step: dense weights and norms' weights, never the
experts' slots.
"""

from __future__ import annotations

from enum import Enum

import torch
import triton
import triton.language as tl

BEGIN_EARLY: bool = False
"""What steps do unless told otherwise; `bench/gpu_pdl.py` measures both."""

_WAIT = tl.constexpr("griddepcontrol.wait; mov.b64 $0, $1;")


class Chain(Enum):
    """How a launch stands to its neighbours in the stream.

    OFF: it waits for all before it, and what follows waits for it.
    FIRST: likewise, but a NEXT behind it may begin early. For what stands behind a copy or a join
        of streams: CUDA promises overlap between two kernels of one stream and nothing more.
    NEXT: it may begin early. The operation before it in its stream must be a kernel; one that is
        OFF simply lets nothing begin early.
    """

    OFF = "off"
    FIRST = "first"
    NEXT = "next"

    @property
    def first(self) -> Chain:
        """The same chain where nothing may overlap what was before."""
        return Chain.OFF if self is Chain.OFF else Chain.FIRST

    @property
    def then(self) -> Chain:
        """How the launch behind this one continues the chain."""
        return Chain.OFF if self is Chain.OFF else Chain.NEXT

    @property
    def options(self) -> dict[str, bool]:
        """What a kernel with an argument PDL is launched with."""
        if self is Chain.OFF:
            return {}
        return {"PDL": True, "launch_pdl": self is Chain.NEXT}


def chain_on(device: torch.device, *, enabled: bool) -> Chain:
    """How launches follow each other on a device: one of SM90 or later can overlap them."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return Chain.NEXT if enabled and able else Chain.OFF


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next launch onto the card as soon as all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Wait until the launch before this one has ended and all that it wrote is seen here."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def behind_last(pointer, PDL: tl.constexpr):
    """`wait_for_last`, and the float32 pointer as it then is.

    For loads in PTX that are marked as pure: nothing but the address keeps them behind the wait.
    """
    if PDL:
        address = tl.inline_asm_elementwise(
            _WAIT, "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
        pointer = address.to(tl.pointer_type(tl.float32))
    return pointer


@triton.jit
def follow(PDL: tl.constexpr):
    """`let_next_begin` and `wait_for_last`, for kernels with nothing to do in between."""
    let_next_begin(PDL)
    wait_for_last(PDL)
