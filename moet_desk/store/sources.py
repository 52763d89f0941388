"""One index over the tensors of a safetensors folder, whatever quantisation they are stored in.

Owns finding and joining the files. Checks of headers are in `headers`, what makes one logical
tensor is in `grouping`; decodes nothing: that is `quant_formats`. Not bound to a thread. What an
index says never changes; the files behind one made from headers come and go (`WeightFile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moet_desk.errors import fail
from moet_desk.store.grouping import group
from moet_desk.store.headers import (
    INDEX_FILE,
    LENGTH_BYTES,
    SINGLE_FILE,
    damaged,
    missing_tensors,
    parse_header,
    read_shard_index,
)
from moet_desk.store.quantization import PLAIN, Quantization
from moet_desk.store.stored_tensors import (
    DTYPES,
    FP8_BLOCK,
    MXFP4_BLOCK,
    Format,
    RawTensor,
    TensorInfo,
    WeightFile,
)

__all__ = [
    "DTYPES",
    "FP8_BLOCK",
    "MXFP4_BLOCK",
    "Format",
    "RawTensor",
    "TensorIndex",
    "TensorInfo",
    "WeightFile",
    "index_shards",
    "raw_tensors",
]


class TensorIndex:
    """All tensors of a folder (or of one file) by logical name. Immutable.

    A logical name has no ".weight" and no quantisation suffix; a parameter with another suffix
    ("….bias") keeps its name.
    """

    def __init__(
        self,
        raws: Mapping[str, RawTensor],
        files: Sequence[Path],
        quantization: Quantization = PLAIN,
    ) -> None:
        self.files: tuple[Path, ...] = tuple(files)
        self._tensors = group(raws, quantization)

    @classmethod
    def open(cls, folder: Path, quantization: Quantization = PLAIN) -> TensorIndex:
        """Map the weights of a source folder and check every header.

        `quantization` is what its config says; packed whole numbers cannot be read without.

        Raises:
            MoetError: MD-SRC-01 no weights, MD-SRC-02 a damaged file or index, MD-SRC-03 missing
                shards or tensors, MD-SRC-05 an unknown dtype.
        """
        if (folder / INDEX_FILE).is_file():
            return _open_shards(folder, quantization)
        if (folder / SINGLE_FILE).is_file():
            return cls.open_file(folder / SINGLE_FILE, quantization)
        found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if len(found) != 1:
            missing = INDEX_FILE if found else ".safetensors file"
            raise fail("MD-SRC-01", path=str(folder), missing=missing)
        return cls.open_file(found[0], quantization)

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], files: Sequence[Path]) -> TensorIndex:
        """An index over tensors that are known by their logical names already."""
        index = cls({}, files)
        index._tensors = dict(tensors)
        return index

    @classmethod
    def open_file(cls, path: Path, quantization: Quantization = PLAIN) -> TensorIndex:
        """Map one safetensors file. Raises as `open`."""
        return cls({raw.name: raw for raw in _map_file(path)}, [path], quantization)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def names(self) -> list[str]:
        """All logical names, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """The logical tensor called `name`.

        Raises:
            KeyError: there is none; the plan check makes that an error for people first.
        """
        return self._tensors[name]

    def raw(self, name: str) -> dict[str, RawTensor]:
        """The stored tensors behind a logical one, by their names in the file."""
        return {raw.name: raw for raw in self.info(name).raws}


# -- files -------------------------------------------------------------------------------------


def raw_tensors(home: WeightFile, header: bytes, size: int) -> Iterator[RawTensor]:
    """Check the JSON header of a file of `size` bytes and yield its tensors in data order.

    Raises:
        MoetError: MD-SRC-02 with the reason, MD-SRC-05 an unknown dtype.
    """
    path, start = home.path, LENGTH_BYTES + len(header)
    for entry in parse_header(header, data_bytes=size - start, file=path.name):
        begin, n_bytes = start + entry.begin, entry.end - entry.begin
        yield RawTensor(entry.name, entry.dtype, entry.shape, path, begin, n_bytes, home)


def _map_file(path: Path) -> Iterator[RawTensor]:
    home = WeightFile(path)
    header = home.attach()
    return raw_tensors(home, header, len(home.mapped))


def _open_shards(folder: Path, quantization: Quantization) -> TensorIndex:
    shard_of = read_shard_index(folder / INDEX_FILE)
    absent = {shard for shard in set(shard_of.values()) if not (folder / shard).is_file()}
    if absent:
        names = [name for name, shard in shard_of.items() if shard in absent]
        raise missing_tensors(names, shard_of)
    return index_shards(folder, shard_of, lambda shard: _map_file(folder / shard), quantization)


def index_shards(
    folder: Path,
    shard_of: Mapping[str, str],
    tensors: Callable[[str], Iterable[RawTensor]],
    quantization: Quantization = PLAIN,
) -> TensorIndex:
    """Join the tensors of shards, and compare them with the index that came with them.

    Raises:
        MoetError: MD-SRC-02 a shard holds something else, MD-SRC-03 tensors are missing.
    """
    shards = sorted(set(shard_of.values()))
    raws: dict[str, RawTensor] = {}
    for shard in shards:
        for raw in tensors(shard):
            if shard_of.get(raw.name) != shard:
                place = shard_of.get(raw.name, "no file")
                raise damaged(shard, f"it holds {raw.name}, {INDEX_FILE} says {place}")
            raws[raw.name] = raw
    if len(raws) < len(shard_of):
        raise missing_tensors([name for name in shard_of if name not in raws], shard_of)
    return TensorIndex(raws, [folder / shard for shard in shards], quantization)
