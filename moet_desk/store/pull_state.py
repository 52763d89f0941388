"""What a download remembers on disk: its pinned commit, what was compared, a pack's origin.

Owns `.pull/` in a source's folder and `origin.json` in a pack. Files are replaced whole and synced,
so a killed download finds a record that was true. Knows no network and no torch. Any thread.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import blake3
import msgspec

from moet_desk.errors import fail
from moet_desk.store.deepseek_template import SCRIPTS
from moet_desk.store.durable import disk_errors, replace_file
from moet_desk.store.headers import INDEX_FILE
from moet_desk.store.pack_format import (
    COPIED_FILES,
    FORMAT_VERSION,
    ORIGIN_FILE,
    QUANTIZER_VERSION,
)
from moet_desk.store.quantization import HF_QUANT_FILE
from moet_desk.store.tiktoken import TIKTOKEN_FILE

STATE_VERSION = 1
PULL_FOLDER = ".pull"
MADE_FROM = (TIKTOKEN_FILE, *SCRIPTS)
"""Files of which files of the pack are made."""

SMALL_FILES = (*COPIED_FILES, INDEX_FILE, HF_QUANT_FILE, *MADE_FROM)
"""What is fetched before anything else, when the repository has it."""

_STATE_FILE = "state.json"
_HEADERS = "headers"


class FileRecord(msgspec.Struct, frozen=True):
    """A file as the hub lists it; exactly one of the hashes is there."""

    name: str
    size: int
    sha256: str = ""
    git_sha1: str = ""


class PullState(msgspec.Struct, frozen=True):
    """A download that has begun. `landed`: blake3 of files that matched the hub's hash."""

    format: int
    repo: str
    revision: str  # as asked for, "" for the default branch
    commit: str
    files: list[FileRecord]
    landed: dict[str, str] = {}


class Origin(msgspec.Struct, frozen=True):
    """Where a pack was fetched from."""

    format: int
    repo: str
    commit: str
    files: list[FileRecord]  # those that the pack was made from


def state_folder(work: Path) -> Path:
    """Where a source's folder keeps the notes of its download."""
    return work / PULL_FOLDER


def header_path(work: Path, shard: str) -> Path:
    """Where the header of a shard is kept."""
    return state_folder(work) / _HEADERS / shard


def read_state(work: Path) -> PullState | None:
    """The notes of a download; None: there are none that can be used."""
    try:
        state = msgspec.json.decode((state_folder(work) / _STATE_FILE).read_bytes(), type=PullState)
    except (OSError, ValueError, RecursionError):
        return None
    return state if state.format == STATE_VERSION else None


def write_state(work: Path, state: PullState) -> None:
    """Keep the notes durably. Raises MD-DISK-02 or 03."""
    path = state_folder(work) / _STATE_FILE
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [msgspec.json.format(msgspec.json.encode(state), indent=1)])


def read_origin(pack: Path) -> Origin | None:
    """Where a pack was fetched from; None: from a folder, or it does not say."""
    try:
        origin = msgspec.json.decode((pack / ORIGIN_FILE).read_bytes(), type=Origin)
    except (OSError, ValueError, RecursionError):
        return None
    return origin if origin.format == STATE_VERSION else None


def write_origin(pack: Path, origin: Origin) -> None:
    """Keep where a pack is from. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(origin), indent=1)
    replace_file(pack / ORIGIN_FILE, [data])


def fingerprint(files: Iterable[FileRecord]) -> str:
    """What the journal of a streamed pack belongs to, in hex: the hub's own hashes.

    The identity proper is a hash over all bytes and is known only at the end.
    """
    whole = blake3.blake3(f"pull {FORMAT_VERSION} {QUANTIZER_VERSION}\n".encode())
    for file in sorted(files, key=lambda file: file.name):
        whole.update(f"{file.name}\0{file.size}\0{file.sha256}{file.git_sha1}\n".encode())
    return whole.hexdigest()


def drop_headers(work: Path) -> None:
    """Forget all headers, so that they are fetched again."""
    shutil.rmtree(state_folder(work) / _HEADERS, ignore_errors=True)


def downloads(sources_dir: Path) -> list[str]:
    """Names of the sources that were fetched or are being fetched."""
    try:
        return sorted(p.name for p in sources_dir.iterdir() if state_folder(p).is_dir())
    except OSError:
        return []


def disk_bytes(work: Path) -> int:
    """What a source's folder takes on disk."""
    try:
        return sum(path.lstat().st_blocks * 512 for path in work.rglob("*"))
    except OSError:
        return 0


def remove_download(work: Path) -> int:
    """Delete a fetched source and return the bytes that became free; foreign files stay.

    Raises:
        MoetError: MD-LIB-01 nothing was fetched there, MD-DISK-03.
    """
    state = read_state(work)
    if not state_folder(work).is_dir():
        raise fail("MD-LIB-01", model=work.name, path=str(work.parent))
    before = disk_bytes(work)
    with disk_errors(work):
        for file in state.files if state else ():
            for suffix in ("", ".part", ".partial"):
                if "/" not in file.name or file.name in MADE_FROM:
                    (work / f"{file.name}{suffix}").unlink(missing_ok=True)
        for folder in {(work / name).parent for name in MADE_FROM} - {work}:
            with contextlib.suppress(OSError):  # it is not there, or holds more
                folder.rmdir()
        shutil.rmtree(state_folder(work))
        if not any(work.iterdir()):
            work.rmdir()
            return before
    return before - disk_bytes(work)
