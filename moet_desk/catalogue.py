"""Models that are known before anything is downloaded: sizes, licence, where they come from.

The facts are in assets/catalogue.toml. Whether a family runs is not said here: the engine knows
(`engine.families.runs`). No torch. Any thread.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moet_desk
from moet_desk.errors import fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.row_sizes import ExpertLayout
from moet_desk.units import GB, GIB, MIB

FILE = "catalogue.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaFacts:
    """Widths of latent attention and what else the dense weights follow from; `index_layers` is how
    many layers have an indexer of their own (0: it sees everything). With `per_layer` 2, each layer
    has two attentions and dense parts. `identity_experts` are chosen like others and have no
    weights.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_layers: int
    dense_inter: int
    shared_inter: int
    vocab: int
    index_layers: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_top_k: int = 0
    per_layer: int = 1
    identity_experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaFacts:
    """The same of grouped-query attention; `qk_norm` is "none", "head" or "full". Of each
    `window_every` layers the first one has a `window` (0: none has).
    """

    keys: int
    has_bias: bool
    qk_norm: str
    dense_layers: int
    dense_inter: int
    shared_inter: int
    vocab: int
    expert_bias: bool = False
    window: int = 0
    window_every: int = 1
    out_gate: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnFacts:
    """Gated DeltaNet in all layers but the last of each `full_every`; see `engine.spec.Gdn`."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool
    full_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramFacts:
    """Tables of n-grams beside the embedding, in bfloat16; see `engine.spec.Ngrams`. The smallest
    has `ratio` rows per token id, and one more.
    """

    longest: int
    splits: int
    ratio: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model as its makers published it. Fields are explained at the head of the file."""

    name: str
    title: str
    repo: str
    revision: str
    family: str  # model_type of its config.json
    licence: str
    params_b: float
    dense_params_b: float
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    hidden: int
    inter: int
    base_gib: float
    dense_form: str
    dense_gib: float
    heads: int
    head_dim: int
    kv_bytes: Mapping[str, int]
    context: int
    ram_gib: int
    active_b: float | None = None
    state_mib: float = 0.0
    download_gb: float | None = None
    expert_bits: float | None = None
    not_yet: str = ""
    unknown: tuple[str, ...] = ()
    mla: MlaFacts | None = None
    gqa: GqaFacts | None = None
    gdn: GdnFacts | None = None
    ngrams: NgramFacts | None = None

    @property
    def layout(self) -> ExpertLayout:
        """Sizes of one expert."""
        return ExpertLayout(self.hidden, self.inter)

    @property
    def n_rows(self) -> int:
        """Experts of all layers that run for every token."""
        return self.moe_layers * self.experts

    @property
    def dense_bytes(self) -> int:
        """Weights that are no routed experts, as stored."""
        return round(self.dense_gib * GIB)

    @property
    def table_numbers(self) -> int:
        """Weights in tables of n-grams."""
        if self.ngrams is None or self.mla is None:
            return 0
        n_tables = self.ngrams.splits * (self.ngrams.longest - 1)
        least = self.ngrams.ratio * self.mla.vocab + 1
        rows = sum(least + 2 * table for table in range(n_tables))
        return rows * (self.hidden // n_tables)

    @property
    def table_bytes(self) -> int:
        """The same in bytes."""
        return 2 * self.table_numbers

    @property
    def state_bytes(self) -> int:
        """What a sequence takes beside KV, whatever its length."""
        return round(self.state_mib * MIB)

    @property
    def download_bytes(self) -> int | None:
        """Of the published files, if known."""
        return None if self.download_gb is None else round(self.download_gb * GB)

    @property
    def weight_bytes(self) -> int:
        """Of the repository's weights, counted from their forms; an MTP head is not counted."""
        bits = self.expert_bits or {"fp8": 8.0, "bf16": 16.0}[self.dense_form]
        experts = (self.params_b - self.dense_params_b) * GB - self.table_numbers
        return round(experts * bits / 8) + self.dense_bytes + self.table_bytes

    @property
    def pack_bytes(self) -> int:
        """What its pack will take on the drive: both rows of every expert, and the other weights.

        The MTP head's rows are not counted.
        """
        layout = self.layout
        rows = self.n_rows * (layout.base_stride + layout.fine_stride)
        return rows + self.dense_bytes + self.table_bytes

    def kv_token_bytes(self, form: KvFormat) -> int:
        """KV bytes of a token in the layers that keep every token; float32 takes twice of what
        bfloat16 does.
        """
        if form is KvFormat.F32:
            return 2 * self.kv_bytes["bf16"]
        return self.kv_bytes[form.value]


@functools.cache
def load_catalogue() -> tuple[CatalogueEntry, ...]:
    """All entries in the order of the file.

    Raises:
        MoetError: MD-CAT-01 the file that comes with the program is missing or not as it was.
    """
    path = _find()
    try:
        return parse(path.read_text("utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise fail("MD-CAT-01", path=str(path), reason=str(error)) from error


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry of a name or of a repository, whatever the case; None if there is none."""
    wanted = name.lower()
    for entry in load_catalogue():
        if wanted in (entry.name, entry.repo.lower()):
            return entry
    return None


def parse(text: str) -> tuple[CatalogueEntry, ...]:
    """Read the catalogue.

    Raises:
        ValueError, TypeError, KeyError: it is not one.
    """
    tables: Sequence[Mapping[str, Any]] = tomllib.loads(text)["model"]
    return tuple(_entry(table) for table in tables)


def _entry(table: Mapping[str, Any]) -> CatalogueEntry:
    fields = dict(table)
    parts = ("mla", "gqa", "gdn", "ngrams")
    mla, gqa, gdn, ngrams = (fields.pop(name, None) for name in parts)
    fields["unknown"] = tuple(fields.get("unknown", ()))
    return CatalogueEntry(
        **fields,
        mla=None if mla is None else MlaFacts(**mla),
        gqa=None if gqa is None else GqaFacts(**gqa),
        gdn=None if gdn is None else GdnFacts(**gdn),
        ngrams=None if ngrams is None else NgramFacts(**ngrams),
    )


def _find() -> Path:
    """In an installed wheel it lies inside the package, in a checkout beside it."""
    package = Path(str(importlib.resources.files(moet_desk)))
    for root in (package, package.parent):
        if (root / "assets" / FILE).is_file():
            return root / "assets" / FILE
    return package / "assets" / FILE
