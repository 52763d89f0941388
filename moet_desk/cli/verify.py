"""`verify`: every byte of a pack against its checksums, and mending it. Runs in the main thread."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from moet_desk.cli.context import Invocation, output_options
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import Format, print_document, print_event, print_text
from moet_desk.errors import ExitCode, MoetError

if TYPE_CHECKING:
    from moet_desk.cli.packing import PackReport
    from moet_desk.store.pack_verify import VerifyReport


@click.command()
@click.argument("model", default="demo", shell_complete=complete_model)
@click.option("--repair", is_flag=True, help="Make what is damaged again from the source.")
@click.option("--source", type=click.Path(path_type=Path), help="Folder or file it was made from.")
@output_options
@click.pass_obj
def verify(invocation: Invocation, model: str, source: Path | None, *, repair: bool) -> int:
    """Compare every byte of MODEL with its checksums; --repair mends what differs.

    Without --source, a model that came from the hub is mended from its files here, and if those
    are gone from the hub, of which only the bytes that are needed are fetched.
    """
    from moet_desk.cli import packing
    from moet_desk.store.pack_verify import verify_pack

    folder = invocation.library.find(model).path
    report = packing.PackReport(invocation.format, row_bytes=0, quiet=invocation.quiet)
    try:
        found, written = verify_pack(folder, progress=report), 0
        if repair and not found.ok:
            written = _repair(invocation, folder, source, found, report)
            found = verify_pack(folder, progress=report)
    finally:
        report.close()
    error = found.error(folder)
    if error is not None:
        raise error
    fields = {"model": model, "ok": True, "rows": 2 * found.meta.n_rows, "repaired": written}
    if invocation.format is Format.NDJSON:
        print_event("verified", **fields)
    elif invocation.format is Format.JSON:
        print_document(fields)
    else:
        mended = f" {written} rows and files were mended." if written else ""
        print_text(f"{model}: all {2 * found.meta.n_rows} rows and all files are right.{mended}")
    return ExitCode.OK


def _repair(
    invocation: Invocation,
    folder: Path,
    source: Path | None,
    found: VerifyReport,
    report: PackReport,
) -> int:
    """Mend a pack; how many rows and files were written.

    Raises:
        MoetError: as `pack_verify.repair_rows`, `hub_repair.repair_from_hub`.
    """
    from moet_desk.cli import packing
    from moet_desk.store.pack_verify import repair_rows

    source = source or _source_here(invocation, folder.name)
    if source is not None:
        return repair_rows(folder, source, packing.read_plan(source), found, progress=report)
    from moet_desk.store.fetch import Line
    from moet_desk.store.hub import Hub
    from moet_desk.store.hub_repair import repair_from_hub

    work = invocation.locations.sources_dir / f".repair-{folder.name}"
    line, make_plan = Line(Hub()), packing.plan_of_names
    return repair_from_hub(folder, work, found, line, make_plan, progress=report)


def _source_here(invocation: Invocation, model: str) -> Path | None:
    """The folder that a pack was made from, if this program put it there and all of it is left."""
    from moet_desk.store.library import DEMO, embedded_source
    from moet_desk.store.model_source import ModelSource

    if model == DEMO:
        return embedded_source()
    fetched = invocation.locations.sources_dir / model
    try:
        ModelSource.open(fetched)
    except MoetError:
        return None
    return fetched
