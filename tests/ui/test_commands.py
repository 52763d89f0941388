"""Slash commands: read, refused with words, and messages that only look like them."""

from __future__ import annotations

import pytest

from moet_desk.ui.commands import WORDS, Command, Verb, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", None),
        ("//not a command", None),
        ("a /new one", None),
        ("/new", Command(Verb.NEW, "")),
        ("/system Be  brief. ", Command(Verb.SYSTEM, "Be  brief.")),
        ("/system", Command(Verb.SYSTEM, "")),
        ("/temp 0.6", Command(Verb.TEMPERATURE, "0.6")),
        ("/temp", Command(Verb.TEMPERATURE, "")),
        ("/quality exact", Command(Verb.QUALITY, "exact")),
        ("/quality balanced", Command(Verb.QUALITY, "balanced")),
        ("/fast", Command(Verb.FAST, "")),
        ("/balanced", Command(Verb.BALANCED, "")),
    ],
)
def test_parse__text__command_or_message(text: str, expected: Command | None) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/nwe", "Did you mean /new?"),
        ("/zzzzzz", "Type /help"),
        ("/temp hot", "number from 0 to 2"),
        ("/temp 3", "number from 0 to 2"),
        ("/temp nan", "number from 0 to 2"),
        ("/quality best", "/quality fast"),
        ("/new now", "takes nothing"),
        ("/", "no command"),
    ],
)
def test_parse__wrong__says_what_to_do(text: str, words: str) -> None:
    said = parse(text)
    assert isinstance(said, str)
    assert words in said


def test_words__every_verb__has_help() -> None:
    assert set(WORDS) == set(Verb)
