"""Where each setting comes from, and the one place that reads the environment.

Sources, strongest first: command line, environment (`MOET_DESK_<GROUP>_<KEY>`), config.toml,
default. Loads and saves; the list of settings is in `settings`, folders and terminal facts are in
`locations`. Any thread; what it returns is frozen.
"""

from __future__ import annotations

import fcntl
import os
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from moet_desk import locations
from moet_desk.errors import MoetError, fail
from moet_desk.errors.disk import unwritable
from moet_desk.locations import (
    CONNECT_KEY_VARIABLE,
    DATA_DIR_VARIABLE,
    Locations,
    TerminalFacts,
)
from moet_desk.settings import (
    AUTOMATIC,
    GROUPS,
    KEYS_GROUP,
    PREFIX,
    SETTINGS,
    Setting,
    Settings,
    convert,
    find_setting,
    unknown,
)


class SourceKind(Enum):
    """Who set a value, weakest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Who set a value, and how it is named there: "config.toml", "MOET_DESK_UI_THEME", "--port"."""

    kind: SourceKind
    name: str = ""

    @property
    def is_locked(self) -> bool:
        """Whether saving another value to the file would have no effect now."""
        return self.kind in (SourceKind.ENVIRONMENT, SourceKind.COMMAND_LINE)


_NO_SETTINGS = (DATA_DIR_VARIABLE, CONNECT_KEY_VARIABLE)
_FROM_DEFAULT = ValueSource(SourceKind.DEFAULT)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings with the source of each value that is not a default."""

    settings: Settings
    sources: Mapping[str, ValueSource]

    def source_of(self, name: str) -> ValueSource:
        """Who set the value of "group.key"."""
        return self.sources.get(name, _FROM_DEFAULT)


# -- loading ---------------------------------------------------------------------------------


def load(
    config_file: Path,
    *,
    environment: Mapping[str, str] | None = None,
    command_line: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read the settings from all sources.

    Args:
        config_file: need not exist.
        environment: this process's own by default.
        command_line: values by setting name; None values were not given.

    Raises:
        MoetError: MD-CFG-01 the file cannot be read, MD-CFG-02 an unknown name, MD-CFG-03 a wrong
            value.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    sources: dict[str, ValueSource] = {}
    found = [
        *_from_file(config_file),
        *_from_environment(environment),
        *_from_command_line(command_line or {}),
    ]
    for setting, raw, source in found:
        values[setting.name] = convert(setting, raw, source=source.name)
        sources[setting.name] = source
    return Loaded(_record(values), sources)


def read_value(settings: Settings, name: str) -> Any:
    """Return the value of "group.key" (or "keys.<binding id>", None if it is not set).

    Raises:
        MoetError: MD-CFG-02.
    """
    setting = find_setting(name)
    group, _, key = setting.name.partition(".")
    if group == KEYS_GROUP:
        return settings.keys.get(key)
    return getattr(getattr(settings, group), key)


_Found = tuple[Setting, Any, ValueSource]


def _from_file(path: Path) -> list[_Found]:
    source = ValueSource(SourceKind.FILE, path.name)
    found: list[_Found] = []
    for group, table in read_toml(path).items():
        if group not in GROUPS and group != KEYS_GROUP:
            raise unknown(group, source.name, [*GROUPS, KEYS_GROUP, *SETTINGS])
        if not isinstance(table, dict):
            raise _no_group(group, table, source.name)
        rows = _flat_keys(table) if group == KEYS_GROUP else table
        for key, value in rows.items():
            setting = find_setting(f"{group}.{key}", source=source.name)
            found.append((setting, value, source))
    return found


def _no_group(group: str, value: Any, source: str) -> MoetError:
    reason = f"it is a group; write [{group}] and its settings below"
    return fail("MD-CFG-03", name=group, value=value, source=source, reason=reason, default="empty")


def _flat_keys(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Bindings by id; `chat.stop = "f9"` in TOML is a table in a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; {} if there is none.

    Raises:
        MoetError: MD-CFG-01 with line and column.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise fail("MD-CFG-01", path=str(path), where="opening it", reason=reason) from problem
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        where = f"line {line}"
        raise fail("MD-CFG-01", path=str(path), where=where, reason="not UTF-8") from problem
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        reason, _, place = str(problem).partition(" (at ")
        where = place.rstrip(")") or "somewhere"
        raise fail("MD-CFG-01", path=str(path), where=where, reason=reason) from problem


def _from_environment(environment: Mapping[str, str]) -> list[_Found]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    found: list[_Found] = []
    for variable, value in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        if variable not in by_variable:
            raise unknown(variable, "the environment", [*by_variable, *_NO_SETTINGS])
        source = ValueSource(SourceKind.ENVIRONMENT, variable)
        found.append((by_variable[variable], value, source))
    return found


def _from_command_line(values: Mapping[str, Any]) -> list[_Found]:
    source = ValueSource(SourceKind.COMMAND_LINE, "the command line")
    return [
        (find_setting(name), value, source) for name, value in values.items() if value is not None
    ]


def _record(values: Mapping[str, Any]) -> Settings:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, _, key = name.partition(".")
        groups.setdefault(group, {})[key] = value
    keys = groups.pop(KEYS_GROUP, {})
    return Settings(keys=keys, **{name: GROUPS[name](**own) for name, own in groups.items()})


# -- saving ----------------------------------------------------------------------------------


def save_setting(config_file: Path, name: str, value: Any) -> Any:
    """Put one value into the settings file, keeping its comments and order.

    The old file stays beside it as config.toml.bak; the new one replaces it in one step. Several
    processes may do so at once.

    Args:
        config_file: made if it does not exist.
        name: "group.key".
        value: None removes it, so that the default counts again.

    Returns:
        The value as it counts now.

    Raises:
        MoetError: MD-CFG-01 the file has an error and is left alone, MD-CFG-02, MD-CFG-03,
            MD-DISK-02 or MD-DISK-03 it cannot be written.
    """
    setting = find_setting(name)
    typed = None if value is None else convert(setting, value, source="the command line")
    config_file = Path(os.path.realpath(config_file))  # a link stays one: what it names changes
    with _alone(config_file):
        _change(config_file, setting, value, typed)
    return setting.default if value is None else typed


@contextmanager
def _alone(config_file: Path) -> Iterator[None]:
    """Change a settings file while no other process does: what that one set is not lost.

    The folder is locked, because the file is replaced.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03, the folder cannot be made.
    """
    try:
        config_file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(config_file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise unwritable(config_file, problem, done="nothing") from problem
    try:
        with suppress(OSError):  # some network file systems lock no folder
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _change(config_file: Path, setting: Setting, value: Any, typed: Any) -> None:
    import tomlkit  # slow to import, and rarely needed

    read_toml(config_file)  # refuses a broken file with line and column
    old = config_file.read_text("utf-8") if config_file.exists() else ""
    document = tomlkit.parse(old)
    group, _, key = setting.name.partition(".")
    table = document.setdefault(group, tomlkit.table())
    if not isinstance(table, MutableMapping):
        raise _no_group(group, table, config_file.name)
    _remove(table, key.split("."))
    if value is None:
        table.pop(key, None)
    else:
        table[key] = AUTOMATIC if typed is None else _to_toml(setting, typed)
    endpoint = document.get("endpoint")
    holds_key = isinstance(endpoint, Mapping) and bool(endpoint.get("key"))
    _replace(config_file, tomlkit.dumps(document), old, private=holds_key)


def _remove(table: MutableMapping[str, Any], path: list[str]) -> None:
    """Take out a binding that was written as tables in tables (`chat.stop = "f9"`)."""
    for name in path[:-1]:
        inner = table.get(name)
        if not isinstance(inner, MutableMapping):
            return
        table = inner
    if len(path) > 1:
        table.pop(path[-1], None)


def _to_toml(setting: Setting, value: Any) -> Any:
    if setting.unit == "bytes" and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return list(value) if isinstance(value, tuple) else value


def _replace(path: Path, text: str, old: str, *, private: bool) -> None:
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() and not private else 0o600
        if old:
            _write(path.with_name(path.name + ".bak"), old, mode)
        _write(path, text, mode)
    except OSError as problem:
        raise unwritable(path, problem, done="nothing") from problem


def _write(path: Path, text: str, mode: int) -> None:
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)  # one that was left behind may have another
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # it may hold a key, and the disk may be full
        raise


# -- the environment -------------------------------------------------------------------------


def locate(data_dir: Path | None = None) -> Locations:
    """Return where the files of this user (or of `--data-dir`) are."""
    return locations.locate(os.environ, data_dir)


def read_terminal() -> TerminalFacts:
    """Return what the environment says of the terminal. Read it before Textual is imported."""
    return locations.read_terminal(os.environ)


def c_compiler() -> str | None:
    """Return the compiler that the environment names for building C."""
    return os.environ.get("CC")


def connect_key() -> str:
    """Return the key that the environment has for another server; empty if none."""
    return os.environ.get(CONNECT_KEY_VARIABLE, "")


def certificates() -> Path | None:
    """Return the file or folder of certificates that the environment names."""
    named = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
    return Path(named) if named else None


def hub_endpoint() -> str:
    """Return the address of the hub, as its library takes it from the environment."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def names_hub_token() -> bool:
    """Return whether the environment holds a hub token, which counts before a stored one."""
    return bool(os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"))


def has_desktop() -> bool:
    """Return whether windows can be opened beside the terminal."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def child_environment(terminal: TerminalFacts) -> dict[str, str]:
    """Return the environment for child processes.

    Textual takes NO_COLOR out of it; children must see it as it was.
    """
    environment = dict(os.environ)
    if terminal.no_color:
        environment["NO_COLOR"] = "1"
    return environment
