"""What can be put in order on this user's own folders without a question.

Missing folders, files that others may read, and what a killed process left behind. Nothing that
holds work is touched: packs in the making, downloads that go on, files that are not ours. Looking
and doing are apart, so that looking changes nothing. Any thread, one at a time.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moet_desk.errors import MoetError
from moet_desk.locations import Locations
from moet_desk.store.durable import PARTIAL, clear_leftovers, leftovers
from moet_desk.store.pack_format import PACK_JSON

STALE_S = 3600.0
"""What a process has not touched for so long was left behind by it."""

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_OWN_FILES = (
    "chats.sqlite3*", "app.json", "wizard.json", "rates.json", "doctor-*.json", "server-keys.json",
)  # fmt: skip
_TEMPORARY = (".moet-desk-rate-*", ".moet-desk-direct-*", ".repair-*")


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to put in order: words like "made the folder /x", and how. `do` raises OSError or
    MoetError.
    """

    words: str
    do: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was done, and what could not be and why."""

    done: tuple[str, ...]
    failed: tuple[str, ...]


def tidy(places: Locations, *, now_s: float | None = None) -> Tidied:
    """Do all that `tasks` finds."""
    done, failed = [], []
    for task in tasks(places, now_s=now_s):
        try:
            task.do()
        except (OSError, MoetError) as error:
            reason = error.cause if isinstance(error, MoetError) else error.strerror or str(error)
            failed.append(f"not {task.words}: {reason}")
        else:
            done.append(task.words)
    return Tidied(tuple(done), tuple(failed))


def tasks(places: Locations, *, now_s: float | None = None) -> Iterator[Task]:
    """What there is to do; changes nothing."""
    now_s = time.time() if now_s is None else now_s
    yield from _folders(places)
    yield from _modes(places)
    yield from _temporary(places, now_s)
    yield from _finished_packs(places)


def _folders(places: Locations) -> Iterator[Task]:
    for folder in (
        places.data_dir, places.models_dir, places.sources_dir, places.jobs_dir, places.logs_dir,
        places.run_dir,
    ):  # fmt: skip
        if not folder.exists():
            make = partial(folder.mkdir, _FOLDER_MODE, parents=True, exist_ok=True)
            yield Task(f"made the folder {folder}", make)


def _modes(places: Locations) -> Iterator[Task]:
    """Chats, settings with a key, logs and jobs are nobody else's business."""
    folders = (places.data_dir, places.jobs_dir, places.logs_dir, places.run_dir)
    files = [places.config_file, places.config_file.with_name(places.config_file.name + ".bak")]
    for pattern in _OWN_FILES:
        files += sorted(places.data_dir.glob(pattern))
    for path, mode in [(f, _FOLDER_MODE) for f in folders] + [(f, _FILE_MODE) for f in files]:
        if _is_open(path):
            yield Task(f"made {path} readable by you alone", partial(path.chmod, mode))


def _is_open(path: Path) -> bool:
    """Whether others may read something that is ours."""
    with suppress(OSError):
        found = path.lstat()
        is_ours = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
        return is_ours and bool(found.st_mode & 0o077)
    return False


def _temporary(places: Locations, now_s: float) -> Iterator[Task]:
    found = [places.config_file.with_name(places.config_file.name + PARTIAL)]
    for pattern in _OWN_FILES:
        found += places.data_dir.glob(f"{pattern}{PARTIAL}")
    found += places.jobs_dir.glob(f"*{PARTIAL}")
    for folder in (places.data_dir, places.models_dir, places.sources_dir):
        for pattern in _TEMPORARY:
            found += folder.glob(pattern)
    found += Path(tempfile.gettempdir()).glob("moet-desk-look-*")
    for path in dict.fromkeys(found):
        if _is_stale(path, now_s):
            yield Task(f"removed {path}, left by an ended process", partial(_remove, path))


def _is_stale(path: Path, now_s: float) -> bool:
    with suppress(OSError):
        if path.lstat().st_uid != os.geteuid():
            return False
        inner = path.rglob("*") if path.is_dir() else ()
        return all(now_s - p.lstat().st_mtime > STALE_S for p in (path, *inner))
    return False


def _finished_packs(places: Locations) -> Iterator[Task]:
    """A pack that is complete needs no journal; an incomplete one lives from it."""
    for pack in _entries(places.models_dir):
        if not (pack / PACK_JSON).is_file():
            continue
        if left := leftovers(pack):
            names = ", ".join(sorted(path.name for path in left))
            words = f"removed {names} of the finished pack {pack.name}"
            yield Task(words, partial(clear_leftovers, pack))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return ()
