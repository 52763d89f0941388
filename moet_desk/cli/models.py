"""`pack`, `ls`, `show`, `rm`: the models on this computer. Runs in the main thread."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.context import Invocation, Size, machine_option, output_options
from moet_desk.cli.output import (
    Format,
    print_document,
    print_event,
    print_result,
    print_table,
    report_error,
    say,
)
from moet_desk.errors import ExitCode, MoetError, fail
from moet_desk.units import show_disk

if TYPE_CHECKING:
    from moet_desk.store.library import InstalledPack
    from moet_desk.store.pack_format import PackMeta


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Model names for the shell."""
    invocation = ctx.find_object(Invocation) or Invocation()
    names = {"demo", *(pack.name for pack in invocation.library.packs())}
    return sorted(name for name in names if name.startswith(incomplete))


# -- pack ------------------------------------------------------------------------------------


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the model here; that of the folder or file by default.")
@click.option(
    "--memory-budget", type=Size(), default="2GiB", show_default=True, help="RAM for packing."
)
@click.option("--wait", is_flag=True, help="If it is being packed already, wait and take over.")
@output_options
@click.pass_obj
def pack(
    invocation: Invocation, source: Path, name: str | None, memory_budget: int, *, wait: bool
) -> int:
    """Make a pack from SOURCE, a folder with a model's files or a .gguf file.

    Of a split GGUF file any part will do. Started again after an interruption it goes on where it
    stopped. "demo" stands for the model that comes with the program.
    """
    return pack_folder(invocation, source, name, memory_budget=memory_budget, wait=wait)


def pack_folder(
    invocation: Invocation, source: Path, name: str | None, *, memory_budget: int, wait: bool
) -> int:
    """Pack a folder or GGUF file, with reports in the wanted format; returns the exit code.

    Raises:
        MoetError: as `packing.pack_source`, unless it was interrupted.
    """
    from moet_desk.cli import packing
    from moet_desk.cli.signals import interruptible
    from moet_desk.store.library import DEMO, embedded_source, look_at
    from moet_desk.store.source_paths import source_name

    if str(source) == DEMO and not source.exists():
        source, name = embedded_source(), DEMO if name is None else name
    dest = invocation.library.path_for(source_name(source) if name is None else name)
    row_bytes = packing.row_bytes(packing.read_plan(source))
    report = packing.PackReport(invocation.format, row_bytes=row_bytes, quiet=invocation.quiet)
    with interruptible() as interrupt:
        try:
            packing.pack_source(
                source,
                dest,
                memory_budget=memory_budget,
                wait=wait,
                report=report,
                interrupt=interrupt,
            )
        except MoetError as error:
            if not interrupt.asked():
                raise
            report.close()
            report_error(error, invocation.format)
            return interrupt.exit_code
        finally:
            report.close()
    print_made(invocation, "packed", look_at(dest))
    return ExitCode.OK


def print_made(invocation: Invocation, event: str, made: InstalledPack) -> None:
    """Say that a pack is there; `event` is "packed" or "pulled"."""
    fields = {"model": made.name, **_summary(made)}
    if invocation.format is Format.NDJSON:
        print_event(event, **fields)
    elif invocation.format is Format.JSON:
        print_document(fields)
    else:
        verb = event.capitalize()
        invocation.say(f"{verb} {made.name}: {made.rows} experts, {show_disk(made.bytes)}.")
        if sys.stderr.isatty():
            invocation.say(f"Next: moet-desk run {made.name}")


# -- ls, show, rm ----------------------------------------------------------------------------


@click.command()
@click.option("--available", is_flag=True, help="Models that are known instead of installed.")
@click.option("--fit", is_flag=True, help="With --available: whether they fit here, and how fast.")
@machine_option
@output_options
@click.pass_obj
def ls(invocation: Invocation, machine: Path | None, *, available: bool, fit: bool) -> None:
    """List the models on this computer, or those that are known."""
    if available:
        from moet_desk.cli.available import list_available

        list_available(invocation, machine, fit=fit or machine is not None)
        return
    if fit or machine is not None:
        raise click.UsageError("--fit and --machine need --available")
    from moet_desk.store.durable import free_bytes
    from moet_desk.store.library import DEMO

    packs = invocation.library.packs()
    folder = invocation.library.models_dir
    if invocation.format is Format.NDJSON:
        for found in packs:
            print_event("model", name=found.name, **_summary(found))
        return
    if invocation.format is Format.JSON:
        models = [{"name": found.name, **_summary(found)} for found in packs]
        document = {"models": models, "models_dir": str(folder), "free_bytes": free_bytes(folder)}
        print_document(document)
        return
    if packs:
        rows = [["Name", "State", "Size", "Experts", "Family"]]
        for found in packs:
            family = found.meta.model_type if found.meta else "-"
            rows.append(
                [found.name, _state(found), show_disk(found.bytes), str(found.rows or "-"), family]
            )
        print_table(rows)
    if not any(found.name == DEMO for found in packs):
        invocation.say(f"The model {DEMO} comes with the program; it is packed at its first use.")


@click.command()
@click.argument("model", default="demo", shell_complete=complete_model)
@output_options
@click.pass_obj
def show(invocation: Invocation, model: str) -> None:
    """Show what MODEL is and how it is stored."""
    found = invocation.library.find(model)
    details = {"name": found.name, **_summary(found)}
    if found.meta is not None:
        wished_gate = invocation.load_settings().settings.answers.gate
        details |= _details(found.path, found.meta, wished_gate)
    if found.error is not None:
        details["error"] = found.error.to_dict()
    if invocation.format is not Format.HUMAN:
        print_result(invocation.format, "model", details)
        return
    details["state"] = _state(found)
    if details.get("gate_tau") is None:
        details.pop("gate_tau", None)  # most packs have none
    if "gate" in details:
        details["gate"] = _gate_words(details["gate"])
    if found.error is not None:
        details["error"] = f"{found.error.code} {found.error.cause}"
    rows = []
    for name, value in details.items():
        if name.endswith("bytes") and isinstance(value, int):
            value = show_disk(value)
        rows.append([name.removesuffix("_bytes").replace("_", " "), str(value)])
    print_table(rows)


@click.command()
@click.argument("model", shell_complete=complete_model)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_options
@click.pass_obj
def rm(invocation: Invocation, model: str, *, yes: bool) -> int:
    """Delete MODEL from this computer, and what was downloaded for it. Chats are kept."""
    from moet_desk.store import pull_state
    from moet_desk.store.jobs import JobStore

    job = JobStore(invocation.locations.jobs_dir).running(model)
    if job is not None:  # it may not have locked the pack yet, and would begin anew
        raise fail("MD-PACK-09", path=job.record.id, pid=job.pid)
    source = invocation.locations.sources_dir / model
    fetched = model in pull_state.downloads(invocation.locations.sources_dir)
    n_bytes = pull_state.disk_bytes(source) if fetched else 0
    packed = not fetched or invocation.library.has(model)
    if packed:
        n_bytes += invocation.library.find(model).bytes
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError("Deleting needs --yes when nobody can be asked")
        what = f"{model} and its download" if fetched and packed else model
        if not click.confirm(f"Delete {what} ({show_disk(n_bytes)})?", err=True):
            say("Nothing was deleted.")
            return ExitCode.FAILED
    freed = invocation.library.remove(model) if packed else 0
    if fetched:
        freed += pull_state.remove_download(source)
    if invocation.format is Format.HUMAN:
        invocation.say(f"Deleted {model}; {show_disk(freed)} are free again.")
    else:
        print_result(invocation.format, "removed", {"model": model, "freed_bytes": freed})
    return ExitCode.OK


def _state(found: InstalledPack) -> str:
    if found.state.name == "INCOMPLETE":
        return f"{found.state.value} {found.rows_done}/{found.rows or '?'}"
    return found.state.value


def _summary(found: InstalledPack) -> dict[str, Any]:
    meta = found.meta
    return {
        "state": found.state.value,
        "path": str(found.path),
        "bytes": found.bytes,
        "rows_done": found.rows_done,
        "rows": found.rows or None,
        "identity": meta.identity if meta else None,
        "family": meta.model_type if meta else None,
    }


def _gate_words(gate: Mapping[str, Any]) -> str:
    """Below which probability balanced answers make a token again, and who says so."""
    source = gate["source"]
    if gate["date"]:
        source = f"calibrated {gate['date']}, budget {gate['budget']:.0%}"
    if gate["caught"] is not None:
        source += f", catches {gate['caught']:.0%} of flips"
    return f"below {gate['tau']:.2f} ({source})"


def _details(path: Path, meta: PackMeta, wished_gate: float | None) -> dict[str, Any]:
    from moet_desk.cli.bench_record import rounded
    from moet_desk.engine.gate_file import gate_in_use, read_gate

    gate, used = read_gate(path), gate_in_use(path, wished_gate)
    template = path / "chat_template.jinja"
    digest = hashlib.sha256(template.read_bytes()).hexdigest() if template.is_file() else None
    return {
        "hidden": meta.hidden,
        "expert_inner": meta.inter,
        "moe_layers": len(meta.moe_layers),
        "experts_per_layer": meta.n_experts,
        "source_format": meta.source_format,
        "fine_is_lossless": meta.fine_is_lossless,
        "format": meta.format,
        "quantizer": meta.quantizer,
        "base_row_bytes": meta.base_row_bytes,
        "fine_row_bytes": meta.fine_row_bytes,
        "dense_bytes": meta.dense_bytes,
        "model_context": _model_context(path),
        "template_sha256": digest,
        "source_files": [file.name for file in meta.source],
        "gate_tau": gate.tau if gate is not None else None,
        "gate": {
            "tau": used.tau,
            "source": used.source.value,
            "date": used.date or None,
            "budget": rounded(used.budget, 6),
            "rerun": rounded(used.rerun, 6),
            "caught": rounded(used.caught, 6),
        },
    }


def _model_context(path: Path) -> int | None:
    try:
        config = json.loads((path / "config.json").read_bytes())
        text = config.get("text_config") or {}
        found = config.get("max_position_embeddings", text.get("max_position_embeddings"))
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None
