"""Write docs/reference from the code: errors, command line, settings and keys.

    python tools/generate_docs.py           write the pages
    python tools/generate_docs.py --check   compare only; exit 1 with the difference

The pages say nothing that the code does not: each is made from the table that the program itself
uses. The same code gives the same bytes on every computer. Imports the command line and the screens
but starts nothing.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from textual.binding import Binding

from moet_desk.cli import cli
from moet_desk.errors import CATALOGUE, ErrorSpec, ExitCode
from moet_desk.settings import SETTINGS, Setting
from moet_desk.ui.app import MoetDeskApp
from moet_desk.ui.commands import WORDS
from moet_desk.ui.keymap import binding_ids
from moet_desk.ui.palette import show_key
from moet_desk.ui.screens.attach import AttachDialog
from moet_desk.ui.screens.cache import CacheScreen
from moet_desk.ui.screens.chat import ChatScreen
from moet_desk.ui.screens.chat_list import ChatList
from moet_desk.ui.screens.chat_options import ChatOptions, Choice
from moet_desk.ui.screens.doctor import DoctorScreen
from moet_desk.ui.screens.endpoint import EndpointScreen
from moet_desk.ui.screens.help import HelpPanel
from moet_desk.ui.screens.log import LogScreen
from moet_desk.ui.screens.models import ModelList, ModelsScreen
from moet_desk.ui.screens.pack_plan import PackPlan
from moet_desk.ui.screens.settings import SettingsScreen
from moet_desk.ui.screens.setup import SetupScreen
from moet_desk.ui.widgets.cache_lists import CacheLines
from moet_desk.ui.widgets.filter_line import FilterLine
from moet_desk.ui.widgets.find_line import FindLine
from moet_desk.ui.widgets.heatmap import Heatmap
from moet_desk.ui.widgets.offer_list import Offers
from moet_desk.ui.widgets.problem import ConfirmDialog
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.sign_in import SignInDialog
from moet_desk.ui.widgets.transcript import Transcript

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"

_NOTE = "<!-- Made by tools/generate_docs.py from {source}; do not edit by hand. -->"

Lines = Iterator[str]


def _page(title: str, source: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", _NOTE.format(source=source), "", *lines]).rstrip() + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    yield _row(head)
    yield _row(["---"] * len(head))
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# -- errors ----------------------------------------------------------------------------------

_AREAS: Mapping[str, str] = {
    "GPU": "Graphics card",
    "RAM": "Memory",
    "NVME": "Reading the disk",
    "DISK": "Disk space and permissions",
    "SRC": "Model files (sources)",
    "GGUF": "GGUF files",
    "PACK": "Packs",
    "LIB": "Models on this computer",
    "CAT": "Known models",
    "NET": "Network",
    "HUB": "The model hub",
    "PULL": "Downloads",
    "JOB": "Jobs",
    "PLAN": "Planning memory",
    "CFG": "Settings",
    "TERM": "Terminal",
    "ENG": "Process and engine",
    "API": "Endpoint",
    "CONN": "Another server",
    "CLI": "Command line",
    "EVAL": "Measuring quality",
    "CHAT": "Chats and templates",
    "GRAM": "Answers of a given form",
    "TRACE": "Recordings",
    "BUG": "Our mistakes",
}


def errors_page() -> str:
    """Every row of the error catalogue, by area."""
    return _page("Errors", "moet_desk/errors", _errors())


def _errors() -> Lines:
    yield "Every failure that a file, a person, a network or a disk can cause has a code. The app,"
    yield "the command line and the endpoint print the same words. Words in italics are filled in"
    yield "when the error happens. HTTP is the status if the endpoint reports the error."
    yield ""
    for area, specs in groupby(CATALOGUE.values(), lambda spec: spec.code.split("-")[1]):
        yield f"## {_AREAS[area]}"
        yield ""
        for spec in specs:
            yield from _error(spec)


def _error(spec: ErrorSpec) -> Lines:
    severity = f"{spec.severity.value} · exit {spec.exit.value} {spec.exit.name}"
    yield f"### {spec.code} {spec.title}"
    yield ""
    yield f"- Cause: {_facts_in(spec.cause)}"
    yield f"- Do: {_facts_in(spec.do)}"
    if spec.safe:
        yield f"- Safe: {_facts_in(spec.safe)}"
    yield f"- Severity: {severity} · HTTP {spec.http}"
    yield ""


def _facts_in(words: str) -> str:
    return re.sub(r"\{(\w+)\}", r"*\1*", words)


# -- command line ----------------------------------------------------------------------------

_EXIT_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "Done.",
    ExitCode.FAILED: "Any other failure.",
    ExitCode.USAGE: "Wrong arguments, settings or permissions.",
    ExitCode.NOT_FOUND: "There is no such model, chat or folder.",
    ExitCode.UNFIT: "This model or this computer cannot be used.",
    ExitCode.NO_ROOM: "It does not fit: RAM, disk or context.",
    ExitCode.NETWORK: "The network failed.",
    ExitCode.DAMAGED: "Stored data is damaged or not complete.",
    ExitCode.BUSY: "Something is in use: a lock, a port, a name.",
    ExitCode.ENGINE: "The engine failed.",
    ExitCode.STRICT: "A check that was asked to be strict found something.",
    ExitCode.TIMEOUT: "The time given ran out.",
    ExitCode.INTERRUPTED: "Interrupted by Ctrl+C.",
    ExitCode.TERMINATED: "Ended by a signal.",
}
_BY_SIGNAL = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_COMMON_PREFIX = "given_"
"""`cli.context` names the options so that every command takes."""


def cli_page() -> str:
    """Every command with its options, and the exit codes."""
    return _page("Command line", "the command table in moet_desk/cli", _cli())


def _cli() -> Lines:
    root = click.Context(cli, info_name="moet-desk")
    yield "`moet-desk` without a command opens the app. Data goes to stdout, words to stderr. Every"
    yield "command explains itself with `--help`."
    yield ""
    yield "## Options of the program"
    yield ""
    yield "They may stand before the command; most commands take them behind it too."
    yield ""
    yield from _options(root, cli.params)
    yield "Commands that print data also take:"
    yield ""
    first = _command(root, "ls")
    seen = {param.name for param in cli.params}
    yield from _options(first, [param for param in first.command.params if param.name not in seen])
    for name in cli.list_commands(root):
        yield from _command_lines(_command(root, name))
    yield from _exit_codes()


def _command(parent: click.Context, name: str) -> click.Context:
    group = parent.command
    command = group.get_command(parent, name) if isinstance(group, click.Group) else None
    if command is None:
        raise LookupError(f"{name} is listed and not there")
    return click.Context(command, parent=parent, info_name=name)


def _command_lines(ctx: click.Context) -> Lines:
    command = ctx.command
    yield f"## {ctx.command_path}"
    yield ""
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield _code(usage)
    yield ""
    for paragraph in (command.help or "").split("\n\n"):
        yield " ".join(paragraph.split())
        yield ""
    own = [param for param in command.params if not (param.name or "").startswith(_COMMON_PREFIX)]
    yield from _options(ctx, own)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            yield from _command_lines(_command(ctx, name))


def _options(ctx: click.Context, params: Sequence[click.Parameter]) -> Lines:
    options = [param for param in params if isinstance(param, click.Option)]
    records = [option.get_help_record(ctx) for option in options]
    rows = [(_code(names), words) for names, words in filter(None, records)]
    if rows:
        yield from _table(("Option", "Meaning"), rows)


def _exit_codes() -> Lines:
    yield "## Exit codes"
    yield ""
    yield "A code marked - is given by no command yet."
    yield ""
    rows = []
    for code in ExitCode:
        codes = [spec.code for spec in CATALOGUE.values() if spec.exit is code]
        given_by = ", ".join(codes) if code is not ExitCode.OK else "success"
        if code in _BY_SIGNAL:
            given_by = "SIGINT" if code is ExitCode.INTERRUPTED else "SIGTERM"
        rows.append((str(code.value), code.name, _EXIT_MEANINGS[code], given_by or "-"))
    yield from _table(("Code", "Name", "Meaning", "Given by"), rows)


# -- settings --------------------------------------------------------------------------------


def config_page() -> str:
    """Every setting, by group."""
    return _page("Settings", "moet_desk/settings.py", _settings())


def _settings() -> Lines:
    yield "Strongest first: the command line, the environment, `config.toml`, the default."
    yield "`moet-desk config list` shows each value and where it comes from, `config set` changes"
    yield "the file, `config paths` says where it is. In the file a setting is a key below its"
    yield 'group: `[memory]`, then `context = 4096`. "auto" lets the program choose.'
    yield ""
    yield "Settings are read when the app or a command starts. The last column says what a running"
    yield "program would need before a new value can count."
    yield ""
    for group, settings in groupby(SETTINGS.values(), lambda setting: setting.group):
        yield f"## {group}"
        yield ""
        head = ("Setting", "Meaning", "Value", "Default", "Unit", "Environment", "Counts from")
        yield from _table(head, map(_setting, settings))
    yield "## keys"
    yield ""
    yield 'One entry per action, named by its id: `[keys]`, then `"chat.stop" = "f8"`. The ids'
    yield "are in [keys.md](keys.md)."


def _setting(setting: Setting) -> tuple[str, ...]:
    return (
        _code(setting.name),
        setting.help,
        setting.range_words,
        _code(setting.show(setting.default)) or "empty",
        setting.unit or "-",
        _code(setting.variable),
        setting.applies.value,
    )


# -- keys ------------------------------------------------------------------------------------

_SCREENS: Mapping[str, tuple[Any, ...]] = {
    "Everywhere": (MoetDeskApp,),
    "Chat (F2)": (ChatScreen, Prompt),
    "A message of the chat (Alt+Up)": (Transcript,),
    "Find in the chat": (FindLine,),
    "Options of a chat": (ChatOptions, Choice),
    "Attaching a file": (AttachDialog,),
    "Cache (F3)": (CacheScreen, Heatmap, CacheLines),
    "Models (F4)": (ModelsScreen, ModelList),
    "Plan of a model": (PackPlan,),
    "Endpoint (F5)": (EndpointScreen,),
    "Settings (F6)": (SettingsScreen,),
    "Doctor (F7)": (DoctorScreen,),
    "Log (F8)": (LogScreen,),
    "Set-up, and adding a model": (SetupScreen, Offers),
    "Earlier chats": (ChatList,),
    "Help": (HelpPanel,),
    "Filter of a list": (FilterLine,),
    "Questions": (ConfirmDialog,),
    "Signing in": (SignInDialog,),
}


def keys_page() -> str:
    """Every key of the app, by screen, and the slash commands."""
    return _page("Keys", "the bindings in moet_desk/ui", _keys())


def _keys() -> Lines:
    yield "Keys can be changed under `[keys]` in `config.toml` by their ids."
    yield ""
    listed: set[str] = set()
    for screen, owners in _SCREENS.items():
        bindings = [
            binding
            for owner in owners
            for binding in owner.BINDINGS
            if isinstance(binding, Binding) and binding.id is not None
        ]
        listed |= {binding.id or "" for binding in bindings}
        yield f"## {screen}"
        yield ""
        yield from _table(("Key", "What it does", "Id"), map(_binding, bindings))
    missing = set(binding_ids()) ^ listed
    if missing:
        raise LookupError(f"no screen here for {sorted(missing)}")
    yield "## Commands in the prompt"
    yield ""
    rows = [
        (_code(f"/{verb.value} {what}".strip()), words) for verb, (what, words) in WORDS.items()
    ]
    yield from _table(("Command", "What it does"), rows)


def _binding(binding: Binding) -> tuple[str, ...]:
    keys = " or ".join(show_key(key) for key in binding.key.split(","))
    words = binding.description or (binding.id or "").rpartition(".")[2].capitalize()
    return keys, words, _code(binding.id or "")


# -- writing and comparing -------------------------------------------------------------------

PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "config.md": config_page,
    "errors.md": errors_page,
    "keys.md": keys_page,
}


def write(folder: Path) -> None:
    """Write all pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (folder / name).write_text(make(), "utf-8")


def compare(folder: Path) -> str:
    """How the pages in `folder` differ from what the code says, as a diff; empty if they agree."""
    parts: list[str] = []
    for name, make in PAGES.items():
        path = folder / name
        got = path.read_text("utf-8") if path.is_file() else ""
        parts += difflib.unified_diff(
            got.splitlines(keepends=True),
            make().splitlines(keepends=True),
            fromfile=f"{name} (on disk)",
            tofile=f"{name} (from the code)",
        )
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if they differ")
    parser.add_argument("--out", type=Path, default=REFERENCE, help="folder of the pages")
    given = parser.parse_args(arguments)
    if not given.check:
        write(given.out)
        return 0
    difference = compare(given.out)
    if difference:
        sys.stdout.write(difference)
        sys.stderr.write("The reference pages are old. Run: python tools/generate_docs.py\n")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
