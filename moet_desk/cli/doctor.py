"""`doctor`: what keeps this computer from being quick, and what to do. Runs in the main thread."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.context import Invocation, machine_option, output_options
from moet_desk.cli.output import Format, print_document, print_event, print_text
from moet_desk.errors import ExitCode, Severity
from moet_desk.errors.disk import unwritable
from moet_desk.units import show_disk, show_memory, show_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from moet_desk.doctor import Examination, Finding
    from moet_desk.machine import MachineFacts, Rates
    from moet_desk.store.tidy import Tidied

OLD_RATES = timedelta(days=90)
"""After so long `--fix` measures again: drives fill up, cards change their slot."""


@click.command()
@click.option("--bench", is_flag=True, help="Measure RAM, drive and card first; some seconds.")
@click.option("--fix", is_flag=True, help="First put in order what can be without a question.")
@click.option("--strict", is_flag=True, help="Exit with 10 if there are warnings.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the computer, without your names, as JSON for --machine.",
)
@machine_option
@output_options
@click.pass_obj
def doctor(
    invocation: Invocation,
    machine: Path | None,
    record: Path | None,
    *,
    bench: bool,
    fix: bool,
    strict: bool,
) -> int:
    """Look for what slows this computer down or keeps it from working.

    Nothing is changed but by --fix, which makes missing folders, keeps others from reading your
    files, removes what killed processes left, and measures what was never or long ago measured.
    What is said afterwards needs you. Measured rates are kept and used for forecasts.
    """
    from moet_desk.cli.machine import machine_facts
    from moet_desk.doctor import examine

    if machine is not None and (bench or fix):
        raise click.UsageError("--bench and --fix are about this computer, --machine is not")
    tidied = _fix(invocation) if fix else None
    if bench or (fix and _is_old(invocation)):
        _measure(invocation)
    facts = machine_facts(invocation, machine, with_packs=True)
    found = examine(facts)
    if record is not None:
        _record(facts, record)
    if invocation.format is Format.HUMAN:
        _print_human(facts, found)
    else:
        _print_data(invocation, facts, found, tidied)
    return ExitCode.STRICT if strict and found.has_warnings else ExitCode.OK


def _measure(invocation: Invocation) -> None:
    from moet_desk.probing.rates import measure, save_rates

    invocation.say("Measuring RAM, the drive of the models and the card ...")
    places = invocation.locations

    def say_next(what: str) -> None:
        if invocation.format is Format.NDJSON:
            print_event("measure", what=what)

    rates = _with_card(measure(places.models_dir, say_next), say_next)
    try:
        save_rates(places.data_dir, rates)
    except OSError as error:
        raise unwritable(places.data_dir, error) from error


def _with_card(rates: Rates, say: Callable[[str], None]) -> Rates:
    """The rates with those of the card, if the driver shows one."""
    from moet_desk.probing.gpus import look_for_gpus

    if not look_for_gpus().gpus:
        return rates  # torch takes seconds to import
    say("the card")
    from moet_desk import hardware
    from moet_desk.engine.cuda.bandwidth import measure_card

    if hardware.probe_accelerator().missing:
        return rates
    hardware.take_card()
    card = measure_card()
    return rates if card is None else replace(rates, pcie=card.pcie, vram=card.vram)


def _is_old(invocation: Invocation) -> bool:
    """Whether forecasts stand on no measurement, or on one that the computer has outlived."""
    from moet_desk.probing.rates import read_rates

    rates = read_rates(invocation.locations.data_dir)
    try:
        measured = datetime.fromisoformat(rates.measured) if rates is not None else None
    except ValueError:
        return True
    return measured is None or datetime.now(UTC) - measured > OLD_RATES


def _fix(invocation: Invocation) -> Tidied:
    """Put in order what needs no question, and say it."""
    from moet_desk.store.tidy import tidy

    tidied = tidy(invocation.locations)
    if invocation.format is Format.NDJSON:
        for words in tidied.done:
            print_event("fixed", what=words)
        for words in tidied.failed:
            print_event("not-fixed", what=words)
    elif invocation.format is Format.HUMAN:
        for words in (*tidied.done, *tidied.failed):
            print_text(f"{words[:1].upper()}{words[1:]}.")
        if not (tidied.done or tidied.failed):
            print_text("There was nothing to put in order.")
        print_text("")
    return tidied


def _record(facts: MachineFacts, path: Path) -> None:
    from moet_desk.machine import to_json, without_names

    try:
        path.write_bytes(to_json(without_names(facts, str(Path.home()))))
    except OSError as error:
        raise unwritable(path, error) from error


# -- for people ------------------------------------------------------------------------------

_MARKS = {Severity.STOPS: "✗", Severity.LOWER: "!", Severity.INFO: "·"}


def _print_human(facts: MachineFacts, found: Examination) -> None:
    for name, value in describe(facts):
        print_text(f"{name:<8}  {value}")
    print_text("")
    for finding in found.findings:
        print_text(f"{_MARKS[finding.severity]} {finding.title}  ({finding.check})")
        print_text(f"  {finding.cause}")
        print_text(f"  Do: {finding.fix}.")
    warnings = sum(row.severity is not Severity.INFO for row in found.findings)
    notes = len(found.findings) - warnings
    print_text(f"{len(found.passed)} checks fine, {warnings} warnings, {notes} notes.")


def describe(facts: MachineFacts) -> list[tuple[str, str]]:
    """The computer in lines of words."""
    lines = [("System", facts.system + (f", in a {facts.container}" if facts.container else ""))]
    for gpu in facts.gpus:
        vram = f"{show_memory(gpu.vram_total)}, {show_memory(gpu.vram_free)} free"
        link = f"PCIe {gpu.link.max_gen or '?'} x{gpu.link.width or '?'}"
        lines.append(("GPU", f"{gpu.name}, {vram}, {link}, driver {facts.driver or '?'}"))
    if not facts.gpus:
        lines.append(("GPU", f"none: {facts.gpu_problem or 'none was found'}"))
    memory = facts.memory
    lines.append(("RAM", f"{show_memory(memory.total)}, {show_memory(memory.available)} free"))
    lines.append(("CPU", f"{facts.cpu.name}, {facts.cpu.usable} of {facts.cpu.cores} cores usable"))
    for drive in facts.drives:
        size = f"{show_disk(drive.free)} of {show_disk(drive.total)} free"
        lines.append(("Drive", f"{drive.folder} on {drive.device} ({drive.filesystem}), {size}"))
    lines.append(("Rates", rates_words(facts.rates)))
    return lines


def rates_words(rates: Rates | None, before: Rates | None = None) -> str:
    """Measured rates, and what they were before if they were."""
    if rates is None:
        return "not measured"
    words = []
    for name, field in _RATES.items():
        value, old = getattr(rates, field), getattr(before, field, None)
        if value is not None:
            was = "" if old is None else f" (was {show_rate(old)})"
            words.append(f"{name} {show_rate(value)}{was}")
    then = f", before on {before.measured[:10]}" if before is not None else ""
    return ", ".join([*words, f"measured {rates.measured[:10]}{then}"])


_RATES = {"RAM copy": "ram_copy", "drive": "drive_read", "PCIe": "pcie", "VRAM": "vram"}


# -- for programs ----------------------------------------------------------------------------


def _print_data(
    invocation: Invocation, facts: MachineFacts, found: Examination, tidied: Tidied | None
) -> None:
    if invocation.format is Format.NDJSON:
        for finding in found.findings:
            print_event("finding", **_fields(finding))
        print_event("doctor", passed=list(found.passed), warnings=found.has_warnings)
        return
    document = as_document(facts, found)
    if tidied is not None:
        document |= {"fixed": list(tidied.done), "not_fixed": list(tidied.failed)}
    print_document(document)


def as_document(facts: MachineFacts, found: Examination) -> dict[str, Any]:
    """All that is known, as fields of JSON."""
    import msgspec

    return {
        "ok": not found.has_warnings,
        "findings": [_fields(finding) for finding in found.findings],
        "passed": list(found.passed),
        "machine": msgspec.to_builtins(facts),
    }


def _fields(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "severity": finding.severity.value,
        "title": finding.title,
        "cause": finding.cause,
        "do": finding.fix,
    }
