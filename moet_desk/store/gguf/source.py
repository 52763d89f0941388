"""A GGUF model opened as a source: index, config and small files from its header.

Owns the order: find the files, map them, check headers, choose the architecture, then names, config
and tokenizer. Not bound to a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet_desk.store.gguf.archs import arch_of, config_of
from moet_desk.store.gguf.delta import DeltaHeads
from moet_desk.store.gguf.fields import Fields, as_json
from moet_desk.store.gguf.files import model_files
from moet_desk.store.gguf.header import GgufHeader, parse_gguf
from moet_desk.store.gguf.tensors import Sizes, logical_tensors, raw_tensor
from moet_desk.store.gguf.tokenizer import tokenizer_files
from moet_desk.store.headers import damaged
from moet_desk.store.sources import RawTensor, TensorIndex, TensorInfo, WeightFile


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a model's files hold.

    Attributes:
        small: config.json, tokenizer.json and the like, made from fields, by name.
    """

    files: tuple[Path, ...]
    index: TensorIndex
    small: Mapping[str, bytes]


def open_gguf(path: Path, *, has_tokenizer: bool = False) -> GgufModel:
    """Open a GGUF file, any part of a split one, or the folder it is in.

    Args:
        path: the file or folder.
        has_tokenizer: the model's own tokenizer.json is beside it, so none is made.

    Raises:
        MoetError: MD-SRC-01, 02, 05 as for other sources; MD-GGUF-01..06.
    """
    files = model_files(path)
    fields, raws = _read(files)
    arch = arch_of(fields)
    _check_counts(fields, raws)
    heads = fields.count("attention.head_count")
    sizes = Sizes(
        heads, fields.count("attention.head_count_kv", heads), fields.count("expert_count"),
        _delta_heads(fields),
    )  # fmt: skip
    tensors = logical_tensors(raws, arch, sizes)
    vocab, tied_head = _vocabulary_rows(tensors, fields), "lm_head" not in tensors
    names = {raw.name for raw in raws}
    config = config_of(fields, arch, names=names, vocab=vocab, tied_head=tied_head)
    small = {"config.json": as_json(config)}
    small |= tokenizer_files(fields, vocab, has_own=has_tokenizer)
    return GgufModel(tuple(files), TensorIndex.of(tensors, files), small)


def _delta_heads(fields: Fields) -> DeltaHeads:
    """Of a model with gated DeltaNet; the width of a head of values follows from their sum."""
    if not fields.has("ssm.time_step_rank"):
        return DeltaHeads()
    n_values = max(1, fields.count("ssm.time_step_rank"))
    return DeltaHeads(
        fields.count("ssm.group_count"), n_values, fields.count("ssm.state_size"),
        fields.count("ssm.inner_size") // n_values,
    )  # fmt: skip


def map_file(path: Path) -> tuple[GgufHeader, list[RawTensor]]:
    """Map one file and check its header.

    Raises:
        MoetError: MD-SRC-02 it cannot be read or is damaged, MD-SRC-05 an unknown type.
    """
    home = WeightFile(path)
    home.map()
    header = parse_gguf(memoryview(home.mapped.numpy()), file=path.name)  # type: ignore[arg-type]
    tensors = [
        raw_tensor(home, entry.name, entry.dtype, entry.shape, entry.begin)
        for entry in header.tensors
    ]
    return header, tensors


def _read(files: Sequence[Path]) -> tuple[Fields, list[RawTensor]]:
    """Fields of the first file and the tensors of all."""
    raws: dict[str, RawTensor] = {}
    first: Mapping[str, Any] | None = None
    for number, file in enumerate(files):
        header, tensors = map_file(file)
        first = header.fields if first is None else first
        place = (header.fields.get("split.no", 0), header.fields.get("split.count", 1) or 1)
        if place != (number, len(files)):
            reason = f"it says that it is part {place[0]} of {place[1]}, counted from 0"
            raise damaged(file.name, f"{reason}, by its name it is {number} of {len(files)}")
        for raw in tensors:
            if raw.name in raws:
                raise damaged(file.name, f"{raw.name} is in {raws[raw.name].file.name} too")
            raws[raw.name] = raw
    want = (first or {}).get("split.tensors.count", len(raws))
    if want != len(raws):
        reason = f"it says that all parts have {want} tensors, they have {len(raws)}"
        raise damaged(files[0].name, reason)
    return Fields(first or {}, file=files[0].name), list(raws.values())


def _check_counts(fields: Fields, raws: Sequence[RawTensor]) -> None:
    """Refuse counts that the tensors do not bear out: lists of that length are made from them."""
    if fields.count("block_count") > len(raws):
        raise fields.wrong(f"it claims more layers than its {len(raws)} tensors can be")
    most = max((raw.shape[0] for raw in raws if len(raw.shape) == 3), default=0)
    if fields.count("expert_count") > most:
        raise fields.wrong(f"it claims more experts than the {most} that its tensors hold")


def _vocabulary_rows(tensors: Mapping[str, TensorInfo], fields: Fields) -> int:
    embedding = tensors.get("model.embed_tokens")
    if embedding is None or not embedding.shape:
        raise fields.wrong("it has no token embedding")
    return embedding.shape[0]
