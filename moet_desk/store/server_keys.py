"""Keys of other servers, in one file that only its owner may read. Any thread."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moet_desk.errors import fail
from moet_desk.store.state_file import change_record, read_record


def read_key(path: Path, origin: str) -> str:
    """The key kept for a server ("https://host:port"); empty if there is none.

    Raises:
        MoetError: MD-CONN-07, others may read the file.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    if stat.S_IMODE(mode) & 0o077:
        raise fail("MD-CONN-07", path=str(path))
    keys = read_record(path).get("keys")
    key = keys.get(origin) if isinstance(keys, dict) else None
    return key if isinstance(key, str) else ""


def save_key(path: Path, origin: str, key: str) -> None:
    """Keep a key for a server; an empty one forgets it.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03.
    """

    def changed(record: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = record.get("keys")
        keys = {**(kept if isinstance(kept, dict) else {}), origin: key}
        return {"schema": 1, "keys": {name: value for name, value in keys.items() if value}}

    change_record(path, changed)
