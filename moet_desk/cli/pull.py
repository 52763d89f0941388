"""`pull`: fetch a model from the hub and pack it meanwhile. Runs in the main thread.

Owns what a person is told and asked before a download, and the reports during it. The hub's library
and torch are imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.context import Invocation, Size, output_options
from moet_desk.cli.output import Format, Meter, print_document, print_event, report_error, say
from moet_desk.errors import ExitCode, MoetError, fail
from moet_desk.units import GB, show_disk, show_rate

if TYPE_CHECKING:
    from moet_desk.cli.packing import PackReport
    from moet_desk.cli.signals import Interrupt
    from moet_desk.store.fetch import Line
    from moet_desk.store.pack_format import PackProgress
    from moet_desk.store.pull import Fetching
    from moet_desk.store.pull_prepare import Asked, Prepared

YES_COVERS_BYTES = 10 * GB
"""`--yes` agrees to downloads up to this size; larger ones need a word of their own."""


@click.command()
@click.argument("model")
@click.option("--name", help="Name of the model here; the repository's by default.")
@click.option("--revision", default="", help="Branch, tag or commit; pinned when the pull begins.")
@click.option("--reclaim", is_flag=True, help="Delete each file as soon as its rows are packed.")
@click.option("--limit-rate", type=Size(at_least=1), help="Bytes per second at most, like 20MB.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 8),
    default=2,
    show_default=True,
    help="Files fetched at a time.",
)
@click.option(
    "--memory-budget", type=Size(), default="2GiB", show_default=True, help="RAM for packing."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask about sizes up to 10 GB.")
@click.option("--yes-really", is_flag=True, help="Do not ask, whatever the size.")
@click.option("--dry-run", is_flag=True, help="Say what it takes, and stop there.")
@click.option("--background", is_flag=True, help="Go on without this window; see: moet-desk ps")
@output_options
@click.pass_obj
def pull(invocation: Invocation, /, model: str, **options: Any) -> int:
    """Fetch MODEL from the hub and pack it while it arrives.

    MODEL is a repository like deepseek-ai/DeepSeek-V3, or a folder with a model's files or a .gguf
    file, which are packed from where they are. The hub is huggingface.co, or the one of
    HF_ENDPOINT; some models there need moet-desk login first. Interrupted at any moment, the same
    command goes on.
    """
    from moet_desk.store.library import DEMO, embedded_source
    from moet_desk.store.source_paths import is_local

    if is_local(model) or model == DEMO:
        from moet_desk.cli.pull_local import pull_local

        if is_local(model):
            return pull_local(invocation, Path(model).expanduser(), options)
        # what comes with the program is packed without a question everywhere
        options |= {"name": options["name"] or DEMO, "yes_really": True}
        return pull_local(invocation, embedded_source(), options)
    from moet_desk.cli.signals import interruptible

    with interruptible() as interrupt:
        try:
            return _pull(invocation, model, options, interrupt)
        except MoetError as error:
            if not interrupt.asked():
                raise
            report_error(error, invocation.format)
            return interrupt.exit_code


def _pull(invocation: Invocation, model: str, options: dict[str, Any], interrupt: Interrupt) -> int:
    from moet_desk.cli.models import print_made
    from moet_desk.store.fetch import Limiter, Line
    from moet_desk.store.hub import Hub, is_repo
    from moet_desk.store.library import look_at

    if not is_repo(model):
        raise fail("MD-SRC-01", path=model, missing="files, and it is no name of a repository")
    asked = _asked(invocation, model, options)
    line = Line(Hub(), limiter=Limiter(options["limit_rate"]), stop=interrupt.came)
    invocation.say(f"Asking {line.hub.host} about {model} ...")
    with _undone_unless_begun(asked) as begin:
        prepared = _prepare(asked, line)
        if prepared is None:
            invocation.say(f"{asked.dest.name} is there already.")
            print_made(invocation, "pulled", look_at(asked.dest))
            return ExitCode.OK
        if not _may_begin(invocation, prepared, options):
            return ExitCode.OK if options["dry_run"] else ExitCode.FAILED
        begin()
    if options["background"]:
        return _in_background(invocation, model, asked, options)
    _run(invocation, prepared, line, options, interrupt)
    print_made(invocation, "pulled", look_at(asked.dest))
    return ExitCode.OK


def _prepare(asked: Asked, line: Line) -> Prepared | None:
    from moet_desk.cli import packing
    from moet_desk.store.fetch import Stopped
    from moet_desk.store.pull_prepare import prepare

    try:
        return prepare(asked, line, packing.plan_of_names)
    except Stopped as stopped:
        nothing = {"done": "no weights", "total": "it", "rows": 0, "n_rows": "its"}
        raise fail("MD-PULL-01", model=asked.dest.name, **nothing) from stopped


def _may_begin(invocation: Invocation, prepared: Prepared, options: dict[str, Any]) -> bool:
    """Say what it takes; whether there is room and consent.

    Raises:
        MoetError: MD-DISK-01, MD-PULL-02.
    """
    from moet_desk.store.pull_prepare import check_room

    _say_figures(invocation, prepared, is_all=options["dry_run"])
    check_room(prepared)
    if options["dry_run"]:
        return False
    name, left = prepared.asked.dest.name, prepared.figures.left
    agreed = is_agreed(name, left, options, code="MD-PULL-02", ask="Fetch")
    if not agreed:
        say("Nothing was fetched.")
    return agreed


def _run(
    invocation: Invocation,
    prepared: Prepared,
    line: Line,
    options: dict[str, Any],
    interrupt: Interrupt,
) -> None:
    from moet_desk.cli import packing
    from moet_desk.store.pull import pull as run

    row_bytes = packing.row_bytes(prepared.maker.plan)
    packs = packing.PackReport(invocation.format, row_bytes=row_bytes, quiet=invocation.quiet)
    report = PullReport(invocation, packs, job=f"pull-{prepared.asked.dest.name}")
    try:
        run(
            prepared,
            line,
            memory_budget=options["memory_budget"],
            threads=len(os.sched_getaffinity(0)),
            report=report,
            stop=interrupt.asked,
        )
    finally:
        report.close()


def _asked(invocation: Invocation, model: str, options: dict[str, Any]) -> Asked:
    from moet_desk.store.durable import disk_errors
    from moet_desk.store.pull_prepare import Asked

    name = options["name"] or model.rpartition("/")[2]
    dest = invocation.library.path_for(name)
    work = invocation.locations.sources_dir / name
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    return Asked(
        repo=model,
        revision=options["revision"],
        work=work,
        dest=dest,
        reclaim=options["reclaim"],
        parallel=options["parallel"],
    )


@contextmanager
def _undone_unless_begun(asked: Asked) -> Iterator[Callable[[], None]]:
    """Leave no trace of a download that only was looked at; what began earlier stays.

    The block calls what it is given when the download begins.
    """
    from moet_desk.store.pull_state import read_state, remove_download, state_folder

    begun = read_state(asked.work) is not None

    def begin() -> None:
        nonlocal begun
        begun = True

    try:
        yield begin
    finally:
        if not begun:
            with suppress(MoetError):
                if state_folder(asked.work).is_dir():
                    remove_download(asked.work)
            with suppress(OSError):
                asked.work.rmdir()


# -- before ----------------------------------------------------------------------------------


def _say_figures(invocation: Invocation, prepared: Prepared, *, is_all: bool) -> None:
    """What will be fetched and what it takes; with `is_all` it is all that the command prints."""
    from moet_desk.store.durable import free_bytes
    from moet_desk.store.model_source import will_have_tokenizer

    asked, figures = prepared.asked, prepared.figures
    free = free_bytes(asked.dest)
    has_tokenizer = will_have_tokenizer(asked.work)
    fields = {
        "model": asked.dest.name,
        "repo": asked.repo,
        "commit": prepared.state.commit,
        "moved_to": prepared.moved or None,
        "family": prepared.maker.plan.model_type,
        "source_format": prepared.maker.source_format,
        "experts": prepared.maker.plan.n_rows,
        "files": len(prepared.shards),
        "download_bytes": figures.total,
        "left_bytes": figures.left,
        "pack_bytes": figures.pack,
        "peak_bytes": figures.peak,
        "need_bytes": figures.need,
        "free_bytes": free,
        "reclaim": asked.reclaim,
        "has_tokenizer": has_tokenizer,
        "left_out": prepared.maker.left_out,
        "fits": figures.need <= free,
    }
    if invocation.format is Format.NDJSON:
        print_event("plan", **fields)
    elif invocation.format is Format.JSON and is_all:
        print_document(fields)
    left = "" if figures.left == figures.total else f", {show_disk(figures.left)} still to fetch"
    invocation.say(
        f"{asked.repo} at {prepared.state.commit[:12]}: {len(prepared.shards)} files, "
        f"{show_disk(figures.total)}{left}. The pack takes {show_disk(figures.pack)}, and"
        f" {show_disk(figures.peak)} of disk at most meanwhile; {show_disk(free)} are free."
    )
    if not asked.reclaim:
        invocation.say("With --reclaim each file is deleted once it is packed.")
    if left_out := left_out_words(prepared.maker.left_out):
        invocation.say(left_out)
    if not has_tokenizer:
        invocation.say("It has no tokenizer.json: it can be packed, and not run until it has one.")
    if prepared.moved:
        invocation.say(
            f"{asked.repo} has moved on to {prepared.moved[:12]}; this pull keeps to the commit"
            f" it began with. For the new one: moet-desk rm {asked.dest.name}, then pull again."
        )


def left_out_words(left_out: Mapping[str, int]) -> str:
    """What of a model's files will not be in the pack, such as a vision part; empty for nothing."""
    if not left_out:
        return ""
    named = ", ".join(f"{start.rstrip('.')} ({count:,})" for start, count in left_out.items())
    return f"Left out, tensors that begin with: {named}."


def is_agreed(model: str, n_bytes: int, options: dict[str, Any], *, code: str, ask: str) -> bool:
    """Whether so much may be fetched (or written); `ask` is the verb of the question.

    Raises:
        MoetError: `code`, it is more than what was agreed to and nobody can be asked.
    """
    is_large = n_bytes > YES_COVERS_BYTES
    if n_bytes == 0 or options["yes_really"] or (options["yes"] and not is_large):
        return True
    if sys.stdin.isatty() and sys.stderr.isatty():
        return click.confirm(f"{ask} {show_disk(n_bytes)}?", err=True)
    covered = show_disk(YES_COVERS_BYTES)
    raise fail(
        code,
        model=model,
        size=show_disk(n_bytes),
        agreed=f"--yes covers {covered} at most" if options["yes"] else "nobody agreed to that",
        add="--yes-really" if is_large else "--yes",
        size_bytes=n_bytes,
    )


def _in_background(
    invocation: Invocation, model: str, asked: Asked, options: dict[str, Any]
) -> int:
    from moet_desk.store.jobs import JobStore

    arguments = ["--data-dir", str(invocation.locations.data_dir), "pull", model]
    arguments += ["--name", asked.dest.name, "--yes-really", "--parallel", str(asked.parallel)]
    arguments += ["--memory-budget", str(options["memory_budget"])]
    arguments += ["--revision", asked.revision] if asked.revision else []
    arguments += ["--limit-rate", str(options["limit_rate"])] if options["limit_rate"] else []
    arguments += ["--reclaim"] if asked.reclaim else []
    job = JobStore(invocation.locations.jobs_dir).start("pull", asked.dest.name, arguments)
    job_id = f"pull-{asked.dest.name}"
    if invocation.format is Format.HUMAN:
        invocation.say(
            f"Started {job_id}. Look: moet-desk ps   Stop: moet-desk jobs pause {job_id}"
        )
    elif invocation.format is Format.NDJSON:
        print_event("started", job=job_id, pid=job.pid)
    else:
        print_document({"job": job_id, "pid": job.pid})
    return ExitCode.OK


# -- during ----------------------------------------------------------------------------------


class PullReport:
    """Shows a download and the packing beside it: one meter on stderr, or events on stdout."""

    def __init__(self, invocation: Invocation, packs: PackReport, *, job: str) -> None:
        self._wanted = invocation.format
        self._packs = packs
        self._job = job
        self._meter = Meter(quiet=invocation.quiet or self._wanted is Format.NDJSON)
        self._is_fetching = True
        self._rows = ""

    def __call__(self, step: PackProgress | Fetching) -> None:
        from moet_desk.store.pull import Fetching

        if isinstance(step, Fetching):
            self._is_fetching = step.files_done < step.n_files
            self._show(step)
        elif self._is_fetching and self._wanted is not Format.NDJSON:
            self._rows = f"{step.done}/{step.total} experts packed"
        else:
            self._meter.close()
            self._packs(step)

    def _show(self, step: Fetching) -> None:
        if self._wanted is Format.NDJSON:
            with suppress(BrokenPipeError):
                print_event(
                    "download",
                    job=self._job,
                    done_bytes=step.done,
                    total_bytes=step.total,
                    rate_bytes_per_s=step.rate,
                    files_done=step.files_done,
                    files=step.n_files,
                    retries=step.retries,
                    trouble=step.trouble or None,
                    disk_bytes=step.disk,
                )
            return
        if self._is_fetching:
            rate = f"  {show_rate(step.rate)}" if step.rate else ""
            words = step.trouble or self._rows
            figures = f"{show_disk(step.done)} of {show_disk(step.total)}{rate}  {words}"
            self._meter.show("download", step.done, step.total, figures)

    def close(self) -> None:
        self._meter.close()
        self._packs.close()
