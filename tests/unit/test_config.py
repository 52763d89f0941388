"""Settings: sources and their order, errors with a way out, saving, folders, terminal facts."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moet_desk import config, locations
from moet_desk.config import SourceKind, load, save_setting
from moet_desk.errors import MoetError
from moet_desk.settings import SETTINGS, Applies, Settings, find_setting


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def _error(path: Path, **more: Any) -> MoetError:
    with pytest.raises(MoetError) as caught:
        load(path, environment=more.pop("environment", {}), **more)
    return caught.value


# -- schema ----------------------------------------------------------------------------------


def test_schema__every_setting__says_all_that_a_screen_shows() -> None:
    assert len(SETTINGS) >= 20
    for name, setting in SETTINGS.items():
        assert setting.name == name
        assert setting.help.endswith(".")
        assert isinstance(setting.applies, Applies)
        assert setting.range_words
        assert config.read_value(Settings(), name) == setting.default


def test_show__automatic_sizes_and_secrets__readable() -> None:
    assert find_setting("memory.ram").show(None) == "auto"
    assert find_setting("memory.ram").show(3 * 2**30) == "3.0 GiB"
    assert find_setting("endpoint.key").show("hunter2") == "•••"


def test_switch__true_and_false__from_file_environment_and_back(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    save_setting(path, "ui.mark_reruns", "true")
    assert "mark_reruns = true" in path.read_text()
    assert load(path, environment={}).settings.ui.mark_reruns is True
    name = "MOET_DESK_UI_MARK_RERUNS"
    assert load(path, environment={name: "false"}).settings.ui.mark_reruns is False
    assert find_setting("ui.mark_reruns").show(True) == "true"
    for wrong in ("yes", "1", ""):
        error = _error(path, environment={name: wrong})
        assert error.code == "MD-CFG-03"
        assert "true or false" in error.cause
    assert _error(_write(tmp_path, "[ui]\nmark_reruns = 1\n")).code == "MD-CFG-03"


# -- sources ---------------------------------------------------------------------------------


def test_load__nothing_set__defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path / "none.toml", environment={"PATH": "/bin", "HOME": "/"})
    assert loaded.settings == Settings()
    assert loaded.source_of("ui.theme").kind is SourceKind.DEFAULT


def test_load__all_sources__the_strongest_wins_and_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path, '[ui]\ntheme = "moet-light"\nmotion = "none"\nglyphs = "ascii"\n')
    environment = {"MOET_DESK_UI_MOTION": "reduced", "MOET_DESK_UI_GLYPHS": "unicode"}
    loaded = load(path, environment=environment, command_line={"ui.glyphs": "auto"})
    ui = loaded.settings.ui
    assert (ui.theme, ui.motion, ui.glyphs) == ("moet-light", "reduced", "auto")
    names = [loaded.source_of(f"ui.{key}").name for key in ("theme", "motion", "glyphs")]
    assert names == ["config.toml", "MOET_DESK_UI_MOTION", "the command line"]
    locked = [loaded.source_of(f"ui.{key}").is_locked for key in ("theme", "motion", "color")]
    assert locked == [False, True, False]


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("MEMORY_CONTEXT", "2048", "memory.context", 2048),
        ("MEMORY_CONTEXT", "auto", "memory.context", None),
        ("MEMORY_RAM", "1.5GiB", "memory.ram", 3 * 2**29),
        ("ANSWERS_TEMPERATURE", "0.25", "answers.temperature", 0.25),
        ("ENDPOINT_HOSTS", "desk.local, desk ,", "endpoint.hosts", ("desk.local", "desk")),
        ("ENDPOINT_KEY", "auto", "endpoint.key", "auto"),
        ("ENGINE_OPPORTUNISTIC", "true", "engine.opportunistic", True),
        ("ENGINE_OPPORTUNISTIC", "False", "engine.opportunistic", False),
    ],
)
def test_load__text_from_the_environment__typed(
    tmp_path: Path, variable: str, text: str, name: str, value: object
) -> None:
    loaded = load(tmp_path / "none", environment={f"MOET_DESK_{variable}": text})
    assert config.read_value(loaded.settings, name) == value


def test_load__keys__flat_and_nested_names(tmp_path: Path) -> None:
    path = _write(tmp_path, '[keys]\nchat.stop = "f9"\n"app.quit" = "ctrl+x"\n')
    loaded = load(path, environment={})
    assert loaded.settings.keys == {"chat.stop": "f9", "app.quit": "ctrl+x"}
    assert config.read_value(loaded.settings, "keys.chat.stop") == "f9"


# -- errors ----------------------------------------------------------------------------------


def test_load__broken_toml__line_and_column(tmp_path: Path) -> None:
    error = _error(_write(tmp_path, '[ui]\ntheme = "moet-dark\n'))
    assert error.code == "MD-CFG-01"
    assert "line 2, column" in error.cause


def test_load__not_utf8__line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"# ok\n# \xff\n")
    error = _error(path)
    assert error.code == "MD-CFG-01"
    assert "line 2" in error.cause


def test_load__folder_in_place_of_the_file__catalogue_error(tmp_path: Path) -> None:
    assert _error(tmp_path).code == "MD-CFG-01"


def test_load__unknown_name__nearest_one_is_offered(tmp_path: Path) -> None:
    error = _error(_write(tmp_path, "[memory]\ncontxt = 5\n"))
    assert error.code == "MD-CFG-02"
    assert '"memory.context"?' in error.cause
    error = _error(_write(tmp_path, "[memroy]\ncontext = 5\n"))
    assert '"memory"?' in error.cause
    error = _error(tmp_path / "none", environment={"MOET_DESK_MEMORY_CONTEX": "5"})
    assert "MOET_DESK_MEMORY_CONTEXT" in error.cause


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("[memory]\ncontext = 5\n", "memory.context", "from 64"),
        ("[memory]\ncontext = 100.5\n", "memory.context", "whole number"),
        ("[memory]\ncontext = true\n", "memory.context", "whole number"),
        ('[memory]\nram = "much"\n', "memory.ram", "32GiB"),
        ("[answers]\ntemperature = nan\n", "answers.temperature", "0 to 2"),
        ('[ui]\ntheme = "pink"\n', "ui.theme", "moet-light"),
        ("[ui]\ntheme = 4\n", "ui.theme", "moet-light"),
        ("[endpoint]\nport = 70000\n", "endpoint.port", "65,535"),
        ("[endpoint]\nhosts = [1]\n", "endpoint.hosts", "list"),
        ("[engine]\nopportunistic = 1\n", "engine.opportunistic", "true or false"),
        ('[engine]\nopportunistic = "yes"\n', "engine.opportunistic", "true or false"),
        ("memory = 4\n", "memory", "group"),
    ],
)
def test_load__wrong_value__what_may_be_written(
    tmp_path: Path, text: str, name: str, hint: str
) -> None:
    error = _error(_write(tmp_path, text))
    assert error.code == "MD-CFG-03"
    assert error.facts["name"] == name
    assert hint in error.cause
    assert "config.toml" in error.cause


def test_load__wrong_secret__not_shown(tmp_path: Path) -> None:
    error = _error(_write(tmp_path, "[endpoint]\nkey = 12345\n"))
    assert "12345" not in str(error.to_dict())


# -- saving ----------------------------------------------------------------------------------


def test_save__existing_file__comments_order_and_backup_are_kept(tmp_path: Path) -> None:
    text = '# mine\n[ui]  # looks\ntheme = "moet-dark"  # calm\n\n[log]\nlevel = "debug"\n'
    path = _write(tmp_path, text)
    assert save_setting(path, "ui.theme", "moet-light") == "moet-light"
    assert path.read_text() == text.replace("moet-dark", "moet-light")
    assert path.with_name("config.toml.bak").read_text() == text
    save_setting(path, "memory.ram", "2GiB")
    loaded = load(path, environment={}).settings
    assert (loaded.memory.ram, loaded.ui.theme, loaded.log.level) == (
        2 * 2**30, "moet-light", "debug",
    )  # fmt: skip


def test_save__yes_or_no__as_toml_has_it(tmp_path: Path) -> None:
    path = _write(tmp_path, "")
    assert load(path, environment={}).settings.engine.opportunistic is False
    assert save_setting(path, "engine.opportunistic", "true") is True
    assert path.read_text() == "[engine]\nopportunistic = true\n"
    assert load(path, environment={}).settings.engine.opportunistic is True
    assert find_setting("engine.opportunistic").show(True) == "true"


def test_save__none__default_counts_again(tmp_path: Path) -> None:
    path = _write(tmp_path, '[ui]\ntheme = "moet-light"\n[keys]\nchat.stop = "f9"\n')
    assert save_setting(path, "ui.theme", None) == "moet-dark"
    save_setting(path, "keys.chat.stop", None)
    loaded = load(path, environment={})
    assert loaded.settings == Settings()


def test_save__new_file__only_the_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.toml"
    save_setting(path, "endpoint.key", "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(path, environment={}).settings.endpoint.key == "secret"


def test_save__key_in_a_file_that_others_read__they_no_longer_do(tmp_path: Path) -> None:
    path = _write(tmp_path, '[ui]\ntheme = "moet-light"\n')
    path.chmod(0o644)
    save_setting(path, "ui.theme", "moet-dark")
    assert path.stat().st_mode & 0o777 == 0o644  # nothing secret: as it was
    save_setting(path, "endpoint.key", "secret")
    save_setting(path, "endpoint.port", "12000")
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600 or "secret" not in file.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "name", "value", "code"),
    [
        ("[ui\n", "ui.theme", "moet-light", "MD-CFG-01"),
        ("ui = 3\n", "ui.theme", "moet-light", "MD-CFG-03"),
        ("", "ui.theme", "pink", "MD-CFG-03"),
        ("", "ui.thme", "moet-light", "MD-CFG-02"),
    ],
)
def test_save__refused__file_is_untouched(
    tmp_path: Path, text: str, name: str, value: str, code: str
) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(MoetError) as caught:
        save_setting(path, name, value)
    assert caught.value.code == code
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_save__file_is_a_link__stays_one_and_what_it_names_is_written(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "mine.toml"
    real.parent.mkdir()
    real.write_text("# mine\n")
    link = tmp_path / "config.toml"
    link.symlink_to(real)
    save_setting(link, "ui.theme", "moet-light")
    assert link.is_symlink()
    assert real.read_text().startswith("# mine\n")
    assert load(link, environment={}).settings.ui.theme == "moet-light"


def test_save__disk_is_full__old_one_is_whole_and_nothing_lies_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path, '[endpoint]\nkey = "a secret"\n')

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MoetError) as caught:
        save_setting(path, "ui.theme", "moet-light")
    assert caught.value.code == "MD-DISK-02"
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == '[endpoint]\nkey = "a secret"\n'


def test_save__by_many_at_once__nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    ready = threading.Barrier(8)

    def save(number: int) -> None:
        ready.wait()
        save_setting(path, f"keys.chat.k{number}", "f9")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))
    kept = load(path, environment={}).settings.keys
    assert sorted(kept) == [f"chat.k{number}" for number in range(8)]


def test_save__folder_is_a_file__catalogue_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoetError) as caught:
        save_setting(tmp_path / "file" / "config.toml", "ui.theme", "moet-light")
    assert caught.value.code in ("MD-CFG-01", "MD-DISK-03")


# -- folders and the terminal ----------------------------------------------------------------


def test_locate__data_dir__wins_over_the_environment_and_holds_everything(tmp_path: Path) -> None:
    named = {"MOET_DESK_DATA_DIR": str(tmp_path / "env")}
    own = locations.locate(named, tmp_path / "own")
    assert own.data_dir == tmp_path / "own"
    assert locations.locate(named).data_dir == tmp_path / "env"
    everything = (own.models_dir, own.chats_file, own.logs_dir, own.run_dir, own.config_file)
    assert all(path.is_relative_to(own.data_dir) for path in everything)


def test_locate__no_wish__this_systems_folders() -> None:
    found = locations.locate({})
    assert "moet-desk" in str(found.data_dir)
    assert found.config_file.name == "config.toml"
    assert found.data_dir.is_absolute()


def test_locate__no_home_folder__said_instead_of_a_folder_named_tilde(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(MoetError) as caught:
        locations.locate({})
    assert caught.value.code == "MD-CFG-03"


def test_read_terminal__environment__facts() -> None:
    facts = locations.read_terminal(
        {
            "NO_COLOR": "1",
            "CI": "true",
            "TERM": "xterm",
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
        }
    )
    assert (facts.no_color, facts.ci, facts.is_dumb, facts.truecolor, facts.utf8) == (
        True, True, False, True, True,
    )  # fmt: skip
    facts = locations.read_terminal({"NO_COLOR": "", "LC_ALL": "C", "LANG": "de_DE.UTF-8"})
    assert (facts.no_color, facts.ci, facts.is_dumb, facts.utf8) == (False, False, True, False)


def test_child_environment__textual_took_no_color__children_still_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    facts = config.read_terminal()
    monkeypatch.delenv("NO_COLOR")
    assert config.child_environment(facts)["NO_COLOR"] == "1"


def test_import__fresh_interpreter__light() -> None:
    code = (
        # of the processor, not of the clock: other tests run beside this one
        "import sys, time; t = time.process_time(); import moet_desk.config;"
        "print(time.process_time() - t);"
        "print(sorted({'torch', 'textual', 'tomlkit', 'numpy', 'click'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    seconds, heavy = zip(*(run.stdout.splitlines() for run in runs), strict=True)
    assert set(heavy) == {"[]"}
    assert min(map(float, seconds)) < 0.1
