"""Missing rows into their slots: copies from the pinned arena, and asking the host for the others.

Owns the kernels between `cache.lookup` and the experts. With all rows in RAM a layer needs `fetch`
alone. With rows on disk: `post` (asks for those), `fetch` of the rows in RAM, `wait` (for the host,
bounded), `fetch` of the rows that came. The host's side is `kernels.mailbox`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.mailbox import MAILBOX, Answer
from moet_desk.kernels.triton.cache import MOST_PAIRS, GpuTables, LookupOutput
from moet_desk.kernels.triton.portable import PTX

TIMED_OUT = 1
"""Bit of the error word: the host did not answer in time."""

READ_FAILED = 2
"""Bit of the error word: the host could not read a row."""

WAIT_LIMIT_NS = 900_000_000
"""All waits of one step together; a kernel that runs for seconds hangs a card with a display."""

CHUNK_WORDS = 1024
"""4 KiB, the unit of row strides: 256 threads copy 16 bytes each."""

PROGRAMS = 132
"""Measured on an H200 (PCIe 5 x16): 46.7 GB/s for one row of 6.75 MiB, 50.5 for four; more programs
or larger chunks give no more, and an empty launch takes 1.3 us.
"""

_POLLS = 1 << 16  # bound of a wait where there is no clock (interpreter)

_POSTED, _LAYER, _PLANE = (tl.constexpr(x) for x in (MAILBOX.posted, MAILBOX.layer, MAILBOX.plane))
_N_ROWS, _N_KEPT = tl.constexpr(MAILBOX.n_rows), tl.constexpr(MAILBOX.n_kept)
_DONE, _STATUS = tl.constexpr(MAILBOX.done), tl.constexpr(MAILBOX.status)
_ROWS, _KEPT = tl.constexpr(MAILBOX.rows), tl.constexpr(MAILBOX.kept)
_PLACES, _DROPPED = tl.constexpr(MAILBOX.places), tl.constexpr(MAILBOX.dropped)
_READ = tl.constexpr(int(Answer.READ))
_TIMED_OUT, _READ_FAILED = tl.constexpr(TIMED_OUT), tl.constexpr(READ_FAILED)


@dataclass(frozen=True, slots=True)
class Arena:
    """Rows in pinned host memory that the device can read.

    Attributes:
        address: where place 0 begins, as the device sees it; a multiple of 4096.
        place_of: int32 [R] on the device, place of each row or -1. Changed by `wait` during a step
            and by the engine thread between steps.
        stride: bytes from one place to the next; a multiple of 4096.
    """

    address: int
    place_of: Tensor
    stride: int


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The device's side of one mailbox, and what a step keeps about it.

    Attributes:
        address: the pinned page, as the device sees it.
        sequence: int32 [1], number of the last request.
        late_n, late_row, late_slot: int32 [1], [P], [P]: rows of this layer that are on disk.
        waited: int64 [1]: nanoseconds that this step has waited; the post of its first rows (base,
            layer 0) sets it to 0.
        error: int32 [1], the step's error word; bits are added.
    """

    address: int
    sequence: Tensor
    late_n: Tensor
    late_row: Tensor
    late_slot: Tensor
    waited: Tensor
    error: Tensor

    @classmethod
    def at(cls, address: int, *, error: Tensor) -> Mailbox:
        """A mailbox on a pinned page that was never used."""

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=error.device)

        waited = torch.zeros(1, dtype=torch.int64, device=error.device)
        return cls(address, ints(1), ints(1), ints(MOST_PAIRS), ints(MOST_PAIRS), waited, error)


@triton.jit
def _load_acquire(pointer, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        return tl.load(pointer, volatile=True)


@triton.jit
def _store_release(pointer, value, PTX: tl.constexpr):
    """Publish a word to the host, and with it all that was stored before the last barrier."""
    if PTX:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [pointer, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointer, value)


@triton.jit
def _now_ns(PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.full([], 0, tl.int64)


@triton.jit
def copy_rows(
    pool, arena, place_of, n_rows, miss_row, miss_slot, i, programs,
    STRIDE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy chunks i, i + programs, ... of the missing rows."""
    CHUNKS: tl.constexpr = STRIDE // (4 * WORDS)
    total = n_rows * CHUNKS
    lanes = tl.arange(0, WORDS)
    while i < total:
        m = i // CHUNKS
        place = tl.load(place_of + tl.load(miss_row + m))
        if place >= 0:
            at = (i % CHUNKS) * (4 * WORDS)
            source = arena.to(tl.int64) + place.to(tl.int64) * STRIDE + at
            source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
            target = pool + tl.load(miss_slot + m).to(tl.int64) * STRIDE + at
            target = target.to(tl.pointer_type(tl.int32))
            tl.store(target + lanes, tl.load(source + lanes))
        i += programs


@triton.jit(do_not_specialize=["arena"])
def _fetch_kernel(
    pool, arena, place_of, miss_n, miss_row, miss_slot, STRIDE: tl.constexpr, WORDS: tl.constexpr
):
    copy_rows(
        pool, arena, place_of, tl.load(miss_n), miss_row, miss_slot,
        tl.program_id(0), tl.num_programs(0), STRIDE, WORDS,
    )  # fmt: skip


@triton.jit
def _load_of_others(pointer, PTX: tl.constexpr):
    """A word that another program of the launch publishes, and with it what was stored before."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(pointer, volatile=True)


@triton.jit
def copy_when_known(
    pool, arena, place_of, miss_n, miss_row, miss_slot, waiting, i, programs,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A share of `fetch` in the launch of the look-up, of whose programs the first looks up. Lower
    programs begin first, so it runs, or has run.
    """
    known = tl.load(waiting, volatile=True)
    while known == 0:
        known = tl.load(waiting, volatile=True)
    if known < 0:
        known = _load_of_others(waiting, PTX)
    tl.atomic_add(waiting, tl.where(known < 0, 1, -1), sem="relaxed")
    if known < 0:
        copy_rows(
            pool, arena, place_of, tl.load(miss_n), miss_row, miss_slot, i, programs, STRIDE, WORDS
        )


@triton.jit(do_not_specialize=["box", "layer"])
def _post_kernel(
    box, sequence, late_n, late_row, late_slot, waited, error, place_of,
    miss_n, miss_row, miss_slot, layer,
    PLANE: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    if layer + PLANE == 0:  # base rows of layer 0: a step begins
        tl.store(waited, 0)
    i = tl.arange(0, PAIRS)
    missing = i < tl.load(miss_n)
    row = tl.load(miss_row + i, mask=missing, other=0)
    place = tl.load(place_of + row, mask=missing, other=0)
    failed = tl.load(error)
    # Once a step gave up, the host may be reading other rows into places that are known here.
    here = (place >= 0) & (failed == 0)
    kept = (missing & here).to(tl.int32)
    late = missing.to(tl.int32) - kept
    at = tl.cumsum(late, 0) - 1
    n_late = tl.sum(late, 0)
    tl.store(late_row + at, row, mask=late > 0)
    tl.store(late_slot + at, tl.load(miss_slot + i, mask=late > 0), mask=late > 0)
    tl.store(late_n, n_late)
    if (n_late > 0) & (failed == 0):
        words = box.to(tl.int64).to(tl.pointer_type(tl.int32))
        tl.store(words + _ROWS + at, row, mask=late > 0)
        tl.store(words + _KEPT + tl.cumsum(kept, 0) - 1, row, mask=kept > 0)
        tl.store(words + _N_ROWS, n_late)
        tl.store(words + _N_KEPT, tl.sum(kept, 0))
        tl.store(words + _LAYER, layer)
        tl.store(words + _PLANE, PLANE)
        number = tl.load(sequence) + 1
        tl.debug_barrier()
        tl.store(sequence, number)
        _store_release(words + _POSTED, number, PTX)


@triton.jit
def _answered(words, number, waited, LIMIT: tl.constexpr, POLLS: tl.constexpr, PTX: tl.constexpr):
    """Spin until the host has answered `number` or this step has waited long enough."""
    before = tl.load(waited)
    began = _now_ns(PTX)
    done = _load_acquire(words + _DONE, PTX)
    spent = before
    polls = 0
    while (done - number < 0) & (spent < LIMIT) & (polls < POLLS):
        done = _load_acquire(words + _DONE, PTX)
        spent = before + _now_ns(PTX) - began
        if not PTX:
            polls += 1
    tl.debug_barrier()
    tl.store(waited, spent)
    return done - number >= 0


@triton.jit
def _give_up(late_row, late_slot, n_late, slot_of, owner, last_used, free, n_free):
    """Empty the slots whose rows will not come, so that no later look-up takes them for hits."""
    top = tl.load(n_free)
    m = 0
    while m < n_late:
        slot = tl.load(late_slot + m)
        tl.store(slot_of + tl.load(late_row + m), -1)
        tl.store(owner + slot, -1)
        tl.store(last_used + slot, -1)
        tl.store(free + top + m, slot)
        m += 1
    tl.debug_barrier()
    tl.store(n_free, top + n_late)


@triton.jit(do_not_specialize=["box"])
def _wait_kernel(
    box, sequence, late_n, late_row, late_slot, waited, error, place_of,
    slot_of, owner, last_used, free, n_free,
    LIMIT: tl.constexpr, POLLS: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    n_late = tl.load(late_n)
    if n_late > 0:
        words = box.to(tl.int64).to(tl.pointer_type(tl.int32))
        failed = tl.load(error)
        if failed == 0:
            if not _answered(words, tl.load(sequence), waited, LIMIT, POLLS, PTX):
                failed = _TIMED_OUT
            elif tl.load(words + _STATUS, volatile=True) != _READ:
                failed = _READ_FAILED
        tl.debug_barrier()
        if failed == 0:
            i = tl.arange(0, PAIRS)
            here = i < n_late
            dropped = tl.load(words + _DROPPED + i, mask=here, other=-1, volatile=True)
            place = tl.load(words + _PLACES + i, mask=here, other=-1, volatile=True)
            tl.store(place_of + dropped, -1, mask=here & (dropped >= 0))
            tl.debug_barrier()
            tl.store(place_of + tl.load(late_row + i, mask=here, other=0), place, mask=here)
        else:
            _give_up(late_row, late_slot, n_late, slot_of, owner, last_used, free, n_free)
            tl.store(late_n, 0)
            tl.store(error, failed)


def fetch(
    pool: Tensor,
    arena: Arena,
    miss_n: Tensor,
    *,
    miss_row: Tensor,
    miss_slot: Tensor,
    programs: int = PROGRAMS,
) -> None:
    """Copy missing rows that are in the arena into their slots; rows on disk are passed over.

    Shapes:
        pool uint8 [S, stride], base or fine like the arena; miss_n int32 [1],
        miss_row, miss_slot int32 [P]
    """
    _fetch_kernel[(programs,)](
        pool, arena.address, arena.place_of, miss_n, miss_row, miss_slot,
        arena.stride, CHUNK_WORDS, num_warps=8,
    )  # fmt: skip


def post(
    mailbox: Mailbox, arena: Arena, misses: LookupOutput, *, layer: int, fine: bool = False
) -> None:
    """List the missing rows that are on disk and, if there are any, ask the host for them.

    The base rows of layer 0 begin a step: its time to wait starts anew. In a step that failed, all
    missing rows are listed and nobody is asked: `wait` empties their slots, whatever `fetch` put
    there.
    """
    _post_kernel[(1,)](
        mailbox.address, mailbox.sequence, mailbox.late_n, mailbox.late_row, mailbox.late_slot,
        mailbox.waited, mailbox.error, arena.place_of, misses.miss_n, misses.miss_row,
        misses.miss_slot, layer,
        int(fine), triton.next_power_of_2(misses.miss_row.shape[0]), PTX, num_warps=1,
    )  # fmt: skip


def wait(
    mailbox: Mailbox, arena: Arena, tables: GpuTables, *, limit_ns: int = WAIT_LIMIT_NS
) -> None:
    """Wait for the rows that `post` asked for and note their places, so that `fetch` of `late_row`
    finds them.

    If the host cannot read them or the step has waited too long, the error word gets a bit, the
    rows' slots become free again and `late_n` 0; later waits of the step then do not spin. The host
    may still be reading into places whose change the device did not note: the step's later layers
    keep no row that was fetched from the arena, and before the next step the host writes
    `arena.place_of` anew.
    """
    _wait_kernel[(1,)](
        mailbox.address, mailbox.sequence, mailbox.late_n, mailbox.late_row, mailbox.late_slot,
        mailbox.waited, mailbox.error, arena.place_of,
        tables.slot_of, tables.owner, tables.last_used, tables.free, tables.n_free,
        limit_ns, _POLLS, MOST_PAIRS, PTX, num_warps=1,
    )  # fmt: skip
