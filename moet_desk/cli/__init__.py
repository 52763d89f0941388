"""The command line: a lazy table of commands, the global options, and errors as exit codes.

Owns what every command shares. A command's module is imported only when that command runs, so that
`moet-desk --version` costs no more than click. Runs in the main thread.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from moet_desk import __version__
from moet_desk.cli.context import Invocation, global_options
from moet_desk.cli.output import Format, be_plain, report_error
from moet_desk.cli.streams import forget, make_usable
from moet_desk.errors import ExitCode, MoetError, fail

PROGRAM = "moet-desk"

COMMANDS: Mapping[str, tuple[str, str]] = {
    "chat": ("moet_desk.cli.chat:chat", "Open the app, also on a server elsewhere."),
    "run": ("moet_desk.cli.run:run", "Ask a model one question, or talk with it line by line."),
    "serve": ("moet_desk.cli.serve:serve", "Serve a model to OpenAI clients."),
    "launch": ("moet_desk.cli.launch:launch", "Point a coding agent at the model here."),
    "handoff": ("moet_desk.cli.handoff:handoff", "Write a larger server's settings for a model."),
    "pull": ("moet_desk.cli.pull:pull", "Fetch a model from the hub and pack it; resumes."),
    "login": ("moet_desk.cli.login:login", "Sign in to the hub, for models that ask for it."),
    "pack": ("moet_desk.cli.models:pack", "Make a pack from a model's files; resumes."),
    "verify": ("moet_desk.cli.verify:verify", "Check every byte of a pack; mend it."),
    "ls": ("moet_desk.cli.models:ls", "List the models on this computer."),
    "plan": ("moet_desk.cli.plan:plan", "Show how a model would live on this computer."),
    "doctor": ("moet_desk.cli.doctor:doctor", "Look for what slows this computer down."),
    "show": ("moet_desk.cli.models:show", "Show what a model is and how it is stored."),
    "rm": ("moet_desk.cli.models:rm", "Delete a model from this computer."),
    "ps": ("moet_desk.cli.jobs:ps", "List long jobs: running, paused, done."),
    "jobs": ("moet_desk.cli.jobs:jobs", "Pause, resume or cancel a long job."),
    "bench": ("moet_desk.cli.bench:bench", "Measure a model on this computer."),
    "eval": ("moet_desk.cli.evaluate:evaluate", "Measure what a model's qualities cost."),
    "calibrate": ("moet_desk.cli.calibrate:calibrate", "Fit a model's choices to texts."),
    "config": ("moet_desk.cli.settings:config", "Show and change settings."),
    "version": ("moet_desk.cli.settings:version", "Show the version."),
    "completion": ("moet_desk.cli.settings:completion", "Print the completion script of a shell."),
}
"""Name -> where the command is, and its one line of help."""


class _PipeClosed(Exception):
    """Whoever read our output has gone."""


class LazyGroup(click.Group):
    """The command table; imports one module, when its command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib  # only for people who mistyped

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            guess = f'; did you mean "{near[0]}"' if near else ""
            raise click.UsageError(f'There is no command "{args[0]}"{guess}', ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise _PipeClosed from error
        return result


@click.group(
    name=PROGRAM,
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Without a command it opens the app.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option(
    "--demo-trace",
    is_flag=False,
    flag_value="",
    metavar="[NAME|FILE]",
    help="Open the app on a recording: no model and no GPU are needed.",
)
@global_options
@click.pass_context
def cli(ctx: click.Context, demo_trace: str | None) -> int | None:
    """Very large mixture-of-experts models on one consumer GPU."""
    if demo_trace is not None:
        if ctx.invoked_subcommand is not None:
            raise click.UsageError("--demo-trace opens the app and takes no command", ctx)
        with _nothing_collected():
            played: int = importlib.import_module("moet_desk.cli.recording").open_recording(
                ctx.obj, demo_trace
            )
        return played
    if ctx.invoked_subcommand is not None:
        return None
    with _nothing_collected():
        opened: int = importlib.import_module("moet_desk.cli.app").open_app(ctx.obj)
    return opened


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage is looked for until the app has shown its first frame: imports make much and leave
    little, and looking takes a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Never raises, never prints a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    invocation = Invocation()
    make_usable()
    be_plain(False)
    try:
        status = cli.main(given, prog_name=PROGRAM, standalone_mode=False, obj=invocation)
        return int(status or 0)
    except _PipeClosed:
        forget(sys.stdout)
        return ExitCode.OK
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        command = (
            error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else PROGRAM
        )
        wanted = _format_in(given, invocation.format)
        reason = error.format_message().rstrip(".")
        return report_error(fail("MD-CLI-01", reason=reason, command=command), wanted)
    except MoetError as error:
        return report_error(error, invocation.format)
    except Exception as error:  # the last catch of the process: people get words, the log gets all
        return report_error(invocation.bug(error), invocation.format)


def _format_in(arguments: Sequence[str], otherwise: Format) -> Format:
    """The format that arguments ask for which could not be read to their end; the last one
    counts.
    """
    wanted, before = otherwise.value, ""
    for argument in arguments:
        if argument == "--":
            break
        if argument == "--json":
            wanted = Format.JSON.value
        elif before == "--format":
            wanted = argument
        elif argument.startswith("--format="):
            wanted = argument.partition("=")[2]
        before = argument
    return next((known for known in Format if known.value == wanted), otherwise)
