"""Made-up weights of a shape: dense ones on the device, rows in the pinned arena, router biases.

Rows share places in the arena: what is moved counts, not what it says. The routers' biases make
some experts more popular than others, so that a pool of the plan's size answers a wanted share of
look-ups. Owned by the thread that measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.families.tensors import dense_shapes
from moet_desk.engine.spec import Spec
from moet_desk.errors import MoetError
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton import fetch
from moet_desk.kernels.triton.dense import DenseWeight
from moet_desk.store.arena import Allocate
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB

ARENA_BYTES = 4 * GIB
"""Pinned rows at most: far more than a processor's caches hold, and pinned in a second or two."""

_SCALE_BLOCK = 128
_PIECE_ROWS = 4096  # made at a time: random float32 takes four times the room of FP8
_ROW_SCALE = 120  # E8M0, 2**-7: products of unit activations stay near one
_BIAS = "e_score_correction_bias"


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor as files store it and `SyntheticLoader` makes it."""
    if len(shape) == 1:
        return 4 * shape[0]
    if _is_fp8(name):
        grid = math.prod(-(-size // _SCALE_BLOCK) for size in shape)
        return math.prod(shape) + 4 * grid
    return 2 * math.prod(shape)


def _is_fp8(name: str) -> bool:
    return not name.endswith((".embed_tokens", "lm_head", ".gate", "eh_proj"))


def dense_bytes(spec: Spec) -> int:
    """Bytes of everything that is not a routed expert."""
    return sum(stored_bytes(*tensor) for tensor in dense_shapes(spec))


def dense_read_bytes(spec: Spec, rows: int) -> int:
    """Bytes of dense weights that a step reads: all but the embedding's unused lines and the MTP
    head.
    """
    unused = 2 * (spec.vocab - rows) * spec.hidden
    return dense_bytes(replace(spec, mtp=None)) - unused


@dataclass(slots=True)
class SyntheticLoader:
    """Dense weights of a spec's shapes, made on the device; the same spec gives the same model."""

    spec: Spec
    device: torch.device
    _biases: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # bias, ranks; by MoE layer
    _shapes: dict[str, tuple[int, ...]] = field(init=False)
    _random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._shapes = dict(dense_shapes(self.spec))
        self._random = torch.Generator(device=self.device).manual_seed(0)

    def vector(self, name: str) -> Tensor:
        """Norms are one; a selection bias ranks the experts in a random order."""
        (size,) = self._shapes[name]
        if not name.endswith(_BIAS):
            return torch.ones(size, device=self.device)
        bias = torch.zeros(size, device=self.device)
        ranks = torch.randperm(size, generator=self._random, device=self.device)
        self._biases.append((bias, ranks))
        return bias

    def matrix(self, *names: str) -> DenseWeight:
        """FP8 with unit-gain scales; head and router in bfloat16, its scores spread over 0..1."""
        rows = sum(self._shapes[name][0] for name in names)
        width = self._shapes[names[0]][1]
        if not _is_fp8(names[0]):
            gain = 2.0 if names[0].endswith(".gate") else 1.0
            return DenseWeight(self._values((rows, width), torch.bfloat16, gain * width**-0.5))
        grid = (-(-rows // _SCALE_BLOCK), -(-width // _SCALE_BLOCK))
        scales = torch.full(grid, width**-0.5, device=self.device)
        return DenseWeight(self._values((rows, width), torch.float8_e4m3fn, 1.0), scales)

    def table(self, name: str) -> Tensor:
        """The embedding in bfloat16."""
        return self._values(self._shapes[name], torch.bfloat16, 1.0)

    def set_popularity(self, popularity: float) -> None:
        """Let the selection bias fall by this much from each expert to the next less popular one.

        In place, because graphs keep the biases' addresses. Router scores lie in 0..1.
        """
        for bias, ranks in self._biases:
            bias.copy_(ranks.float() * -popularity)

    def rows_by_popularity(self) -> list[int]:
        """Rows of all MoE layers, the most popular first."""
        ranks = torch.cat([ranks for _, ranks in self._biases])
        found: list[int] = ranks.argsort(stable=True).tolist()
        return found

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype, gain: float) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self.device)
        for at in range(0, shape[0], _PIECE_ROWS):
            piece = made[at : at + _PIECE_ROWS]
            values = torch.randn(piece.shape, generator=self._random, device=self.device)
            piece.copy_(values * gain)
        return made


def make_arena(
    layout: ExpertLayout,
    n_rows: int,
    *,
    allocate: Allocate,
    plane: Plane = Plane.BASE,
    most_bytes: int = ARENA_BYTES,
) -> SyntheticRows:
    """Rows with sane scales in memory from `allocate`; row r lies at place r modulo the places."""
    stride = layout.base_stride if plane is Plane.BASE else layout.fine_stride
    places = max(1, min(n_rows, most_bytes // stride))
    memory = torch.frombuffer(allocate(places * stride, stride), dtype=torch.uint8)
    row = torch.zeros(stride, dtype=torch.uint8)  # of the fine plane: digits
    if plane is Plane.BASE:
        row = torch.randint(0, 256, (stride,), dtype=torch.uint8)
        at = layout.gate_up.base_bytes
        for begin, matrix in ((0, layout.gate_up), (at, layout.down)):
            scales = begin + 8 * matrix.n * matrix.groups
            row[scales : begin + matrix.base_bytes] = _ROW_SCALE
    rows = memory.view(places, stride)
    rows[:] = row
    return SyntheticRows(rows, (np.arange(n_rows) % places).astype(np.int32))


@dataclass(frozen=True, slots=True)
class SyntheticRows:
    """Made-up rows of one plane.

    Attributes:
        memory: uint8 [places, stride].
        table: int32 [rows], the place of each.
    """

    memory: Tensor
    table: NDArray[np.int32]

    def on(self, device: torch.device) -> fetch.Arena:
        """The rows as kernels see them; `memory` must outlive it."""
        place_of = torch.from_numpy(self.table).to(device)
        return fetch.Arena(self.memory.data_ptr(), place_of, self.memory.shape[1])


@dataclass(frozen=True, slots=True)
class SyntheticHost:
    """Stands for the host's arena: every row is in RAM, so none is read from a drive."""

    rows: Mapping[Plane, SyntheticRows]

    def table(self, plane: Plane) -> NDArray[np.int32]:
        """Row -> place."""
        return self.rows[plane].table

    def memory(self, plane: Plane) -> Tensor:
        """The places."""
        return self.rows[plane].memory

    def read_into(self, plane: Plane, row: int, place: Tensor) -> None:
        """Never called."""
        raise RuntimeError("no row is ever late here")

    def no_answer(self, row: int) -> MoetError:
        """Never called."""
        raise RuntimeError("no row is ever late here")
