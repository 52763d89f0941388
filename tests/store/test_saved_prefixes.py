"""Prompts on disk: they come back as they were or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from moet_desk.store.saved_prefixes import SUFFIX, SavedPrefixes, clear

KEYS = [bytes([i]) * 32 for i in range(6)]
BODY = np.arange(1000, dtype=np.uint8).reshape(10, 100)


def saved(folder: Path, n_bytes: int = 10**6) -> SavedPrefixes:
    return SavedPrefixes(folder, n_bytes=n_bytes)


def write_all(folder: Path, keys: list[bytes], n_bytes: int = 10**6) -> SavedPrefixes:
    one = saved(folder, n_bytes)
    for key in keys:
        one.write(key, BODY)
    one.close()
    return one


def test_read__written_before__the_same_bytes_for_the_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    write_all(folder, KEYS[:2])
    again = saved(folder)
    for key in KEYS[:2]:
        found = again.read(key)
        assert found is not None
        assert np.array_equal(found, BODY.reshape(-1))
    assert again.read(KEYS[2]) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("at", [0, 8, 20, 48, 500, 1047])
def test_read__a_flipped_byte__dropped_and_counted(tmp_path: Path, at: int) -> None:
    write_all(tmp_path, KEYS[:1])
    path = tmp_path / (KEYS[0].hex() + SUFFIX)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    again = saved(tmp_path)
    assert again.read(KEYS[0]) is None
    assert again.n_damaged == 1
    assert not path.exists()
    again.write(KEYS[0], BODY)
    again.close()
    assert saved(tmp_path).read(KEYS[0]) is not None


@pytest.mark.parametrize("size", [0, 10, 47, 48, 1000, 1049])
def test_read__another_length__dropped(tmp_path: Path, size: int) -> None:
    write_all(tmp_path, KEYS[:1])
    path = tmp_path / (KEYS[0].hex() + SUFFIX)
    path.write_bytes((path.read_bytes() + b"x")[:size])
    assert saved(tmp_path).read(KEYS[0]) is None


def test_write__more_than_allowed__the_longest_unused_go(tmp_path: Path) -> None:
    write_all(tmp_path, KEYS[:3])
    for age, key in enumerate([KEYS[1], KEYS[0], KEYS[2]]):
        os.utime(tmp_path / (key.hex() + SUFFIX), (age, age))
    one = saved(tmp_path, 3 * 1048)
    assert one.read(KEYS[1]) is not None  # which makes it the newest
    one.write(KEYS[3], BODY)
    one.close()
    left = saved(tmp_path)
    assert [left.read(key) is not None for key in KEYS[:4]] == [False, True, True, True]
    assert len(list(saved(tmp_path, 1048)._folder.iterdir())) == 1


def test_write__no_folder_can_be_made__says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    one = saved(blocked / "prefixes")
    for key in KEYS[:2]:
        one.write(key, BODY)
    one.close()
    assert one.read(KEYS[0]) is None
    assert "no longer saved" in caplog.text
    one.write(KEYS[2], BODY)  # not even tried
    assert blocked.read_text() == "in the way"


def test_open__half_written_file__removed(tmp_path: Path) -> None:
    half = tmp_path / (KEYS[0].hex() + SUFFIX + ".partial")
    half.write_bytes(b"half")
    assert saved(tmp_path).read(KEYS[0]) is None
    assert not half.exists()


def test_clear__removes_saved_prompts_and_nothing_else(tmp_path: Path) -> None:
    write_all(tmp_path, KEYS[:2])
    (tmp_path / "other").write_text("kept")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    clear(tmp_path / "missing")
