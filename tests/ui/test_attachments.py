"""Files that go with a message: what is taken, what is refused, and what the model reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moet_desk.errors import MoetError
from moet_desk.ui.attachments import (
    MAX_BYTES,
    Attachment,
    is_long,
    message_text,
    pasted,
    read_attachment,
)
from moet_desk.ui.screens.attach import list_folder


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain"),
        ("\ufeffé\r\n".encode(), "é\n"),
        ("漢".encode("utf-16"), "漢"),
        (b"\x1b[31mred", "red"),
        (b"", ""),
    ],
)
def test_read__text_of_some_kind__taken_and_inert(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "a\x1b[2J.md"
    path.write_bytes(data)
    assert read_attachment(path) == Attachment("a.md", text)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("binary", "MD-CHAT-04", "bytes that no text has"),
        ("latin", "MD-CHAT-04", "not UTF-8 (byte 3)"),
        ("folder", "MD-CHAT-04", "Is a directory"),
        ("pipe", "MD-CHAT-04", "not a file"),
        ("missing", "MD-CHAT-04", "No such file"),
        ("large", "MD-CHAT-05", "4.0 MiB"),
        ("endless", "MD-CHAT-04", "not a file"),
    ],
)
def test_read__cannot_be_a_text__said_why(tmp_path: Path, kind: str, code: str, words: str) -> None:
    path = tmp_path / kind
    if kind == "binary":
        path.write_bytes(b"GIF89a\0\0")
    elif kind == "latin":
        path.write_bytes(b"caf\xe9")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
    elif kind == "endless":
        path = Path("/dev/zero")
    with pytest.raises(MoetError) as caught:
        read_attachment(path)
    assert caught.value.code == code
    assert words in caught.value.cause


def test_paste__long_ones_only__named_and_limited() -> None:
    assert not is_long("x" * 2000)
    assert is_long("x" * 2001)
    assert not is_long("x\n" * 19)
    assert is_long("x\n" * 20)
    assert pasted("a", 1).name == "pasted text"
    assert pasted("a", 2).name == "pasted text 2"
    with pytest.raises(MoetError, match="MD-CHAT-05"):
        pasted("x" * (MAX_BYTES + 1), 1)


def test_message_text__fences_in_a_file__stay_inside() -> None:
    files = (Attachment("a.md", "x\n````py\ny\n````\n"), Attachment("b.txt", "no end"))
    assert message_text("Why?", files) == (
        "a.md:\n`````\nx\n````py\ny\n````\n`````\n\nb.txt:\n```\nno end\n```\n\nWhy?"
    )
    assert message_text("Why?", ()) == "Why?"
    assert message_text("", files[1:]) == "b.txt:\n```\nno end\n```"


def test_list_folder__typed__folders_first_hidden_ones_only_when_asked(tmp_path: Path) -> None:
    for name in ("b.md", "A.md", ".secret", "notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "in.md").write_text("")

    def names(typed: str) -> list[str]:
        return [entry.name for entry in list_folder(typed, tmp_path)]

    assert names("") == ["sub", "A.md", "b.md", "notes.txt"]
    assert names(".MD") == ["A.md", "b.md"]
    assert names(".s") == [".secret"]
    assert names("sub/") == ["in.md"]
    assert names(f"{tmp_path}/not") == ["notes.txt"]
    with pytest.raises(OSError, match="No such file"):
        names("nowhere/")
