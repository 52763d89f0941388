"""The packs on this computer: which there are, in what state, and removing one.

Owns the models folder as a whole; the inside of a pack belongs to the packer and its reader. States
are read from the pack record, the journal and file sizes; checksums are `verify`'s work. Deletes
only files that the packer or the engine wrote. Any thread; imports no torch.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import moet_desk
from moet_desk.errors import MoetError, fail
from moet_desk.store.durable import PARTIAL, allocated, disk_errors, pack_lock
from moet_desk.store.pack_format import (
    BASE_FILE,
    COPIED_FILES,
    DENSE_FILE,
    DIGEST_FILE,
    FINE_FILE,
    GATE_FILE,
    HEAT_FILE,
    JOURNAL_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    PACK_JSON,
    PackMeta,
)
from moet_desk.store.pack_meta import check_sizes, read_meta

DEMO = "demo"
"""Name of the model that comes with the program."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REMOVING = ".removing-"  # a folder of this name is on its way out and is no pack any more
_OWN_FILES = (
    *(PACK_JSON, DENSE_FILE, BASE_FILE, FINE_FILE, DIGEST_FILE, HEAT_FILE, GATE_FILE),
    *(ORIGIN_FILE, JOURNAL_FILE, LOCK_FILE),
    *COPIED_FILES,
)


class PackState(Enum):
    """What can be done with a pack; the values are shown to people."""

    READY = "ready"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    OTHER_FORMAT = "other format"


@dataclass(frozen=True, slots=True)
class InstalledPack:
    """One folder of the models folder.

    `error` says why it is not ready; `meta` is None unless its record could be read.
    """

    name: str
    path: Path
    state: PackState
    bytes: int  # on disk
    rows_done: int
    rows: int  # 0: not known yet
    meta: PackMeta | None = None
    error: MoetError | None = None


class Library:
    """The packs below one folder, which need not exist yet."""

    def __init__(self, models_dir: Path) -> None:
        self.models_dir = models_dir

    def packs(self) -> list[InstalledPack]:
        """All packs by name; folders that the packer did not make are left out."""
        try:
            folders = sorted(path for path in self.models_dir.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            reason = error.strerror or str(error)
            raise fail("MD-PACK-07", path=str(self.models_dir), reason=reason) from error
        return [look_at(path) for path in folders if _is_pack(path)]

    def find(self, name: str) -> InstalledPack:
        """The pack of this name, in whatever state.

        Raises:
            MoetError: MD-LIB-01 there is none.
        """
        path = self.models_dir / name
        if not _NAME.fullmatch(name) or not _is_pack(path):
            raise fail("MD-LIB-01", model=name, path=str(self.models_dir))
        return look_at(path)

    def has(self, name: str) -> bool:
        """Whether there is a pack of this name, in whatever state."""
        return bool(_NAME.fullmatch(name)) and _is_pack(self.models_dir / name)

    def needs_packing(self, name: str) -> bool:
        """Whether a model whose source is at hand must be packed (again) before it can be used.

        A damaged pack is not made again unasked: `verify --repair` mends it.
        """
        path = self.models_dir / name
        if not _is_pack(path):
            return True
        return look_at(path).state in (PackState.INCOMPLETE, PackState.OTHER_FORMAT)

    def drop_other_format(self, name: str) -> None:
        """Remove a pack of another format version whose source is at hand, so that nothing is lost.

        Raises:
            MoetError: as `remove`.
        """
        path = self.models_dir / name
        if _is_pack(path) and look_at(path).state is PackState.OTHER_FORMAT:
            self.remove(name)

    def ready(self, name: str) -> Path:
        """The folder of a pack that can be opened.

        Raises:
            MoetError: MD-LIB-01 there is none; MD-PACK-03, 06 or 07, it is not ready.
        """
        pack = self.find(name)
        if pack.error is not None:
            raise pack.error
        return pack.path

    def path_for(self, name: str) -> Path:
        """Where a pack of this name is or will be.

        Raises:
            MoetError: MD-CFG-03 it is no usable name.
        """
        if not _NAME.fullmatch(name):
            raise fail(
                "MD-CFG-03",
                name="--name",
                value=name,
                source="the command",
                reason="letters, digits, dots, - and _ only, and a letter or digit first",
                default="the source folder's name",
            )
        return self.models_dir / name

    def remove(self, name: str) -> int:
        """Delete a pack and return the bytes that became free; foreign files in it stay.

        Raises:
            MoetError: MD-LIB-01 there is none; MD-PACK-09 it is being packed; MD-DISK-03.
        """
        pack = self.find(name)
        leaving = self.models_dir / f"{_REMOVING}{name}"
        with disk_errors(pack.path):
            self._finish_removals()
            with pack_lock(pack.path):
                # From this rename on it is no pack, even if deleting is interrupted.
                pack.path.rename(leaving)
            self._finish_removals()
            if leaving.exists():
                leaving.rename(pack.path)
        return pack.bytes

    def _finish_removals(self) -> None:
        for leaving in self.models_dir.glob(f"{_REMOVING}*"):
            for file in _own_files(leaving):
                file.unlink()
            if not any(leaving.iterdir()):
                leaving.rmdir()


def look_at(path: Path) -> InstalledPack:
    """Read the state of one pack folder. Raises nothing: what is wrong is in the result."""
    n_bytes = sum(allocated(file) for file in _own_files(path))
    try:
        meta = read_meta(path)
        check_sizes(path, meta)
    except MoetError as error:
        return _not_ready(path, n_bytes, error)
    return InstalledPack(path.name, path, PackState.READY, n_bytes, meta.n_rows, meta.n_rows, meta)


def embedded_source() -> Path:
    """The folder of the model that comes with the program.

    In an installed wheel it lies inside the package, in a checkout beside it.

    Raises:
        MoetError: MD-SRC-01 it is not there.
    """
    package = Path(str(importlib.resources.files(moet_desk)))
    for root in (package, package.parent):
        source = root / "assets" / "demo"
        if (source / "config.json").is_file():
            return source
    raise fail("MD-SRC-01", path=str(package / "assets" / "demo"), missing="config.json")


def _is_pack(path: Path) -> bool:
    marks = (PACK_JSON, JOURNAL_FILE, BASE_FILE)
    return not path.name.startswith(".") and any((path / name).is_file() for name in marks)


def _not_ready(path: Path, n_bytes: int, error: MoetError) -> InstalledPack:
    model = path.name
    if error.code == "MD-PACK-03":
        # The row's words name the model; who reads the record does not know it.
        error = fail(error.code, **{**error.facts, "model": model})
        return InstalledPack(model, path, PackState.OTHER_FORMAT, n_bytes, 0, 0, error=error)
    if error.code != "MD-PACK-06" and (path / PACK_JSON).exists():
        return InstalledPack(model, path, PackState.DAMAGED, n_bytes, 0, 0, error=error)
    if error.code != "MD-PACK-06":  # killed before its journal was there
        error = fail("MD-PACK-06", path=str(path), done=0, total="?", model=model)
    done, total = error.facts["done"], error.facts["total"]
    rows = total if isinstance(total, int) else 0
    return InstalledPack(model, path, PackState.INCOMPLETE, n_bytes, done, rows, error=error)


def _own_files(path: Path) -> Iterator[Path]:
    for name in _OWN_FILES:
        for file in (path / name, path / f"{name}{PARTIAL}"):
            if file.is_file():
                yield file
