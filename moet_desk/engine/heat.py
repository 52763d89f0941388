"""heat.json: which experts were used lately, so that the next start fills the pool with the right
ones.

A wrong or missing file only means a cold start, so it is never an error. Written atomically.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from moet_desk.store.pack_format import HEAT_FILE


class _HeatFile(msgspec.Struct):
    rows: list[tuple[int, float]]


def read(pack: Path) -> list[tuple[int, float]]:
    """(row, heat), hottest first; empty if there is no usable file."""
    try:
        return msgspec.json.decode((pack / HEAT_FILE).read_bytes(), type=_HeatFile).rows
    except (OSError, msgspec.MsgspecError):
        return []


def write(pack: Path, rows: list[tuple[int, float]]) -> bool:
    """Replace the saved heat. False if it could not be written (read-only folder, full disk)."""
    target = pack / HEAT_FILE
    draft = target.with_suffix(".tmp")
    try:
        draft.write_bytes(msgspec.json.encode(_HeatFile(rows)))
        draft.replace(target)
    except OSError:
        return False
    return True
