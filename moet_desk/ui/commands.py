"""Slash commands of the prompt: what they are and how a line is read. Pure."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum


class Verb(Enum):
    """What a slash command does."""

    NEW = "new"
    CLEAR = "clear"
    HELP = "help"
    SYSTEM = "system"
    TEMPERATURE = "temp"
    QUALITY = "quality"
    FAST = "fast"
    BALANCED = "balanced"
    EXACT = "exact"
    CHATS = "chats"
    RETRY = "retry"
    EDIT = "edit"
    FILE = "file"
    FIND = "find"
    OPTIONS = "options"
    COPY = "copy"
    EXPORT = "export"


WORDS: dict[Verb, tuple[str, str]] = {
    Verb.NEW: ("", "start a new chat; this one is kept"),
    Verb.CLEAR: ("", "the same as /new"),
    Verb.CHATS: ("", "earlier chats"),
    Verb.RETRY: ("", "answer the last message again"),
    Verb.EDIT: ("", "write your last message again; both versions stay"),
    Verb.FILE: ("PATH", "attach a text file; empty: choose one"),
    Verb.FIND: ("TEXT", "search in this chat"),
    Verb.OPTIONS: ("", "system prompt and sampling of this chat"),
    Verb.COPY: ("", "copy the last answer as Markdown"),
    Verb.EXPORT: ("md|json", "save this chat in the folder you started in"),
    Verb.SYSTEM: ("TEXT", "told to the model first; empty: nothing"),
    Verb.TEMPERATURE: ("NUMBER", "0: likeliest word, 1: freer; empty: default"),
    Verb.QUALITY: ("NAME", "fast, balanced or exact"),
    Verb.FAST: ("", "2-bit experts"),
    Verb.BALANCED: ("", "2-bit experts, 4-bit ones where unsure"),
    Verb.EXACT: ("", "4-bit experts, the model as shipped"),
    Verb.HELP: ("", "keys and commands"),
}
"""Argument and meaning of each command, in the order of the help page."""


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command with its argument, "" without one."""

    verb: Verb
    argument: str


def parse(text: str) -> Command | str | None:
    """Read a prompt.

    Returns:
        None: it is a message, not a command. A string: what is wrong, for the person. Else the
        command. A message may start with two slashes to begin with one.
    """
    if not text.startswith("/") or text.startswith("//"):
        return None
    word, _, argument = text[1:].partition(" ")
    argument = argument.strip()
    names = [verb.value for verb in Verb]
    if word not in names:
        near = difflib.get_close_matches(word, names, n=1)
        guess = f" Did you mean /{near[0]}?" if near else " Type /help for the list."
        return f"There is no command /{word[:24]}.{guess}"
    command = Command(Verb(word), argument)
    return _complaint(command) or command


def _complaint(command: Command) -> str | None:
    argument = command.argument
    match command.verb:
        case Verb.TEMPERATURE:
            if argument and parse_temperature(argument) is None:
                return "The temperature is a number from 0 to 2, for example: /temp 0.6"
        case Verb.QUALITY:
            if argument not in ("fast", "balanced", "exact"):
                return "Say /quality fast, /quality balanced or /quality exact."
        case Verb.EXPORT:
            if argument not in ("", "md", "json"):
                return "Say /export md or /export json."
        case Verb.SYSTEM | Verb.FILE | Verb.FIND:
            pass
        case _:
            if argument:
                return f"/{command.verb.value} takes nothing after it."
    return None


def parse_temperature(text: str) -> float | None:
    """A temperature from 0 to 2, None if `text` is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 2.0 else None
