"""Putting in order: only what is ours and left behind, and never what holds work."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from moet_desk.locations import Locations
from moet_desk.store.durable import pack_lock
from moet_desk.store.tidy import STALE_S, tasks, tidy

OLD_S = time.time() - STALE_S - 60


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Locations:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    found = Locations(tmp_path / "data", tmp_path / "data" / "config.toml")
    tidy(found)
    return found


def write(path: Path, *, mode: int = 0o600, at_s: float = OLD_S) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    path.chmod(mode)
    os.utime(path, (at_s, at_s))
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_tidy__nothing_there__private_folders_once(tmp_path: Path, places: Locations) -> None:
    folders = [places.data_dir, places.models_dir, places.jobs_dir, places.logs_dir]
    assert all(mode_of(folder) == 0o700 for folder in folders)
    assert list(tasks(places)) == []
    fresh = Locations(tmp_path / "a" / "b", tmp_path / "a" / "b" / "config.toml")
    assert len(list(tasks(fresh))) == 6
    assert not (tmp_path / "a").exists()  # looking makes nothing


def test_tidy__readable_by_others__made_private(places: Locations) -> None:
    opened = [
        write(places.config_file, mode=0o644),
        write(places.data_dir / "chats.sqlite3-wal", mode=0o640),
        write(places.data_dir / "doctor-1.json", mode=0o604),
        write(places.server_keys_file, mode=0o644),
    ]
    kept = write(places.data_dir / "mine.txt", mode=0o644)
    rows = write(places.models_dir / "m" / "experts.base", mode=0o644)
    places.logs_dir.chmod(0o755)
    target = write(places.data_dir.parent / "elsewhere", mode=0o644)
    (places.data_dir / "app.json").symlink_to(target)
    done = tidy(places).done
    assert len(done) == 5
    assert all(mode_of(path) == 0o600 for path in opened)
    assert mode_of(places.logs_dir) == 0o700
    assert {mode_of(path) for path in (kept, rows, target)} == {0o644}


def test_tidy__left_by_killed_processes__removed_when_old(places: Locations) -> None:
    sources = places.sources_dir
    left = [
        write(places.data_dir / "app.json.partial"),
        write(places.config_file.with_name("config.toml.partial")),
        write(places.models_dir / ".moet-desk-rate-x"),
        write(sources / ".repair-m" / "a.safetensors"),
        write(Path(tempfile.gettempdir()) / "moet-desk-look-1" / "config.json"),
    ]
    for path in left:
        os.utime(path.parent, (OLD_S, OLD_S))
    now_s = time.time()
    kept = [
        write(places.data_dir / "wizard.json.partial", at_s=now_s),
        write(sources / ".repair-n" / "a.safetensors", at_s=now_s),
        write(sources / "m" / "model.safetensors.part"),
        write(places.data_dir / "thesis.partial"),
    ]
    assert len(tidy(places).done) == 5
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)


def test_tidy__packs__only_finished_ones_that_nobody_writes(places: Locations) -> None:
    done, busy, begun = (places.models_dir / name for name in ("done", "busy", "begun"))
    for pack in (done, busy, begun):
        write(pack / "journal")
        write(pack / "dense.safetensors.partial")
    write(done / "pack.json")
    write(busy / "pack.json")
    with pack_lock(busy):
        result = tidy(places)
    assert result.done == ("removed dense.safetensors.partial, journal of the finished pack done",)
    assert len(result.failed) == 1
    assert "busy" in result.failed[0]
    assert [path.name for path in done.iterdir()] == ["pack.json"]
    assert (begun / "journal").exists()
    assert (busy / "journal").exists()


def test_tidy__what_cannot_be_done__said_and_the_rest_goes_on(
    places: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = write(places.config_file, mode=0o644)
    good = write(places.data_dir / "app.json", mode=0o644)
    real = Path.chmod

    def refuse(path: Path, mode: int) -> None:
        if path == bad:
            raise PermissionError(1, "Operation not permitted")
        real(path, mode)

    monkeypatch.setattr(Path, "chmod", refuse)
    result = tidy(places)
    assert result.failed == (f"not made {bad} readable by you alone: Operation not permitted",)
    assert mode_of(good) == 0o600
