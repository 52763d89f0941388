"""RAM, and what a container or a limit leaves of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from moet_desk.machine import Memory

_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 for "no limit"."""


@dataclass(frozen=True, slots=True)
class SystemFiles:
    """Where the kernel shows its state; tests point it at folders of their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    root: Path = Path("/")


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory limit of a control group, and what is used of it."""

    limit: int
    used: int
    version: int

    @property
    def room(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used)


def read_memory(files: SystemFiles | None = None) -> Memory:
    """RAM that may be used; swap is told apart and never counted."""
    files = files or SystemFiles()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = container_limit(files)
    available = memory.available
    if limit is not None:
        available = min(available, limit.room)
    return Memory(
        total=memory.total,
        available=available,
        swap_total=swap.total,
        swap_used=swap.used,
        container_limit=limit.limit if limit is not None and limit.limit < memory.total else None,
        cgroup=limit.version if limit is not None else None,
        lockable=_lockable(),
    )


def container_limit(files: SystemFiles) -> Limit | None:
    """The tightest limit of this process's control groups; None if there is none."""
    found = [*_version_2(files), *_version_1(files)]
    return min(found, key=lambda limit: limit.room, default=None)


def _groups(files: SystemFiles) -> dict[str, str]:
    """Path of this process's group by controller; "" is version 2's."""
    groups = {}
    for line in _text(files.proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _version_2(files: SystemFiles) -> list[Limit]:
    mount, group = files.sys / "fs" / "cgroup", _groups(files).get("", "/")
    found = []
    for folder in _upwards(mount, group):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            # the page cache is charged to the group too, and given back when it is needed
            used -= _statistic(folder / "memory.stat", "inactive_file")
            found.append(Limit(limit, max(0, used), 2))
    return found


def _version_1(files: SystemFiles) -> list[Limit]:
    mount, group = files.sys / "fs" / "cgroup" / "memory", _groups(files).get("memory", "/")
    found = []
    for folder in _upwards(mount, group):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            used -= _statistic(folder / "memory.stat", "total_inactive_file")
            found.append(Limit(limit, max(0, used), 1))
    return found


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and those above it; in a container only the mount itself may exist."""
    inner = PurePosixPath("/" + group.lstrip("/"))
    parts = [inner, *inner.parents] if ".." not in inner.parts else [PurePosixPath("/")]
    folders = [mount / part.relative_to("/") for part in parts]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _statistic(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _lockable() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
