"""How many bytes a token's attention state takes in each storage format, and a state of fixed size
on a card. No torch, for plans.

The encodings themselves are in `reference.kv_formats`. Pure.
"""

from __future__ import annotations

from moet_desk.kernels.kinds import KvFormat

FP8_BLOCK = 128
NVFP4_BLOCK = 16
SHARED_BLOCK = 64
"""Numbers that share a scale in an FP8 entry of shared attention."""
POOLED_KEY_BLOCK = 32

POOL_STATES, POOL_ROWS = 16, 512
"""Of pooled attention on a card: lengths behind which the sums of open windows are kept, and tokens
that are stored before all of them have looked at their window.
"""

MOST_PENDING = 8
"""Tokens that a sequence with states on a card can go back, from where they lie: a step's rows."""

DELTA_RING = 16
"""Tokens in the rings beside a state on a card: the rows of a step and as many pending ones, or the
convolution's inputs.
"""


def mla_entry_bytes(fmt: KvFormat, r: int, dr: int) -> int:
    """Bytes of one token's latent [r] and rotary key [dr] (512 + 64: 2304, 1152, 656, 352).

    Raises:
        ValueError: NVFP4 and `r` is not a multiple of 16.
    """
    if fmt is KvFormat.FP8:
        return vector_bytes(fmt, r) + 2 * dr
    if fmt is KvFormat.NVFP4:
        return vector_bytes(fmt, r) + dr
    return vector_bytes(fmt, r + dr)


def gqa_entry_bytes(fmt: KvFormat, n_keys: int, d: int, dv: int) -> int:
    """Bytes of one token's keys [M, d] and values [M, dv]; heads are scaled apart.

    Raises:
        ValueError: NVFP4 and `d` or `dv` is not a multiple of 16.
    """
    return n_keys * (vector_bytes(fmt, d) + vector_bytes(fmt, dv))


def shared_entry_bytes(fmt: KvFormat, dim: int, rotary: int) -> int:
    """Bytes of one entry of shared attention, of which the last `rotary` numbers rotate (512 with
    64 of them: 2048, 1024, 584, 316).

    Raises:
        ValueError: NVFP4 and what does not rotate is not a multiple of 16.
    """
    plain = dim - rotary
    if fmt is KvFormat.FP8:
        return plain + 2 * rotary + shared_scale_bytes(plain)
    return mla_entry_bytes(fmt, plain, rotary)


def pooled_key_bytes(fmt: KvFormat, d: int) -> int:
    """Bytes of a pooled key of an indexer beside entries of a format: e2m1 with a byte of scale for
    32 numbers, where entries are rounded (128: 512, 256, 68, 68).
    """
    if fmt in (KvFormat.F32, KvFormat.BF16):
        return vector_bytes(fmt, d)
    return d // 2 + -(-d // POOLED_KEY_BLOCK)


def window_ring(window: int) -> int:
    """Entries of a sequence's ring on a card, for rows that see `window` of them: whole blocks of
    16, so that what lies behind rings is aligned.
    """
    return -(-(window + POOL_ROWS) // 16) * 16


def shared_scale_bytes(plain: int) -> int:
    """Bytes of the scales of an FP8 entry: whole words of 8."""
    n_blocks = -(-plain // SHARED_BLOCK)
    return -(-n_blocks // 8) * 8


def index_form(fmt: KvFormat) -> KvFormat:
    """How an indexer's keys lie beside entries of a format: not smaller than FP8, in which released
    kernels compare them.
    """
    return KvFormat.FP8 if fmt is KvFormat.NVFP4 else fmt


def index_key_bytes(fmt: KvFormat, d: int) -> int:
    """Bytes of one token's indexer key [d] beside entries of a format (128: 512, 256, 132, 132)."""
    return vector_bytes(index_form(fmt), d)


def vector_bytes(fmt: KvFormat, d: int) -> int:
    """Bytes of one vector of `d` values with its scales."""
    if fmt is KvFormat.F32:
        return 4 * d
    if fmt is KvFormat.BF16:
        return 2 * d
    if fmt is KvFormat.FP8:
        return d + 4 * -(-d // FP8_BLOCK)
    if d % NVFP4_BLOCK:
        raise ValueError(f"NVFP4 needs a multiple of {NVFP4_BLOCK} values, not {d}")
    return d // 2 + d // NVFP4_BLOCK
