"""Commands when the kernel refuses: words and an exit code of the catalogue, never a traceback."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moet_desk.errors import ExitCode
from tests.cli.conftest import Command
from tests.faults import FOLDERS, READS, Refusal, opens, opens_to_write, refused

REFUSALS = [
    opens_to_write(errno.EROFS),
    opens_to_write(errno.ENOSPC),
    Refusal(("write", "pwrite64"), errno.ENOSPC),
    opens(errno.EMFILE),
    opens(errno.EIO),
    Refusal(READS, errno.EIO),
    Refusal(FOLDERS, errno.EROFS),
]
COMMANDS = [
    ("ls", "--json"),
    ("ps",),
    ("config", "list"),
    ("config", "set", "answers.quality", "exact"),
    ("show", "demo"),
    ("jobs", "pause", "pull-x"),
    ("rm", "nothing", "--yes"),
    ("launch", "codex", "--print"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command__refused__ends_with_words(command: tuple[str, ...], moet: Command) -> None:
    moet(*command)  # imports what it needs
    for refusal in REFUSALS:
        result = refused(refusal, lambda: moet(*command))
        assert "Traceback" not in result.err + result.out
        assert "MD-BUG" not in result.err + result.out
        assert result.code in set(ExitCode)
        assert result.code == 0 or "MD-" in result.err + result.out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "Input/output error", "/a"), "MD-DISK-04"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "MD-RAM-04"),
        (MemoryError(), "MD-RAM-04"),
    ],
)
def test_command__fails_where_nobody_expected__no_bug_is_claimed(
    error: Exception,
    code: str,
    moet: Command,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("moet_desk.cli.settings.print_text", fail)
    result = moet("version")
    assert result.code != 0
    assert code in result.err
    assert "Traceback" not in result.err
    assert type(error).__name__ in next((data_dir / "logs").glob("crash-*.txt")).read_text()


def test_command__not_even_a_report_can_be_written__words_all_the_same(
    moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/a")

    moet("version")
    monkeypatch.setattr("moet_desk.cli.settings.print_text", fail)
    monkeypatch.setattr("tempfile.gettempdir", fail)
    result = refused(opens_to_write(errno.ENOSPC), lambda: moet("version"))
    assert "MD-DISK-04" in result.err
    assert "/a: No space left on device" in result.err
