"""`ps` and `jobs`: long work that goes on without a window. Runs in the main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.context import Invocation, global_options, output_options
from moet_desk.cli.output import Format, print_document, print_event, print_table
from moet_desk.units import show_disk, show_duration, show_rate

if TYPE_CHECKING:
    from moet_desk.store.jobs import JobStore, JobView


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Job ids for the shell."""
    store = _store(ctx.find_object(Invocation) or Invocation())
    ids = (view.record.id for view in store.jobs())
    return [job_id for job_id in ids if job_id.startswith(incomplete)]


@click.command()
@output_options
@click.pass_obj
def ps(invocation: Invocation) -> None:
    """List long jobs: what they do, how far they are, and why they stopped."""
    views = _store(invocation).jobs()
    if invocation.format is Format.NDJSON:
        for view in views:
            print_event("job", **_fields(view))
        return
    if invocation.format is Format.JSON:
        print_document({"jobs": [_fields(view) for view in views]})
        return
    if not views:
        invocation.say("There are no jobs.")
        return
    rows = [["Job", "State", "Done", "Rate", "Why"]]
    for view in views:
        rate = show_rate(view.rate) if view.rate else "-"
        rows.append([view.record.id, view.state.value, _done(view), rate, _why(view)])
    print_table(rows)


@click.group(subcommand_metavar="COMMAND JOB")
@global_options
def jobs() -> None:
    """Pause, resume or cancel a long job; moet-desk ps lists them."""


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@output_options
@click.pass_obj
def pause(invocation: Invocation, job: str) -> None:
    """Stop JOB where it is; what is finished stays."""
    view = _store(invocation).pause(job)
    _say(invocation, view, f"{job} is {view.state.value}. Go on: moet-desk jobs resume {job}")


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@output_options
@click.pass_obj
def resume(invocation: Invocation, job: str) -> None:
    """Let JOB go on where it stopped, without this window."""
    store = _store(invocation)
    store.resume(job)
    _say(invocation, store.find(job), f"{job} goes on. Look: moet-desk ps")


@jobs.command()
@click.argument("job", shell_complete=complete_job)
@output_options
@click.pass_obj
def cancel(invocation: Invocation, job: str) -> None:
    """Stop JOB and forget it; moet-desk rm MODEL deletes what it has made."""
    store = _store(invocation)
    view = store.find(job)
    store.cancel(job)
    words = f"{job} is gone. What it made stays until: moet-desk rm {view.record.model}"
    _say(invocation, view, words, state="canceled")


def _store(invocation: Invocation) -> JobStore:
    from moet_desk.store.jobs import JobStore

    return JobStore(invocation.locations.jobs_dir)


def _say(invocation: Invocation, view: JobView, words: str, **more: Any) -> None:
    if invocation.format is Format.HUMAN:
        invocation.say(words)
    elif invocation.format is Format.NDJSON:
        print_event("job", **(_fields(view) | more))
    else:
        print_document(_fields(view) | more)


def _fields(view: JobView) -> dict[str, Any]:
    return {
        "job": view.record.id,
        "kind": view.record.kind,
        "model": view.record.model,
        "state": view.state.value,
        "pid": view.pid or None,
        "phase": view.phase or None,
        "done_bytes": view.done_bytes,
        "total_bytes": view.total_bytes,
        "rate_bytes_per_s": view.rate,
        "silent_s": round(view.silent_s, 1),
        "reason": view.reason.to_dict() if view.reason else None,
    }


def _done(view: JobView) -> str:
    if view.done_bytes is None or not view.total_bytes:
        return "-"
    share = view.done_bytes / view.total_bytes
    return f"{share:.0%} of {show_disk(view.total_bytes)} ({view.phase})"


def _why(view: JobView) -> str:
    if view.reason is not None:
        return f"{view.reason.code} {view.reason.cause}"
    if view.state.value == "stalled":
        return f"no news for {show_duration(view.silent_s)}"
    return ""
