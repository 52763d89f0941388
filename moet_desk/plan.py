"""The planner: how a model is spread over the tiers of a machine. Pure; no clock, disk or device.

On a CPU the pool is RAM too: a slot holds a row expanded to float32, 14 times the 2-bit row. So
packed rows come first (they save a disk read of milliseconds), expanded slots take what is left
(they save a fraction of a millisecond of expanding).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moet_desk.errors import fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.units import GIB, MIB, show_memory

KV_PAGE_TOKENS = 64
PREFILL_CHUNK = 256
WORK_BYTES = 256 * MIB
"""Activations, logits and the interpreter's own growth while serving."""


F32_KV_SHARE = 1 / 16
"""KV is kept in float32 on a CPU while it takes no more of the RAM than this: no conversion per
step and no rounding. Larger contexts use bfloat16.
"""


KV_SHARE = 1 / 8
"""Most of the budget that KV may take when nobody fixed a context: a model's own context of a
million tokens would leave nothing for experts.
"""

LEAST_CONTEXT = 4096
"""Tokens of a context below which the planner does not go by itself."""

RAM_SHARE = 0.7
"""Part of the available RAM the planner may use; the rest stays with the user's other programs."""

VRAM_SHARE = 0.9
"""Part of a card's free memory the planner may use; the rest stays with the display."""


def ram_budget(available: int) -> int:
    """Bytes the tiers may take of RAM, when the user did not say."""
    return int(RAM_SHARE * available)


PREFIX_SHARE = 1 / 32
MOST_PREFIX_BYTES = 4 * GIB
"""Part of the RAM budget that keeps what was read of prompts, and the most it takes."""


def split_ram(budget: int, prefix_bytes: int | None) -> tuple[int, int]:
    """RAM for the tiers, and for what was read of prompts; None leaves that to us."""
    if prefix_bytes is None:
        prefix_bytes = min(int(PREFIX_SHARE * budget), MOST_PREFIX_BYTES)
    return max(0, budget - prefix_bytes), prefix_bytes


def pinned_budget(available: int, total: int, *, is_wsl: bool) -> int:
    """Bytes of RAM that may be pinned for a card, when the user did not say.

    WSL lets about half of the RAM be pinned, whatever is free.
    """
    budget = ram_budget(available)
    return min(budget, total // 2) if is_wsl else budget


def vram_budget(free: int, limit: int | None = None) -> int:
    """Bytes the tiers may take of a card's memory: the user's limit, never more than is free."""
    return int(VRAM_SHARE * free) if limit is None else min(limit, free)


def vram_kept(free: int, budget: int) -> int:
    """Bytes of a card that a plan with this budget leaves free on purpose. A lower limit leaves
    more, but not so that it stays free.
    """
    return min(free - budget, free - vram_budget(free))


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """A number of tokens that a device can read at once, and the memory this takes there; with
    `ahead_bytes` more for experts on their way it reads them faster.
    """

    tokens: int
    n_bytes: int
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers that keep their last entries alone.

    Attributes:
        tokens: of their window; 0: there are none.
        token_bytes: KV of a token in all of them.
        most_rows: of a prompt chunk that are stored before they look back; 0: the whole chunk.
    """

    tokens: int = 0
    token_bytes: int = 0
    most_rows: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes the planner needs, in bytes and counts.

    Attributes:
        top_k: experts that a token may need of a layer.
        mean_used: those that it needs on average; None: as many.
    """

    n_rows: int  # experts of the layers that run
    top_k: int
    base_stride: int
    fine_stride: int
    slot_bytes: int
    dense_bytes: int
    kv_token_bytes: int  # of all layers that keep every token
    model_context: int
    chunks: tuple[ChunkSize, ...] = ()  # of a device, the largest first
    state_bytes: int = 0  # of a request, whatever its length
    windows: Windows = Windows()
    mean_used: float | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed; None leaves it to the planner. These are constraints, never switches."""

    context: int | None = None
    base_slots: int | None = None
    fine_slots: int | None = None
    arena_rows: int | None = None
    prefill_chunk: int | None = None
    max_running: int = 4


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The sizes of every tier. `bytes_total` adds up what they take, the dense stack included;
    `ring_pages` are a request's in layers with a window, `ahead_bytes` as in `ChunkSize`.
    """

    context: int
    kv_pages: int
    base_slots: int
    fine_slots: int
    arena_base_rows: int
    arena_fine_rows: int
    prefill_chunk: int
    bytes_total: int
    ring_pages: int = 0
    ahead_bytes: int = 0


def kv_tokens(wishes: Wishes, model_context: int) -> int:
    """Tokens of KV that all requests together can come to need, whole pages."""
    context = wishes.context or model_context
    return wishes.max_running * -(-context // KV_PAGE_TOKENS) * KV_PAGE_TOKENS


def with_context(wishes: Wishes, model_context: int, token_bytes: int, budget: int) -> Wishes:
    """The wishes with a context: the user's, else the model's, else a power of two.

    Args:
        wishes: of the user.
        model_context: the longest the model allows, in tokens.
        token_bytes: KV of one token, all layers together.
        budget: bytes of the memory that KV lies in.
    """
    if wishes.context is not None:
        return wishes
    most = int(KV_SHARE * budget) // (token_bytes * wishes.max_running)
    if most >= model_context:
        return replace(wishes, context=model_context)
    context = max(LEAST_CONTEXT, 1 << max(0, most.bit_length() - 1))
    return replace(wishes, context=min(context, model_context))


def contexts(wishes: Wishes, model_context: int, token_bytes: int, budget: int) -> Iterator[Wishes]:
    """The wishes with a context, and if nobody fixed one with shorter ones, down to the least that
    the planner takes by itself. Args as `with_context`.
    """
    chosen = with_context(wishes, model_context, token_bytes, budget)
    yield chosen
    context = chosen.context or model_context
    while wishes.context is None and context > LEAST_CONTEXT:
        context = max(LEAST_CONTEXT, 1 << (context - 1).bit_length() - 1)
        yield replace(wishes, context=context)


def choose_kv_format(f32_token_bytes: int, n_tokens: int, ram_bytes: int) -> KvFormat:
    """The storage format of KV when the user leaves it to us, for a CPU."""
    fits = f32_token_bytes * n_tokens <= F32_KV_SHARE * ram_bytes
    return KvFormat.F32 if fits else KvFormat.BF16


def _context(shape: ModelShape, wishes: Wishes) -> int:
    if wishes.context is None:
        return shape.model_context
    if wishes.context > shape.model_context:
        raise fail("MD-PLAN-02", want=wishes.context, largest=shape.model_context)
    return wishes.context


def _kv_bytes(shape: ModelShape, wishes: Wishes, pages: int, ring_pages: int) -> int:
    """KV and states of all requests together."""
    kv = pages * KV_PAGE_TOKENS * shape.kv_token_bytes
    ring = ring_pages * KV_PAGE_TOKENS * shape.windows.token_bytes
    return kv + wishes.max_running * (ring + shape.state_bytes)


def ring_pages(windows: Windows, context: int, chunk: int) -> int:
    """Pages of a request in a layer with a window: for what its oldest row still sees when the last
    one is stored, wherever in a page that begins; never more than the context has.
    """
    if not windows.tokens:
        return 0
    rows = max(STEP_ROWS, min(chunk, windows.most_rows or chunk))
    return min(-(-(windows.tokens + rows) // KV_PAGE_TOKENS) + 1, -(-context // KV_PAGE_TOKENS))


def _least(name: int | None, least: int) -> None:
    if name is not None and name < least:
        raise fail("MD-PLAN-03", want=name, least=least)


def plan_tiers(shape: ModelShape, ram_bytes: int, wishes: Wishes) -> TierPlan:
    """Size the tiers for a CPU with `ram_bytes` to use.

    Raises:
        MoetError: MD-PLAN-02 context longer than the model's, MD-PLAN-03 a pool smaller than one
            token needs, MD-RAM-01 the least of everything does not fit.
    """
    _least(wishes.base_slots, shape.top_k)
    _least(wishes.fine_slots, shape.top_k)
    context = _context(shape, wishes)
    pages = kv_tokens(wishes, shape.model_context) // KV_PAGE_TOKENS
    chunk = wishes.prefill_chunk or PREFILL_CHUNK
    ring = ring_pages(shape.windows, context, chunk)
    used = shape.dense_bytes + WORK_BYTES + _kv_bytes(shape, wishes, pages, ring)
    used += shape.slot_bytes  # the staging slot of prefill

    full = False

    def take(wanted: int, each: int, fixed: int | None, least: int) -> int:
        """As many as fit of `wanted`; exactly `fixed` if the user said so.

        Once something did not get all it wanted, what comes later gets nothing: crumbs would make
        a later tier smaller when there is a little more RAM.
        """
        nonlocal used, full
        fit = 0 if full else max(0, ram_bytes - used) // each
        count = min(wanted, fit) if fixed is None else min(fixed, wanted)
        full = full or (fixed is None and count < wanted)
        count = max(count, least)
        used += count * each
        return count

    base_slots = take(shape.top_k, shape.slot_bytes, shape.top_k, shape.top_k)
    fine_slots = take(shape.top_k, shape.slot_bytes, shape.top_k, shape.top_k)
    arena_base = take(shape.n_rows, shape.base_stride, wishes.arena_rows, 0)
    arena_fine = take(shape.n_rows, shape.fine_stride, wishes.arena_rows, 0)
    more = None if wishes.base_slots is None else wishes.base_slots - base_slots
    base_slots += take(shape.n_rows - base_slots, shape.slot_bytes, more, 0)
    more = None if wishes.fine_slots is None else wishes.fine_slots - fine_slots
    fine_slots += take(shape.n_rows - fine_slots, shape.slot_bytes, more, 0)
    if used > ram_bytes:
        raise fail("MD-RAM-01", need=show_memory(used), have=show_memory(ram_bytes))
    return TierPlan(
        context, pages, base_slots, fine_slots, arena_base, arena_fine, chunk, bytes_total=used,
        ring_pages=ring,
    )  # fmt: skip


STEP_ROWS = 8
"""Rows of the widest step on a device: its experts of one layer must all have slots at once."""


def least_slots(top_k: int, n_rows: int) -> int:
    """Slots of each plane without which a device cannot compute a step."""
    return min(STEP_ROWS * top_k, n_rows)


CHUNK_SHARE = 1 / 12
"""Most of the VRAM that reading prompts may take: a larger chunk brings every expert less often,
but its memory is lost to the slots that decode lives on.
"""


ALLOCATOR_SHARE = 1 / 20
"""Of dense weights, what a device's allocator loses by giving memory in pieces of 2 and 20 MiB. Its
rules, played through for the catalogue's shapes, lose 0 to 5 %: of DeepSeek-V3.1 0.7 GiB.
"""


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Bytes the tiers may take on a device and in pinned RAM."""

    vram: int
    ram: int


def device_work(dense_bytes: int) -> int:
    """Bytes of a device beside tiers: activations, graphs, and what its allocator cannot use."""
    return WORK_BYTES + int(ALLOCATOR_SHARE * dense_bytes)


def plan_device_tiers(shape: ModelShape, budget: DeviceBudget, wishes: Wishes) -> TierPlan:
    """Size the tiers of a CUDA device: slots hold rows as they lie on disk, the arena is pinned.

    VRAM: dense stack, KV and work first, then 2-bit slots up to all rows, then fine slots. RAM:
    base rows up to all of them, then fine rows. `shape.dense_bytes` is the stack as shipped;
    `shape.slot_bytes` is not used.

    Raises:
        MoetError: as `plan_tiers`.
    """
    least = least_slots(shape.top_k, shape.n_rows)
    _least(wishes.base_slots, least)
    _least(wishes.fine_slots, least)
    context = _context(shape, wishes)
    pages = kv_tokens(wishes, shape.model_context) // KV_PAGE_TOKENS
    chunk = _chunk(shape.chunks, wishes.prefill_chunk, budget.vram)
    ring = ring_pages(shape.windows, context, chunk.tokens)
    used = shape.dense_bytes + device_work(shape.dense_bytes)
    used += _kv_bytes(shape, wishes, pages, ring)
    used += least * (shape.base_stride + shape.fine_stride)
    used += chunk.n_bytes
    if used > budget.vram:
        raise fail("MD-GPU-05", need=show_memory(used), have=show_memory(budget.vram))
    base_rows, fine_rows = _arena(shape, wishes, least, budget.ram)
    ahead = 0
    if wishes.base_slots is None and min(base_rows, fine_rows) == shape.n_rows:
        ahead = _ahead(chunk, budget.vram, budget.vram - used, shape.n_rows * shape.base_stride)
        used += ahead
    base_slots, fine_slots = _slots(shape, wishes, least, budget.vram - used)
    slots = base_slots * shape.base_stride + fine_slots * shape.fine_stride
    fixed = used - least * (shape.base_stride + shape.fine_stride)
    if fixed + slots > budget.vram:
        need, have = show_memory(fixed + slots), show_memory(budget.vram)
        raise fail("MD-GPU-05", need=need, have=have)
    arena_bytes = base_rows * shape.base_stride + fine_rows * shape.fine_stride
    return TierPlan(
        context, pages, base_slots, fine_slots, base_rows, fine_rows, chunk.tokens,
        bytes_total=fixed + slots + arena_bytes, ring_pages=ring, ahead_bytes=ahead,
    )  # fmt: skip


def _slots(shape: ModelShape, wishes: Wishes, least: int, spare: int) -> tuple[int, int]:
    """2-bit and FP4 slots; `spare` bytes are left when both have the least of them.

    FP4 slots grow only when every row has a 2-bit slot: crumbs would make them fewer when there is
    a little more VRAM.
    """
    base = wishes.base_slots
    if base is None:
        base = least + min(shape.n_rows - least, spare // shape.base_stride)
    spare = max(0, spare - (base - least) * shape.base_stride)
    if wishes.base_slots is None and base < shape.n_rows:
        spare = 0
    if wishes.fine_slots is not None:
        return base, wishes.fine_slots
    return base, least + min(shape.n_rows - least, spare // shape.fine_stride)


def _arena(shape: ModelShape, wishes: Wishes, least: int, ram: int) -> tuple[int, int]:
    """Rows of both planes in RAM: the least of both, then base rows, then fine rows.

    Raises:
        MoetError: MD-RAM-01 the least, or what was wished, does not fit.
    """
    least = min(2 * least, shape.n_rows)  # a layer's rows while its hits are being copied
    spare = ram - least * (shape.base_stride + shape.fine_stride)
    base = least + min(shape.n_rows - least, max(0, spare) // shape.base_stride)
    spare -= (base - least) * shape.base_stride
    fine = least
    if base == shape.n_rows:
        fine += min(shape.n_rows - least, max(0, spare) // shape.fine_stride)
    if wishes.arena_rows is not None:
        base = fine = max(least, min(wishes.arena_rows, shape.n_rows))
    need = base * shape.base_stride + fine * shape.fine_stride
    if need > ram:
        raise fail("MD-RAM-01", need=show_memory(need), have=show_memory(ram))
    return base, fine


def _chunk(chunks: tuple[ChunkSize, ...], wish: int | None, vram: int) -> ChunkSize:
    """The wished size, else the largest within its share of the VRAM, else the smallest."""
    if wish is not None:
        known = (chunk for chunk in chunks if chunk.tokens == wish)
        return next(known, ChunkSize(wish, 0))
    fits = (chunk for chunk in chunks if chunk.n_bytes <= CHUNK_SHARE * vram)
    return next(fits, chunks[-1] if chunks else ChunkSize(PREFILL_CHUNK, 0))


def _ahead(chunk: ChunkSize, vram: int, spare: int, all_base: int) -> int:
    """More memory for experts on their way where all rows are in RAM (others do not come ahead), if
    a chunk's share has room for it and not all of them have slots, which would take `all_base`;
    `spare` is left for those.
    """
    n_bytes = chunk.ahead_bytes
    fits = chunk.n_bytes + n_bytes <= CHUNK_SHARE * vram and n_bytes <= spare
    return n_bytes if fits and spare < all_base else 0


# -- what each tier takes --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of every part of a plan. On a CPU everything but `nvme_only` is RAM.

    Attributes:
        dense: weights that are no routed experts.
        kv: attention state of all requests.
        work: activations and graphs; on a device what its allocator loses too.
        chunk: what reading a prompt chunk takes; on a CPU its staging slot.
        base_slots, fine_slots: expert pools, 2-bit and hot FP4.
        arena_base, arena_fine: packed rows in RAM.
        nvme_only: rows that are on the drive and nowhere else; the drive holds all rows.
    """

    dense: int
    kv: int
    work: int
    chunk: int
    base_slots: int
    fine_slots: int
    arena_base: int
    arena_fine: int
    nvme_only: int

    @property
    def compute(self) -> int:
        """What lies where the arithmetic happens: VRAM on a device."""
        fixed = self.dense + self.kv + self.work + self.chunk
        return fixed + self.base_slots + self.fine_slots

    @property
    def arena(self) -> int:
        """Rows in RAM."""
        return self.arena_base + self.arena_fine

    @property
    def total(self) -> int:
        """VRAM and RAM together."""
        return self.compute + self.arena


def tier_bytes(shape: ModelShape, plan: TierPlan, wishes: Wishes, *, on_device: bool) -> TierBytes:
    """What each part of a plan takes; `total` is the plan's `bytes_total`."""
    base_slot, fine_slot, chunk = shape.slot_bytes, shape.slot_bytes, shape.slot_bytes
    if on_device:
        base_slot, fine_slot = shape.base_stride, shape.fine_stride
        known = (size.n_bytes for size in shape.chunks if size.tokens == plan.prefill_chunk)
        chunk = next(known, 0) + plan.ahead_bytes
    base_left = max(0, shape.n_rows - plan.arena_base_rows)
    fine_left = max(0, shape.n_rows - plan.arena_fine_rows)
    return TierBytes(
        dense=shape.dense_bytes,
        kv=_kv_bytes(shape, wishes, plan.kv_pages, plan.ring_pages),
        work=device_work(shape.dense_bytes) if on_device else WORK_BYTES,
        chunk=chunk,
        base_slots=plan.base_slots * base_slot,
        fine_slots=plan.fine_slots * fine_slot,
        arena_base=plan.arena_base_rows * shape.base_stride,
        arena_fine=plan.arena_fine_rows * shape.fine_stride,
        nvme_only=base_left * shape.base_stride + fine_left * shape.fine_stride,
    )
