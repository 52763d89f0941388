"""What a person may give as a model's files on this computer, and the name it gets. No torch."""

from __future__ import annotations

from pathlib import Path

from moet_desk.store.gguf.files import is_gguf, model_name


def is_local(text: str) -> bool:
    """Whether a text names a folder or a GGUF file on this computer rather than a repository."""
    try:
        path = Path(text).expanduser()
        return path.is_dir() or is_gguf(path)
    except (OSError, ValueError, RuntimeError):
        return False


def source_name(path: Path) -> str:
    """The name of a model by where its files are; the hub library's cache names it in a parent."""
    if path.is_file():
        return model_name(path)
    snapshot = path.resolve()
    repo = snapshot.parent.parent.name
    if snapshot.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.rpartition("--")[2]
    return snapshot.name
