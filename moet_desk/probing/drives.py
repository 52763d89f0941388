"""The drive behind a folder: its kind, its room, and whether it can be read directly."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moet_desk.machine import Drive
from moet_desk.probing.memory import SystemFiles

_VIRTUAL = re.compile("vd|xvd|loop|ram|zram")
_NETWORK = frozenset("nfs nfs4 cifs smb3 smbfs sshfs fuse.sshfs 9p ceph glusterfs afs".split())


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    point: str
    filesystem: str
    source: str
    number: str  # "259:2"


def look_at_drive(folder: Path, use: str, files: SystemFiles) -> Drive:
    """The drive that `folder` is or will be on."""
    folder = folder.absolute()
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    mounts = read_mounts(_text(files.proc / "self" / "mountinfo"))
    mount = find_mount(mounts, str(place.resolve()))
    usage = shutil.disk_usage(place)
    kind = _block_device(files, mount.number) if mount is not None else BlockDevice("")
    return Drive(
        folder=str(folder),
        use=use,
        filesystem=mount.filesystem if mount is not None else "unknown",
        device=kind.name or (mount.source if mount is not None else "unknown"),
        total=usage.total,
        free=usage.free,
        is_nvme=kind.is_nvme,
        is_rotational=kind.is_rotational,
        is_network=mount is not None and mount.filesystem in _NETWORK,
        direct=_direct_works(place),
    )


def read_mounts(text: str) -> list[Mount]:
    """Read /proc/self/mountinfo; lines of another shape are passed over."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if separator and len(left) >= 5 and len(right) >= 2:
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), left[4])
            mounts.append(Mount(point, right[0], right[1], left[2]))
    return mounts


def find_mount(mounts: list[Mount], path: str) -> Mount | None:
    """The mount that a path is on: the last one of the longest point."""
    best = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A whole drive; None is "not known"."""

    name: str
    is_nvme: bool | None = None
    is_rotational: bool | None = None


def _block_device(files: SystemFiles, number: str) -> BlockDevice:
    """The drive of a device number. A partition's folder lies in its drive's."""
    link = files.sys / "dev" / "block" / number
    if not link.exists():
        return BlockDevice("")
    folder = link.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    behind = sorted(path.name for path in (folder / "slaves").glob("*"))
    names = behind or [folder.name]  # encrypted and joined drives stand on others
    if all(_VIRTUAL.match(name) for name in names):
        return BlockDevice(folder.name)  # hides what is behind it, and says that it rotates
    rotational = _text(folder / "queue" / "rotational").strip()
    return BlockDevice(
        folder.name,
        is_nvme=all(name.startswith("nvme") for name in names),
        is_rotational=None if rotational not in ("0", "1") else rotational == "1",
    )


def _direct_works(folder: Path) -> bool | None:
    """Whether a file here can be opened past the page cache; None: it could not be tried."""
    if not hasattr(os, "O_DIRECT"):
        return None
    trial = folder / f".moet-desk-direct-{os.getpid()}"
    try:
        fd = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return None
    os.close(fd)
    try:
        os.close(os.open(trial, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    else:
        return True
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
