"""What a pack is: file names, the `pack.json` record, and the plan a family makes for the packer.

Pure data: no torch, no IO besides encoding and decoding the record. The byte layout of a row is
`kernels.layouts`; the reasons are in docs/design/formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

import blake3
import msgspec

from moet_desk.errors import fail

FORMAT_VERSION = 1
"""Raised when bytes of a pack change meaning; readers refuse other versions (MD-PACK-03)."""

QUANTIZER_VERSION = "sign4-e8m0-32/1"
"""Raised when the same source would give other rows; part of a pack's identity."""

PACK_JSON = "pack.json"
DENSE_FILE = "dense.safetensors"
BASE_FILE = "experts.base"
FINE_FILE = "experts.fine"
DIGEST_FILE = "rows.b3"
HEAT_FILE = "heat.json"
GATE_FILE = "gate.json"
ORIGIN_FILE = "origin.json"
JOURNAL_FILE = "journal"
LOCK_FILE = "lock"
DIGEST_BYTES = 16  # blake3 truncated to 128 bits

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "NOTICE",
)
"""Small files taken over from the source when they are there."""


IDENTITY_FILES = tuple(name for name in COPIED_FILES if name != "NOTICE")
"""Of those, the ones that change answers; with the weights they make a source's identity."""


class Plane(Enum):
    """Which of an expert's two rows."""

    BASE = "base"
    FINE = "fine"


ROW_FILES: Mapping[Plane, str] = {Plane.BASE: BASE_FILE, Plane.FINE: FINE_FILE}


class Phase(Enum):
    """What a packer or a verifier is doing now; the values are shown to people."""

    READ_SOURCE = "read the source"
    DENSE = "copy dense weights"
    ROWS = "pack experts"
    FINISH = "write the index"
    VERIFY = "verify rows"
    FETCH = "fetch what is damaged"
    REPAIR = "repair rows"


@dataclass(frozen=True, slots=True)
class PackProgress:
    """One report of a long job: `done` of `total` in `unit` ("bytes" or "rows").

    `kept` rows were found finished from an earlier run; `dropped` journal records were damaged, so
    their rows are made again.
    """

    phase: Phase
    done: int
    total: int
    unit: str
    kept: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What the packer needs to know of a model, made by its family from config.json.

    `gate`, `up` and `down` are logical tensor names with `{layer}` and `{expert}` fields, without
    ".weight" or quantisation suffixes. `moe_layers` are model layer numbers in pack order.
    `dense` maps every other logical tensor that is kept to its shape; `ignored` are name prefixes
    that may be present and are left out. Anything else in the source is an error.
    Files may merge a layer's experts into `gate_up_proj` and `down_proj` (`plan_view`); if
    `alternating`, rows of gate and up take turns there, else all of gate comes first.
    `renames` are beginnings of names in files and what stands for them here; the first that fits
    counts. `by_row` are beginnings of names of dense matrices that are never loaded: rows are read
    when they are needed, so these must be stored as plain floats.
    """

    model_type: str
    hidden: int
    inter: int
    n_experts: int
    moe_layers: tuple[int, ...]
    gate: str
    up: str
    down: str
    dense: Mapping[str, tuple[int, ...]]
    ignored: tuple[str, ...] = ()
    alternating: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    by_row: tuple[str, ...] = ()

    @property
    def n_rows(self) -> int:
        return len(self.moe_layers) * self.n_experts


class SourceFile(msgspec.Struct, frozen=True):
    """One weight or config file the pack was made from."""

    name: str
    bytes: int
    blake3: str


class PackMeta(msgspec.Struct, frozen=True):
    """The record in pack.json. Sizes are bytes; `identity` covers content, never shape alone."""

    format: int
    identity: str
    quantizer: str
    model_type: str
    hidden: int
    inter: int
    n_experts: int
    moe_layers: list[int]
    base_row_bytes: int
    base_stride: int
    fine_row_bytes: int
    fine_stride: int
    source_format: str  # how the experts were stored: "mxfp4", "bf16", "fp8", ...
    fine_is_lossless: bool  # FP4 source kept verbatim
    source: list[SourceFile]
    dense_bytes: int
    dense_blake3: str
    digests_blake3: str  # of rows.b3
    copied: list[SourceFile]  # small files taken over, as they were then
    checksum: str = ""  # of this record without it; set by `encode_meta`

    @property
    def n_rows(self) -> int:
        return len(self.moe_layers) * self.n_experts

    def stride(self, plane: Plane) -> int:
        """Bytes from one row of this plane to the next."""
        return self.base_stride if plane is Plane.BASE else self.fine_stride

    def expert_of(self, row: int) -> tuple[int, int]:
        """(model layer number, expert) of a row."""
        layer, expert = divmod(row, self.n_experts)
        return self.moe_layers[layer], expert


def encode_meta(meta: PackMeta) -> bytes:
    """The record as stable, indented JSON (the same meta gives the same bytes)."""
    sealed = msgspec.structs.replace(meta, checksum=_checksum(meta))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"


def decode_meta(data: bytes, *, path: str) -> PackMeta:
    """Read pack.json.

    Raises:
        MoetError: MD-PACK-03 another format version, MD-PACK-07 not a pack record, or changed
            since it was written.
    """
    names = {"path": path, "model": PurePath(path).parent.name}
    try:
        version = msgspec.json.decode(data, type=dict).get("format")
        if isinstance(version, int) and version != FORMAT_VERSION:
            raise fail("MD-PACK-03", got=version, want=FORMAT_VERSION, **names)
        meta = msgspec.json.decode(data, type=PackMeta)
    except (ValueError, RecursionError) as error:
        raise fail("MD-PACK-07", reason=str(error), **names) from error
    if encode_meta(meta) != data:
        raise fail("MD-PACK-07", reason="it does not match its checksum", **names)
    return meta


def _checksum(meta: PackMeta) -> str:
    blank = msgspec.structs.replace(meta, checksum="")
    return blake3.blake3(msgspec.json.encode(blank)).hexdigest(length=DIGEST_BYTES)
