"""Made-up weights of a shape: dense ones on the device, rows in the pinned arena, router biases.

Rows share places in the arena: what is moved counts, not what it says. The routers' biases make
some experts more popular than others, so that a pool of the plan's size answers a wanted share of
look-ups. Owned by the thread that measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.blocks.expert_math import ExpertForm, load_form
from moet_desk.engine.blocks.weights import LoadedRows
from moet_desk.engine.cuda.shapes import Shape
from moet_desk.engine.dense_format import may_round, rounded_bytes
from moet_desk.engine.families.tensors import NGRAM_TABLES, TABLE, dense_shapes
from moet_desk.engine.ngram_rows import Rows
from moet_desk.engine.spec import Spec
from moet_desk.errors import MoetError
from moet_desk.kernels.layouts import GROUP, ExpertLayout
from moet_desk.kernels.reference.quant import DENSE_LEVEL
from moet_desk.kernels.triton import fetch
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.store.arena import Allocate
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB

ARENA_BYTES = 4 * GIB
"""Pinned rows at most: far more than a processor's caches hold, and pinned in a second or two."""

_SCALE_BLOCK = 128
_PIECE_FLOATS = 1 << 24  # made at a time, 64 MiB: random float32 takes four times the room of FP8
_ROW_SCALE = 120  # E8M0, 2**-7: products of unit activations stay near one
_BIAS = "e_score_correction_bias"
_EXPERT_BIAS = "_proj_bias"
_FEW_ROWS = 1 << 14
_TABLE_TOKENS = 1 << 14  # of a table that are drawn together
_ROUTERS = (".gate", ".router")
_IN_FLOAT = ("_fn", ".ape")
"""Matrices that are read as numbers: of connections between streams, and biases of places."""


def stored_bytes(
    name: str, shape: tuple[int, ...], *, is_fp8: bool = True, is_rounded: bool = False
) -> int:
    """Bytes of a dense tensor as files store it, or rounded, and `SyntheticLoader` makes it."""
    if len(shape) == 1:
        return 4 * shape[0]
    if is_rounded and may_round(name, shape):
        return rounded_bytes(shape)
    if name.endswith((*_IN_FLOAT, TABLE)):
        return 4 * math.prod(shape)
    if is_fp8 and _may_be_fp8(name):
        grid = math.prod(-(-size // _SCALE_BLOCK) for size in shape)
        return math.prod(shape) + 4 * grid
    return 2 * math.prod(shape)


def _may_be_fp8(name: str) -> bool:
    kept = (".embed_tokens", "lm_head", *_ROUTERS, "eh_proj", _EXPERT_BIAS, "weights_proj")
    return not name.endswith(kept) and ".compressor." not in name


def dense_bytes(shape: Shape) -> int:
    """Bytes of everything that is not a routed expert."""
    return _bytes_of(shape, dense_shapes(shape.spec))


def dense_read_bytes(shape: Shape, rows: int) -> int:
    """Bytes of dense weights that a step reads: all but the embedding's unused lines, biases of
    experts and tables that name them, of which few are read, and the MTP head.
    """
    spec = shape.spec
    unused = 2 * (spec.vocab - rows) * spec.hidden
    read = (
        (name, size)
        for name, size in dense_shapes(replace(spec, mtp=None))
        if not name.endswith((_EXPERT_BIAS, TABLE))
    )
    return _bytes_of(shape, read) - unused


def _bytes_of(shape: Shape, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    return sum(
        stored_bytes(name, size, is_fp8=shape.is_fp8, is_rounded=shape.is_rounded)
        for name, size in tensors
        if not name.startswith(NGRAM_TABLES)  # which are not loaded
    )


class _FewRows(LoadedRows):
    """Stands for a larger matrix: its rows come again and again."""

    def read(self, rows: Sequence[int]) -> Tensor:
        """See `Rows`."""
        return super().read([row % _FEW_ROWS for row in rows])


@dataclass(slots=True)
class SyntheticLoader:
    """Dense weights of a spec's shapes, made on the device; the same spec gives the same model."""

    spec: Spec
    device: torch.device
    is_fp8: bool = True
    is_rounded: bool = False
    # By MoE layer: a selection bias or a table that names experts, and the experts' ranks.
    _chosen_by: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _shapes: dict[str, tuple[int, ...]] = field(init=False)
    _random: torch.Generator = field(init=False)
    _piece: Tensor | None = None

    def __post_init__(self) -> None:
        self._shapes = dict(dense_shapes(self.spec))
        self._random = torch.Generator(device=self.device).manual_seed(0)

    def vector(self, name: str) -> Tensor:
        """Norms are one, biases and sinks zero; a selection bias, or a table that names experts,
        ranks them in a random order. Connections of streams are small.
        """
        shape = self._shapes[name]
        if name.endswith("_fn"):
            return torch.full(shape, 1 / shape[1], device=self.device)
        if not name.endswith((_BIAS, TABLE)):
            one = not name.endswith((".bias", ".sinks"))
            return torch.full(shape, float(one), device=self.device)
        if name.endswith(TABLE):
            size, kind = self.spec.moe_ffn.router.n_experts, torch.int32
        else:
            (size,), kind = shape, torch.float32
        made = torch.zeros(shape, dtype=kind, device=self.device)
        ranks = torch.randperm(size, generator=self._random, device=self.device)
        self._chosen_by.append((made, ranks))
        self._make_popular(made, ranks, 0.0)
        return made

    def norm(self, name: str) -> Tensor:
        """One, whatever a model adds to it."""
        return self.vector(name)

    def matrix(self, *names: str) -> DenseWeight:
        """FP8 with unit-gain scales, or bfloat16 as head and router, whose scores spread over
        0..1.
        """
        rows = sum(self._shapes[name][0] for name in names)
        width = self._shapes[names[0]][1]
        if self.is_rounded and may_round(names[0], (rows, width)):
            return self._integers(rows, width)
        if not self.is_fp8 or not _may_be_fp8(names[0]):
            gain = 2.0 if names[0].endswith(_ROUTERS) else 1.0
            return DenseWeight(self._values((rows, width), torch.bfloat16, gain * width**-0.5))
        grid = (-(-rows // _SCALE_BLOCK), -(-width // _SCALE_BLOCK))
        scales = torch.full(grid, width**-0.5, device=self.device)
        return DenseWeight(self._values((rows, width), torch.float8_e4m3fn, 1.0), scales)

    def _integers(self, rows: int, width: int) -> DenseWeight:
        values = torch.empty((rows, width), dtype=torch.int8, device=self.device)
        values.random_(-DENSE_LEVEL, DENSE_LEVEL + 1, generator=self._random)
        scale = width**-0.5 / (DENSE_LEVEL / 3**0.5)  # of even integers: a gain of one
        scales = torch.full((rows, width // GROUP), scale, device=self.device)
        return DenseWeight(values, scales.bfloat16())

    def table(self, name: str) -> Tensor:
        """The embedding in bfloat16."""
        return self._values(self._shapes[name], torch.bfloat16, 1.0)

    def rows(self, name: str) -> Rows:
        """Rows in RAM, a few for all of a table of n-grams: as if the system kept what was read."""
        width = self._shapes[name][1]
        return _FewRows(torch.randn(_FEW_ROWS, width, generator=torch.Generator().manual_seed(0)))

    def form(self) -> ExpertForm:
        """Of the experts; biases are zeros, which take as long to read as others."""

        def zeros(name: str) -> Tensor:
            return torch.zeros(self._shapes[name], dtype=torch.bfloat16, device=self.device)

        return load_form(self.spec, zeros)

    def set_popularity(self, popularity: float) -> None:
        """Let the selection bias fall by this much from each expert to the next less popular one.

        In place, because graphs keep the biases' addresses. Router scores lie in 0..1, and so do
        those by which tables are drawn.
        """
        for made, ranks in self._chosen_by:
            self._make_popular(made, ranks, popularity)

    def change_topic(self, share: float, popularity: float) -> None:
        """Let a share of each layer's experts trade their popularity, as another topic would."""
        for made, ranks in self._chosen_by:
            order = torch.randperm(ranks.numel(), generator=self._random, device=self.device)
            some = order[: round(share * ranks.numel())]
            ranks[some] = ranks[some.roll(1)]
            self._make_popular(made, ranks, popularity)

    def _make_popular(self, made: Tensor, ranks: Tensor, popularity: float) -> None:
        bias = ranks.float() * -popularity
        if made.dim() == 1:
            made.copy_(bias)
            return
        for tokens in torch.split(made, _TABLE_TOKENS):
            size = (len(tokens), len(ranks))
            scores = torch.rand(size, generator=self._random, device=self.device)
            tokens.copy_((scores + bias).topk(made.shape[1]).indices)

    def rows_by_popularity(self) -> list[int]:
        """Rows of all MoE layers, the most popular first; identity experts have no rows."""
        n_experts = self.spec.moe_ffn.router.n_experts
        ranks = torch.cat([ranks[:n_experts] for _, ranks in self._chosen_by])
        found: list[int] = ranks.argsort(stable=True).tolist()
        return found

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype, gain: float) -> Tensor:
        """Random values, made piece by piece in the same memory: the allocator cut the pieces that
        were freed for other weights, and 2.2 GiB of scraps were left of GLM-4.5-Air.
        """
        made = torch.empty(shape, dtype=dtype, device=self.device)
        if self._piece is None:
            self._piece = torch.empty(_PIECE_FLOATS, device=self.device)
        flat = made.view(-1)
        for at in range(0, len(flat), _PIECE_FLOATS):
            target = flat[at : at + _PIECE_FLOATS]
            piece = self._piece[: len(target)].normal_(generator=self._random)
            target.copy_(piece.mul_(gain))
        return made

    def forget_piece(self) -> None:
        """Give back what weights were made in; the next one makes it anew."""
        self._piece = None


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
    rows = memory.view(places, stride)
    rows[:] = torch.from_numpy(made_row(layout, plane, np.random.default_rng(0)))
    return SyntheticRows(rows, (np.arange(n_rows) % places).astype(np.int32))


def made_row(layout: ExpertLayout, plane: Plane, source: np.random.Generator) -> NDArray[np.uint8]:
    """A row with sane scales, [stride]."""
    if plane is Plane.FINE:  # digits
        return np.zeros(layout.fine_stride, np.uint8)
    row = source.integers(0, 256, layout.base_stride, dtype=np.uint8)
    at = layout.gate_up.base_bytes
    for begin, matrix in ((0, layout.gate_up), (at, layout.down)):
        scales = begin + 8 * matrix.n * matrix.groups
        row[scales : begin + matrix.base_bytes] = _ROW_SCALE
    return row


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
