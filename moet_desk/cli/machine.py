"""The computer a command is about: this one, or a record of another. Runs in the main thread."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moet_desk.cli.context import Invocation
from moet_desk.errors import fail

if TYPE_CHECKING:
    from moet_desk.locations import Locations
    from moet_desk.machine import MachineFacts, PackFact


def machine_facts(
    invocation: Invocation, record: Path | None, *, with_packs: bool = False
) -> MachineFacts:
    """What is known of the computer.

    Args:
        invocation: names the folders.
        record: a file that `doctor --record` made; None is this computer.
        with_packs: whether to look at the installed models too.

    Raises:
        MoetError: MD-PLAN-05 the file is no record.
    """
    if record is not None:
        return read_record(record)
    from moet_desk.probing import look
    from moet_desk.probing.rates import read_rates

    places = invocation.locations
    return look(
        _folders(places),
        rates=read_rates(places.data_dir),
        packs=_packs(invocation) if with_packs else (),
    )


def _folders(places: Locations) -> dict[str, Path]:
    """The models' folder, and the other files' if that is on another drive."""
    folders = {"models": places.models_dir, "data": places.data_dir}
    numbers = {use: _existing(folder).stat().st_dev for use, folder in folders.items()}
    if numbers["models"] == numbers["data"]:
        del folders["data"]
    return folders


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def read_record(path: Path) -> MachineFacts:
    """A recorded computer.

    Raises:
        MoetError: MD-PLAN-05.
    """
    from moet_desk.machine import from_json

    try:
        return from_json(path.read_bytes())
    except OSError as error:
        raise fail("MD-PLAN-05", path=str(path), reason=error.strerror or str(error)) from error
    except ValueError as error:
        raise fail("MD-PLAN-05", path=str(path), reason=str(error)) from error


def _packs(invocation: Invocation) -> tuple[PackFact, ...]:
    from moet_desk.engine.gate_file import read_gate
    from moet_desk.machine import PackFact

    return tuple(
        PackFact(name=pack.name, state=pack.state.value, problem=pack.error.cause)
        if pack.error is not None
        else PackFact(
            name=pack.name,
            state=pack.state.value,
            has_gate=read_gate(pack.path) is not None,
            dense_bytes=sizes[0],
            dense_rounded_bytes=sizes[1],
        )
        for pack in invocation.library.packs()
        for sizes in [_dense(pack.path)]
    )


def _dense(pack: Path) -> tuple[int, int] | tuple[None, None]:
    """Bytes of the dense weights, as stored and rounded; None if the file cannot be read."""
    from moet_desk.engine.planned_model import dense_saving, loaded_bytes
    from moet_desk.errors import MoetError

    try:
        stored = loaded_bytes(pack)
        return stored, stored - dense_saving(pack)
    except (OSError, MoetError):
        return None, None
