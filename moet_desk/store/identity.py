"""What makes a source that source: the content of its weights, config, tokenizer and template.

Owns the hash that packs, journals and repairs compare. Reads every byte once with plain reads, so
a disk that cannot read a file is found here, before anything is mapped and decoded. Used by the
packing thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import blake3

from moet_desk.errors import fail
from moet_desk.store.pack_format import (
    FORMAT_VERSION,
    IDENTITY_FILES,
    QUANTIZER_VERSION,
    SourceFile,
)

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """blake3 over the files of a source, the quantiser and the pack format, in hex."""

    hash: str
    files: tuple[SourceFile, ...]

    @property
    def short(self) -> str:
        return self.hash[:12]


def identify(
    weights: Sequence[Path], small: Mapping[str, bytes], on_bytes: Callable[[int, int], None]
) -> Identity:
    """Hash the weights and small files of a source.

    Args:
        weights: its weight files.
        small: its small files by name; those that change no answer are left out.
        on_bytes: called with (bytes read, bytes in all) after each chunk; may raise to stop.

    Raises:
        MoetError: MD-SRC-02 a file cannot be read.
    """
    counted = {name: data for name, data in small.items() if name in IDENTITY_FILES}
    total = sum(path.stat().st_size for path in weights) + sum(map(len, counted.values()))
    files = [hash_bytes(name, data) for name, data in counted.items()]
    done = sum(file.bytes for file in files)
    for path in weights:
        file = hash_file(path, partial(_add, on_bytes, done, total))
        done += file.bytes
        files.append(file)
    return identity_of(files)


def identity_of(files: Iterable[SourceFile]) -> Identity:
    """The identity of a source from the hashes of its weights and small files."""
    ordered = sorted(files, key=lambda file: file.name)
    whole = blake3.blake3(f"{FORMAT_VERSION} {QUANTIZER_VERSION}\n".encode())
    for file in ordered:
        whole.update(f"{file.name}\0{file.bytes}\0{file.blake3}\n".encode())
    return Identity(whole.hexdigest(), tuple(ordered))


def _add(on_bytes: Callable[[int, int], None], start: int, total: int, done: int) -> None:
    on_bytes(start + done, total)


def hash_bytes(name: str, data: bytes) -> SourceFile:
    """The record of a small file."""
    return SourceFile(name, len(data), blake3.blake3(data).hexdigest())


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> SourceFile:
    """Name, size and blake3 of one file.

    Raises:
        MoetError: MD-SRC-02 it cannot be read.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = bytearray(_CHUNK_BYTES)
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            while n_read := file.readinto(buffer):
                hasher.update(memoryview(buffer)[:n_read])
                done += n_read
                on_bytes(done)
    except OSError as error:
        reason = error.strerror or str(error)
        raise fail("MD-SRC-02", file=path.name, reason=reason) from error
    return SourceFile(path.name, done, hasher.hexdigest())
