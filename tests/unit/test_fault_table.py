"""The table of faults names tests and codes that exist, and leaves no kind of fault out."""

from __future__ import annotations

import re
from pathlib import Path

from moet_desk.errors import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design" / "faults.md").read_text()
KINDS = (
    "ENOSPC", "EDQUOT", "EIO", "EACCES", "EROFS", "EMFILE", "ENODEV", "fsync", "rename", "mmap",
    "short read", "short write", "SQLite: busy", "SQLite: full", "SQLite: damaged", "resets",
    "silent", "CUDA out of memory", "illegal access", "launch", "off the bus", "pinning", "NVML",
    "driver and library differ", "clock", "suspend", "unplugged", "SIGKILL",
)  # fmt: skip


def test_table__every_test_exists() -> None:
    named = re.findall(r"`([a-z_/]+/\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    assert len(named) == PAGE.count("::")
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), (file, test)


def test_table__codes_are_of_the_catalogue() -> None:
    codes = set(re.findall(r"MD-[A-Z]+-\d\d", PAGE))
    assert len(codes) > 15
    assert codes <= set(CATALOGUE)


def test_table__no_kind_is_left_out() -> None:
    assert [kind for kind in KINDS if kind not in PAGE] == []
