"""Small records of the app that outlive its window: what the wizard was told, the last model.

A record is a JSON object in a file that is replaced whole. One that cannot be read counts as empty:
nothing in it is worth a start that fails. Any thread; imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moet_desk.store.durable import disk_errors, replace_file


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file; empty if there is none or it is damaged."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def change_record(path: Path, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Put what `change` makes of the record in its place.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03; the old record is still there. Also if it cannot be
            read just now: what else it holds would be lost.
    """
    with disk_errors(path), contextlib.suppress(FileNotFoundError):
        path.read_bytes()
    write_record(path, change(read_record(path)))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Put a record in the place of the file's.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03; the old record is still there.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(dict(record), indent=1).encode()], mode=0o600)
