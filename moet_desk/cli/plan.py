"""`plan`: how a model would live on a computer, before anything is loaded or downloaded.

Runs in the main thread; imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moet_desk.cli.context import (
    Invocation,
    Size,
    device_option,
    engine_options,
    machine_option,
    output_options,
)
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import Format, print_document, print_event, print_text, report_error
from moet_desk.errors import ExitCode, MoetError, fail

if TYPE_CHECKING:
    from moet_desk.engine.handle import EngineOptions
    from moet_desk.engine.planned_model import PlannedModel


def complete_known(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Installed and known models for the shell."""
    from moet_desk.catalogue import load_catalogue

    known = [entry.name for entry in load_catalogue() if entry.name.startswith(incomplete)]
    return sorted({*known, *complete_model(ctx, param, incomplete)})


@click.command()
@click.argument("model", shell_complete=complete_known)
@click.option("--context", type=click.IntRange(min=64), help="Tokens of a conversation.")
@click.option("--ram", type=Size(), help="RAM the program may use, like 48GiB.")
@click.option("--vram", type=Size(), help="Memory of the card it may use, like 20GiB.")
@click.option(
    "--quality", type=click.Choice(["fast", "balanced", "exact"]), help="Of the forecast's answers."
)
@click.option(
    "--kv-format",
    type=click.Choice(["auto", "nvfp4", "fp8", "bf16", "f32"]),
    help="How the memory of a chat is stored.",
)
@click.option(
    "--dense-format",
    type=click.Choice(["auto", "stored", "int8"]),
    help="How weights that are no experts are kept; auto rounds them where a card needs it.",
)
@device_option
@machine_option
@output_options
@click.pass_obj
def plan(
    invocation: Invocation,
    model: str,
    context: int | None,
    ram: int | None,
    vram: int | None,
    quality: str | None,
    kv_format: str | None,
    dense_format: str | None,
    device: str | None,
    machine: Path | None,
) -> int:
    """Show what every tier of MODEL takes, and a forecast of its speed.

    MODEL is installed, or one of `moet-desk ls --available`, or a folder or .gguf file that is not
    packed yet. Exits with 0 only if it fits and runs.
    """
    from moet_desk.cli.machine import machine_facts
    from moet_desk.cli.plan_words import as_fields, as_text
    from moet_desk.engine.planning import Refusal, plan_model

    settings = invocation.load_settings(
        memory__context=context,
        memory__ram=ram,
        memory__kv_format=kv_format,
        memory__dense_format=dense_format,
        answers__quality=quality,
        engine__device=device,
    ).settings
    options: EngineOptions = replace(
        engine_options(settings), vram_bytes=settings.memory.vram_limit if vram is None else vram
    )
    wanted = find_model(invocation, model)
    facts = machine_facts(invocation, machine)
    answer = plan_model(facts, wanted, options)
    error: MoetError | None = answer.error if isinstance(answer, Refusal) else None
    if error is None and wanted.not_yet:
        error = fail("MD-PLAN-04", model=wanted.name, reason=wanted.not_yet)
    if invocation.format is Format.HUMAN:
        print_text(as_text(wanted, answer, facts))
        return ExitCode.OK if error is None else report_error(error, Format.HUMAN)
    fields = as_fields(wanted, answer, facts)
    if invocation.format is Format.JSON:
        print_document(fields)
    else:
        print_event("plan", **fields)
    return ExitCode.OK if error is None else error.spec.exit


def find_model(invocation: Invocation, name: str) -> PlannedModel:
    """An installed model (the demo model is packed if need be), else one of the catalogue, else
    files on this computer.

    Raises:
        MoetError: MD-LIB-01 it is none of them; MD-PACK-.. it is installed and cannot be used;
            MD-SRC-.., MD-GGUF-.. the files cannot be packed.
    """
    from moet_desk.catalogue import find_entry
    from moet_desk.engine.planned_model import from_catalogue, from_pack
    from moet_desk.store.source_paths import is_local, source_name

    try:
        return from_pack(invocation.model_path(name))
    except MoetError as error:
        if error.code != "MD-LIB-01":
            raise
        entry = find_entry(name)
        if entry is not None:
            return from_catalogue(entry)
        if not is_local(name):
            raise
        from moet_desk.cli.desk_sources import planned_local

        path = Path(name).expanduser()
        return planned_local(path, source_name(path))[1]
