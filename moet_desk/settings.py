"""The list of all settings: typed records, and a schema made from them.

The records are the only list; the settings screen, environment names, the command line and the
documentation are made from `SETTINGS`. Pure: reading and saving is in `config`. Any thread.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, Literal

from moet_desk.errors import MoetError, fail
from moet_desk.units import parse_bytes, show_memory

PREFIX = "MOET_DESK_"
KEYS_GROUP = "keys"
AUTOMATIC = "auto"
"""What people write for "let the program choose"; None inside."""


class Applies(Enum):
    """When a changed setting takes effect."""

    NOW = "now"
    NEXT_MESSAGE = "next message"
    RELOAD = "reload"  # when the model is loaded again
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the schema describes it."""

    name: str  # "group.key"
    help: str
    unit: str
    applies: Applies
    default: Any
    kind: type  # int, float, bool, str or tuple (of str)
    choices: tuple[str, ...] = ()
    least: float | None = None
    largest: float | None = None
    is_optional: bool = False  # "auto" is a value
    is_secret: bool = False

    @property
    def group(self) -> str:
        """The part before the dot."""
        return self.name.partition(".")[0]

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.replace(".", "_").upper()

    @property
    def range_words(self) -> str:
        """What may be written, in words: "a whole number from 64 to 10000000, or auto"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = "a size like 32GiB" if self.unit == "bytes" else _WORDS_OF_KIND[self.kind]
        limits = [
            f"{word} {self._limit_words(limit)}"
            for word, limit in (("from", self.least), ("to", self.largest))
            if limit is not None
        ]
        return " ".join([words, *limits]) + (f", or {AUTOMATIC}" if self.is_optional else "")

    def show(self, value: Any) -> str:
        """Return a value as people read it; secrets are hidden."""
        if value is None:
            return AUTOMATIC
        if self.is_secret:
            return "•••" if value else ""
        if self.unit == "bytes":
            return show_memory(value)
        if self.kind is bool:
            return str(value).lower()
        return ", ".join(value) if isinstance(value, tuple) else str(value)

    def _limit_words(self, limit: float) -> str:
        return show_memory(limit) if self.unit == "bytes" else f"{limit:,.0f}"


@dataclass(frozen=True, slots=True)
class _About:
    """What the schema says of one field, beside its type and default."""

    help: str
    applies: Applies
    unit: str = ""
    least: float | None = None
    largest: float | None = None
    is_secret: bool = False


_R, _N, _M, _S = Applies.RELOAD, Applies.NOW, Applies.NEXT_MESSAGE, Applies.RESTART
_COUNT: dict[str, Any] = {"least": 1, "largest": 10_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What computes."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        _About("What computes: cuda is an NVIDIA GPU, auto takes one that can be used.", _R),
    ] = "auto"
    opportunistic: Annotated[
        bool,
        _About(
            "Fast and balanced use an expert's FP4 weights when they happen to be at hand. The same"
            " question may then get another answer. CPU only.",
            _R,
        ),
    ] = False
    drafts: Annotated[
        Literal["auto", "off", "mtp", "lookup"],
        _About(
            "Who guesses words ahead: the model's own head (mtp) or the text so far (lookup). auto"
            " takes what gains time, or none. Answers stay the same.",
            _R,
        ),
    ] = "auto"
    draft_depth: Annotated[
        int,
        _About(
            "Most tokens guessed for a step; with mtp and lookup always so many.",
            _R,
            "tokens",
            least=1,
            largest=7,
        ),
    ] = 3
    lookahead: Annotated[
        bool,
        _About(
            "On a GPU: bring experts from RAM that the next layer will probably need while one is"
            " computed. Answers stay the same.",
            _R,
        ),
    ] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How much memory the engine plans with. Automatic values are sized for this computer."""

    context: Annotated[
        int | None,
        _About("Longest chat the model can hold.", _R, "tokens", least=64, largest=10_000_000),
    ] = None
    pool_slots: Annotated[
        int | None, _About("Experts kept ready at 2 bits.", _R, "slots", **_COUNT)
    ] = None
    fine_slots: Annotated[
        int | None, _About("Experts kept ready at 4 bits.", _R, "slots", **_COUNT)
    ] = None
    arena_rows: Annotated[int | None, _About("Experts kept in RAM.", _R, "rows", least=0)] = None
    prefixes: Annotated[
        int | None,
        _About("RAM that keeps what was read of prompts; 0 for none.", _R, "bytes", least=0),
    ] = None
    saved_prefixes: Annotated[
        int,
        _About("Disk that keeps it between starts; 0 for none.", _R, "bytes", least=0),
    ] = 4 * 2**30
    kv_format: Annotated[
        Literal["auto", "nvfp4", "fp8", "bf16", "f32"],
        _About("How the memory of a chat is stored; smaller holds more text.", _R),
    ] = "auto"
    dense_format: Annotated[
        Literal["auto", "stored", "int8"],
        _About("Weights of all but the experts: int8 rounds, auto where a card needs it.", _R),
    ] = "auto"
    ram: Annotated[
        int | None, _About("RAM the program may use in all.", _R, "bytes", least=64 * 2**20)
    ] = None
    vram_limit: Annotated[
        int | None,
        _About(
            "Most of a card's memory the program may use; experts move out and in as it changes.",
            _N,
            "bytes",
            least=2**30,
        ),
    ] = None
    threads: Annotated[
        int | None, _About("CPU threads that compute.", _R, "threads", least=1, largest=1024)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How answers are made."""

    quality: Annotated[
        Literal["fast", "balanced", "exact"],
        _About("2-bit experts, the exact ones too where those are unsure, or the exact ones.", _M),
    ] = "fast"
    gate: Annotated[
        float | None,
        _About(
            "Balanced words less likely than this are made again, exactly. Unset: as the model was"
            " calibrated, else 0.6.",
            _M,
            least=0,
            largest=1,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _About("0 always takes the likeliest word; higher is freer.", _M, least=0, largest=2),
    ] = None
    system: Annotated[str, _About("Instruction put before each new chat.", _M)] = ""
    max_tokens: Annotated[
        int | None,
        _About("Longest answer; automatic goes up to the context.", _M, "tokens", least=1),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ui:
    """How the app looks."""

    theme: Annotated[
        Literal["moet-dark", "moet-light", "moet-contrast", "ansi-dark", "ansi-light"],
        _About("Colours of the app.", _N),
    ] = "moet-dark"
    glyphs: Annotated[
        Literal["auto", "unicode", "ascii"], _About("Characters used for bars and maps.", _S)
    ] = "auto"
    color: Annotated[
        Literal["auto", "always", "never"], _About("Whether colours are used.", _S)
    ] = "auto"
    motion: Annotated[
        Literal["full", "reduced", "none"], _About("How much moves on the screen.", _N)
    ] = "full"
    mark_reruns: Annotated[
        bool, _About("Whether words of balanced answers that were made again are underlined.", _N)
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where other programs reach the model."""

    host: Annotated[str, _About("Address to listen on; only this computer by default.", _S)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, _About("Port to listen on; 0 takes a free one.", _S, least=0, largest=65535)
    ] = 11500
    key: Annotated[
        str, _About("Key that clients must send; needed off this computer.", _S, is_secret=True)
    ] = ""
    hosts: Annotated[
        tuple[str, ...], _About("Further names of this computer that clients may use.", _S)
    ] = ()
    cors: Annotated[
        tuple[str, ...], _About("Web pages that may call the endpoint, like http://a.b:80.", _S)
    ] = ()
    aliases: Annotated[
        tuple[str, ...], _About("Further names by which clients may ask for the model.", _S)
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is written to the log file."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], _About("Least importance that is kept.", _S)
    ] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. `keys` maps binding ids ("chat.stop") to keys ("escape")."""

    engine: Engine = field(default_factory=Engine)
    memory: Memory = field(default_factory=Memory)
    answers: Answers = field(default_factory=Answers)
    ui: Ui = field(default_factory=Ui)
    endpoint: Endpoint = field(default_factory=Endpoint)
    keys: Mapping[str, str] = field(default_factory=dict)
    log: Log = field(default_factory=Log)


# -- schema ----------------------------------------------------------------------------------

_WORDS_OF_KIND: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list of texts",
}

GROUPS: Mapping[str, type] = {
    "engine": Engine,
    "memory": Memory,
    "answers": Answers,
    "ui": Ui,
    "endpoint": Endpoint,
    "log": Log,
}
"""The record of each group; keys have none, their names are open-ended."""


def _describe(group: str, key: str, annotation: Any, default: Any) -> Setting:
    kind, about = typing.get_args(annotation)
    choices: tuple[str, ...] = ()
    is_optional = isinstance(kind, types.UnionType)
    if is_optional:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        kind, choices = str, typing.get_args(kind)
    return Setting(
        name=f"{group}.{key}",
        help=about.help,
        unit=about.unit,
        applies=about.applies,
        default=default,
        kind=typing.get_origin(kind) or kind,
        choices=choices,
        least=about.least,
        largest=about.largest,
        is_optional=is_optional,
        is_secret=about.is_secret,
    )


def _describe_all() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for group, record in GROUPS.items():
        annotations = typing.get_type_hints(record, include_extras=True)
        for own in fields(record):
            setting = _describe(group, own.name, annotations[own.name], own.default)
            found[setting.name] = setting
    return found


SETTINGS: Mapping[str, Setting] = _describe_all()
"""Every setting by name, in the order of the settings screen; keys are not in it."""


def find_setting(name: str, *, source: str = "the command line") -> Setting:
    """Return the setting of a name; "keys.<binding id>" is one too.

    Raises:
        MoetError: MD-CFG-02 with the nearest name.
    """
    group, _, key = name.partition(".")
    if group == KEYS_GROUP and key:
        return Setting(
            name=name,
            help="Key of this action.",
            unit="",
            applies=Applies.NOW,
            default="",
            kind=str,
        )
    found = SETTINGS.get(name)
    if found is None:
        raise unknown(name, source, list(SETTINGS))
    return found


def unknown(name: str, source: str, known: Sequence[str]) -> MoetError:
    """Return MD-CFG-02 for a name, with the one that was probably meant."""
    from difflib import get_close_matches  # only needed when something went wrong

    close = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    return fail("MD-CFG-02", name=name, source=source, guess=guess)


def convert(setting: Setting, value: Any, *, source: str) -> Any:
    """Return a value in its type; text is read as a number, size or list where one is wanted.

    Raises:
        MoetError: MD-CFG-03 with what may be written.
    """
    if setting.is_optional and value in (None, AUTOMATIC, ""):
        return None
    try:
        typed = _READERS[setting.kind](value, setting)
        if setting.choices and typed not in setting.choices:
            raise ValueError("not a choice")
        if setting.least is not None and not typed >= setting.least:
            raise ValueError("too small")
        if setting.largest is not None and not typed <= setting.largest:
            raise ValueError("too large")
    except (ValueError, OverflowError) as problem:
        raise fail(
            "MD-CFG-03",
            name=setting.name,
            value="•••" if setting.is_secret else value,
            source=source,
            reason=f"it must be {setting.range_words}",
            default=setting.show(setting.default) or "empty",
        ) from problem
    return typed


def _read_int(value: Any, setting: Setting) -> int:
    if isinstance(value, str):
        return parse_bytes(value) if setting.unit == "bytes" else int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("not a whole number")


def _read_float(value: Any, _: Setting) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("not a number")
    return float(value)


def _read_bool(value: Any, _: Setting) -> bool:
    words = {"true": True, "false": False}
    found = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ValueError("neither true nor false")
    return found


def _read_text(value: Any, _: Setting) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    value.encode()  # half of a character cannot be saved; that is a ValueError too
    return value


def _read_list(value: Any, setting: Setting) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return tuple(_read_text(part, setting) for part in value)
    raise ValueError("not a list of texts")


_READERS: Mapping[type, Any] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_text,
    tuple: _read_list,
}
