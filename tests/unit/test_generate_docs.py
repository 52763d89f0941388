"""The reference pages are what the code says, and the check notices when they are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moet_desk.cli import COMMANDS
from moet_desk.errors import CATALOGUE, ExitCode
from moet_desk.settings import SETTINGS
from moet_desk.ui.keymap import binding_ids
from tools import generate_docs


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A copy of the pages in the tree."""
    return Path(shutil.copytree(generate_docs.REFERENCE, tmp_path / "reference"))


def test_check__pages_of_the_tree__agree_with_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    status = generate_docs.main(["--check"])
    assert capsys.readouterr().out == ""
    assert status == 0


@pytest.mark.parametrize("name", list(generate_docs.PAGES))
def test_check__a_changed_page__fails_with_the_difference(
    pages: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = pages / name
    changed = page.read_text().replace("\n", "\nA line nobody generated.\n", 1)
    page.write_text(changed)
    assert generate_docs.main(["--check", "--out", str(pages)]) == 1
    difference = capsys.readouterr().out
    assert f"--- {name}" in difference
    assert "\n-A line nobody generated.\n" in difference
    assert page.read_text() == changed  # it only looked


def test_check__a_missing_page__fails(pages: Path) -> None:
    (pages / "errors.md").unlink()
    assert generate_docs.main(["--check", "--out", str(pages)]) == 1


def test_write__old_pages__made_new(pages: Path) -> None:
    (pages / "cli.md").write_text("old")
    (pages / "keys.md").unlink()
    assert generate_docs.main(["--out", str(pages)]) == 0
    assert generate_docs.main(["--check", "--out", str(pages)]) == 0


def test_pages__every_entry_of_the_tables__is_listed() -> None:
    made = {name: make() for name, make in generate_docs.PAGES.items()}
    assert [code for code in CATALOGUE if f"### {code} " not in made["errors.md"]] == []
    assert [name for name in COMMANDS if f"## moet-desk {name}\n" not in made["cli.md"]] == []
    assert [
        code for code in ExitCode if f"| {code.value} | {code.name} |" not in made["cli.md"]
    ] == []
    assert [name for name in SETTINGS if f"`{name}`" not in made["config.md"]] == []
    assert [name for name in binding_ids() if f"`{name}`" not in made["keys.md"]] == []
