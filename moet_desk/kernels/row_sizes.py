"""How many bytes an expert takes at rest. No torch, so that plans can be made without it.

What lies where in these bytes is `layouts`' business. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32
"""Weights along K that share one scale."""

ROW_ALIGN_BYTES = 4096
"""Rows start at multiples of this, so that they can be read past the page cache."""

BASE_BLOCK_BYTES = 9
FINE_BLOCK_BYTES = 10


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Sizes of one matrix of `n` output rows and `k` inputs at rest.

    Raises:
        ValueError: `k` is not a multiple of 32, or a size is not positive.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        if self.n <= 0 or self.k <= 0 or self.k % GROUP:
            raise ValueError(
                f"a matrix [{self.n}, {self.k}] is not made of blocks of {GROUP} inputs"
            )

    @property
    def groups(self) -> int:
        """Blocks of 32 per row."""
        return self.k // GROUP

    @property
    def base_bytes(self) -> int:
        """Bytes of the base planes: 2.25 bits per weight."""
        return self.n * self.groups * BASE_BLOCK_BYTES

    @property
    def fine_bytes(self) -> int:
        """Bytes of the fine planes: 2.5 bits per weight."""
        return self.n * self.groups * FINE_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Sizes of one expert with model width `hidden` and inner width `inter`.

    Raises:
        ValueError: a width is not a positive multiple of 32.
    """

    hidden: int
    inter: int

    def __post_init__(self) -> None:
        MatrixLayout(2 * self.inter, self.hidden)
        MatrixLayout(self.hidden, self.inter)

    @property
    def gate_up(self) -> MatrixLayout:
        """The matrix [gate; up]: gate is its first half of rows."""
        return MatrixLayout(2 * self.inter, self.hidden)

    @property
    def down(self) -> MatrixLayout:
        """The matrix that leads back to the model width."""
        return MatrixLayout(self.hidden, self.inter)

    @property
    def base_bytes(self) -> int:
        """Bytes of a base row without padding."""
        return self.gate_up.base_bytes + self.down.base_bytes

    @property
    def fine_bytes(self) -> int:
        """Bytes of a fine row without padding."""
        return self.gate_up.fine_bytes + self.down.fine_bytes

    @property
    def base_stride(self) -> int:
        """Bytes from one base row to the next."""
        return _padded(self.base_bytes)

    @property
    def fine_stride(self) -> int:
        """Bytes from one fine row to the next."""
        return _padded(self.fine_bytes)

    @property
    def slot_floats(self) -> int:
        """float32 values of a slot on the CPU: all weights of gate_up and down."""
        return 3 * self.hidden * self.inter


def _padded(size: int) -> int:
    return -(-size // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES
