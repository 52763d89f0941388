"""Where this program keeps its files, and what the environment says of the terminal.

Pure: the environment comes in as a mapping (`config` hands it over). Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from moet_desk.errors import MoetError, fail

APP_NAME = "moet-desk"
DATA_DIR_VARIABLE = "MOET_DESK_DATA_DIR"
CONNECT_KEY_VARIABLE = "MOET_DESK_CONNECT_KEY"


@dataclass(frozen=True, slots=True)
class Locations:
    """All folders and files of one user, or of one `--data-dir`. None of them has to exist."""

    data_dir: Path
    config_file: Path

    @property
    def models_dir(self) -> Path:
        """One folder per pack."""
        return self.data_dir / "models"

    @property
    def sources_dir(self) -> Path:
        """One folder per model that was fetched: the files as the hub has them."""
        return self.data_dir / "sources"

    @property
    def jobs_dir(self) -> Path:
        """Records, events and words of long jobs."""
        return self.data_dir / "jobs"

    @property
    def chats_file(self) -> Path:
        """The SQLite file with all chats."""
        return self.data_dir / "chats.sqlite3"

    @property
    def prefixes_dir(self) -> Path:
        """What models computed of prompts, so that a chat is not read again."""
        return self.data_dir / "prefixes"

    @property
    def responses_file(self) -> Path:
        """The SQLite file of the endpoint's answers that clients may go on from."""
        return self.data_dir / "responses.sqlite3"

    @property
    def server_keys_file(self) -> Path:
        """Keys of other servers, by address."""
        return self.data_dir / "server-keys.json"

    @property
    def logs_dir(self) -> Path:
        """Log files and crash reports."""
        return self.data_dir / "logs"

    @property
    def run_dir(self) -> Path:
        """The lock of the running program, and where its endpoint listens."""
        return self.data_dir / "run"

    @property
    def endpoint_file(self) -> Path:
        """Where the endpoint listens, while it does."""
        return self.run_dir / "endpoint.json"


@dataclass(frozen=True, slots=True)
class TerminalFacts:
    """What the environment says about colours, glyphs and who is looking."""

    no_color: bool = False  # NO_COLOR is set and not empty (no-color.org)
    ci: bool = False
    term: str = ""
    truecolor: bool = False
    utf8: bool = True

    @property
    def is_dumb(self) -> bool:
        """Whether the terminal cannot move its cursor."""
        return self.term in ("", "dumb")


def locate(environment: Mapping[str, str], data_dir: Path | None = None) -> Locations:
    """Return the locations for `--data-dir`, else MOET_DESK_DATA_DIR, else this system's own.

    A data folder of one's own holds the settings file too, so that nothing outside is touched.

    Raises:
        MoetError: MD-CFG-03, a path begins with the home folder of nobody.
    """
    chosen = data_dir or (Path(named) if (named := environment.get(DATA_DIR_VARIABLE)) else None)
    if chosen is not None:
        folder = at_home(chosen, DATA_DIR_VARIABLE if data_dir is None else "--data-dir").absolute()
        return Locations(data_dir=folder, config_file=folder / "config.toml")
    try:
        return Locations(
            data_dir=platformdirs.user_data_path(APP_NAME, appauthor=False),
            config_file=platformdirs.user_config_path(APP_NAME, appauthor=False) / "config.toml",
        )
    except RuntimeError as problem:  # a user id that nobody knows, as in some containers
        reason = "this user has no home folder; set HOME, or give --data-dir"
        raise _homeless("HOME", "", reason) from problem


def at_home(path: Path, name: str) -> Path:
    """A path with the home folder in place of a ~; `name` says where it was given.

    Raises:
        MoetError: MD-CFG-03, there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as problem:
        raise _homeless(name, str(path), "there is no such user") from problem


def _homeless(name: str, value: str, reason: str) -> MoetError:
    default = "a folder of this user"
    return fail(
        "MD-CFG-03", name=name, value=value, source="this call", reason=reason, default=default
    )


def read_terminal(environment: Mapping[str, str]) -> TerminalFacts:
    """Return the facts that an environment states."""
    term = environment.get("TERM", "")
    # POSIX order: the first of the three that is set and not empty decides
    locale = next(
        (value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environment.get(name))), ""
    )
    return TerminalFacts(
        no_color=bool(environment.get("NO_COLOR")),
        ci=environment.get("CI", "").lower() not in ("", "0", "false"),
        term=term,
        truecolor=environment.get("COLORTERM", "") in ("truecolor", "24bit"),
        utf8="utf-8" in locale.lower() or "utf8" in locale.lower(),
    )
