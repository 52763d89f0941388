"""What a pack is: file names, the `pack.json` record, and the plan a family makes for the packer.

Pure data: no torch, no IO besides encoding and decoding the record. The byte layout of a row is
`kernels.layouts`; the reasons are in docs/design/formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

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
JOURNAL_FILE = "journal"
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


class Plane(Enum):
    """Which of an expert's two rows."""

    BASE = "base"
    FINE = "fine"


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What the packer needs to know of a model, made by its family from config.json.

    `gate`, `up` and `down` are logical tensor names with `{layer}` and `{expert}` fields, without
    ".weight" or quantisation suffixes. `moe_layers` are model layer numbers in pack order.
    `dense` maps every other logical tensor that is kept to its shape; `ignored` are name prefixes
    that may be present and are left out. Anything else in the source is an error.
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

    @property
    def n_rows(self) -> int:
        return len(self.moe_layers) * self.n_experts


def encode_meta(meta: PackMeta) -> bytes:
    """The record as stable, indented JSON (the same meta gives the same bytes)."""
    return msgspec.json.format(msgspec.json.encode(meta), indent=1) + b"\n"


def decode_meta(data: bytes, *, path: str) -> PackMeta:
    """Read pack.json.

    Raises:
        MoetError: MD-PACK-03 another format version, MD-PACK-07 not a pack record.
    """
    try:
        version = msgspec.json.decode(data, type=dict).get("format")
        if version != FORMAT_VERSION:
            raise fail("MD-PACK-03", path=path, got=version, want=FORMAT_VERSION, model="NAME")
        return msgspec.json.decode(data, type=PackMeta)
    except msgspec.MsgspecError as error:
        raise fail("MD-PACK-07", path=path, reason=str(error)) from error
