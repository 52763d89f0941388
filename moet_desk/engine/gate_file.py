"""gate.json: below which confidence the quality `balanced` reruns a step with FP4 experts.

Measured by `moet-desk calibrate gate` for one pack and kept beside its rows; not part of its
identity. A wrong or missing file only means that the pack has no threshold of its own, so reading
is never an error. Imports no torch. Any thread.
"""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec

from moet_desk.engine.gate_curve import Limit
from moet_desk.engine.handle import GateInfo, GateSource
from moet_desk.errors import MoetError
from moet_desk.store.durable import disk_errors, replace_file
from moet_desk.store.pack_format import GATE_FILE
from moet_desk.store.pack_meta import read_meta

log = logging.getLogger("moet_desk.engine")

SCHEMA = 1
"""Raised when fields change meaning; files of another number are ignored."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Measured(Enum):
    """Which steps were judged."""

    TEXT = "text"  # every token of texts
    ANSWERS = "answers"  # the tokens that `exact` answered to tasks


class GatePoint(msgspec.Struct, frozen=True):
    """What one threshold did on the texts."""

    tau: Share
    rerun: Share  # of all steps
    caught: Share  # of all flips


class Calibration(msgspec.Struct, frozen=True):
    """A pack's threshold and what it was chosen from."""

    schema: int
    identity: str  # of the pack it was measured on
    tau: Share
    limit: Limit
    target: Share
    budget: Share
    curve: list[GatePoint]
    tokens: Count
    flips: Count
    texts: list[str]  # file names
    date: str
    measured: Measured = Measured.TEXT  # files from before there was a choice do not say


def read_gate(pack: Path) -> Calibration | None:
    """The threshold of this pack; None if there is no usable one, and the log says why."""
    path = pack / GATE_FILE
    try:
        gate = msgspec.json.decode(path.read_bytes(), type=Calibration)
        identity = read_meta(pack).identity
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError, MoetError) as problem:
        log.warning("%s is ignored: %s", path, problem)
        return None
    if gate.schema != SCHEMA:
        log.warning("%s is ignored: its schema is %d", path, gate.schema)
        return None
    if gate.identity != identity:
        log.warning("%s is ignored: it was measured on another model", path)
        return None
    return gate


def gate_in_use(pack: Path, setting: float | None) -> GateInfo:
    """The gate of balanced requests that give none: the user's, the pack's own, or ours."""
    if setting is not None:
        return GateInfo(setting, GateSource.SETTINGS)
    found = read_gate(pack)
    if found is None:
        return GateInfo()
    point = next((point for point in found.curve if point.tau == found.tau), None)
    return GateInfo(
        found.tau, GateSource.PACK, date=found.date, budget=found.budget,
        rerun=None if point is None else point.rerun,
        caught=None if point is None else point.caught,
    )  # fmt: skip


def write_gate(pack: Path, gate: Calibration) -> Path:
    """Replace the pack's threshold; after a crash it is the old one or the new one.

    Raises:
        MoetError: MD-DISK-02 the disk is full, MD-DISK-03 it cannot be written.
    """
    path = pack / GATE_FILE
    with disk_errors(path):
        replace_file(path, [msgspec.json.encode(gate)])
    return path
