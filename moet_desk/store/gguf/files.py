"""Which files a GGUF model is in: one, the parts of a split one, the only one of a folder.

No torch. Any thread.
"""

from __future__ import annotations

import re
from pathlib import Path

from moet_desk.errors import fail

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_PROJECTOR = "mmproj"  # the picture side of a model, shipped beside it


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, or a folder whose weights are in GGUF files only."""
    try:
        if path.is_dir():
            return not any(path.glob("*.safetensors*")) and bool(_models(path))
        return path.suffix.lower() == SUFFIX and path.is_file()
    except OSError:
        return False


def model_name(path: Path) -> str:
    """The name of a model by its file's: without ending and part number."""
    stem = path.name[: -len(SUFFIX)] if path.name.lower().endswith(SUFFIX) else path.name
    part = _PART.fullmatch(stem)
    return part.group(1) if part else stem


def model_files(path: Path) -> list[Path]:
    """The files of a model in order, for one of them or for the folder they are in.

    Raises:
        MoetError: MD-SRC-01 there is none, MD-GGUF-01 parts are missing, MD-GGUF-06 the folder has
            several models.
    """
    if path.is_dir():
        names = _models(path)
        if not names:
            raise fail("MD-SRC-01", path=str(path), missing=f"{SUFFIX} file")
        if len(names) > 1:
            listed = sorted(file.name for file in names.values())
            shown = ", ".join(listed[:3]) + (" ..." if len(listed) > 3 else "")
            raise fail("MD-GGUF-06", path=str(path), n_models=len(names), first=shown)
        (path,) = names.values()
    part = _PART.fullmatch(path.name[: -len(SUFFIX)])
    if part is None:
        return [path]
    stem, _, total = part.groups()
    wanted = [
        path.with_name(f"{stem}-{number:05d}-of-{total}{path.suffix}")
        for number in range(1, int(total) + 1)
    ]
    missing = [file.name for file in wanted if not file.is_file()]
    if missing or not wanted:
        first = missing[0] if missing else path.name
        n_missing, n_parts = len(missing), len(wanted)
        raise fail("MD-GGUF-01", n_missing=n_missing, n_parts=n_parts, first=first)
    return wanted


def _models(folder: Path) -> dict[str, Path]:
    """One file of each model in a folder, by the model's name."""
    found = {}
    for file in sorted(folder.iterdir(), reverse=True):
        is_file = file.suffix.lower() == SUFFIX and file.is_file()
        if is_file and not file.name.lower().startswith(_PROJECTOR):
            found[model_name(file)] = file
    return found
