"""What one invocation of the program knows: its options, folders, settings and models.

Owns the global options, which may stand before or after the command. Settings and the library are
read when a command asks for them. Runs in the main thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moet_desk.cli.output import Format, say
from moet_desk.errors import MoetError
from moet_desk.errors.disk import unexpected

if TYPE_CHECKING:
    from moet_desk.config import Loaded
    from moet_desk.engine.handle import EngineOptions
    from moet_desk.locations import Locations
    from moet_desk.settings import Settings
    from moet_desk.store.library import Library


class _Path(click.Path):
    """A path; an empty one, of a variable that is not set, is not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            raise click.BadParameter("it is empty", ctx, param)
        return super().convert(value, param, ctx)


_PATH = _Path(path_type=Path)

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class Invocation:
    """Options of one run of the program; filled in while the arguments are read."""

    def __init__(self) -> None:
        self.data_dir: Path | None = None
        self.config: Path | None = None
        self.no_color = False
        self.verbosity = 0  # below 0 quiet, above it talkative
        self.format = Format.HUMAN

    @property
    def quiet(self) -> bool:
        return self.verbosity < 0

    @functools.cached_property
    def locations(self) -> Locations:
        """Where this user's files are."""
        from dataclasses import replace

        from moet_desk.config import locate
        from moet_desk.locations import at_home

        found = locate(self.data_dir)
        if self.config is None:
            return found
        return replace(found, config_file=at_home(self.config, "--config"))

    @functools.cached_property
    def library(self) -> Library:
        """The models on this computer."""
        from moet_desk.store.library import Library

        return Library(self.locations.models_dir)

    def model_path(self, name: str) -> Path:
        """The pack of a model; the one that comes with the program is packed if need be.

        Raises:
            MoetError: MD-LIB-01 no such model, MD-PACK-03, 06 or 07 it is not ready; while packing
            as
                `packing.pack_source`.
        """
        from moet_desk.store.library import DEMO

        if name == DEMO and self.library.needs_packing(DEMO):
            from moet_desk.cli import packing  # brings in torch
            from moet_desk.store.library import embedded_source

            packing.pack_at_first_use(embedded_source(), self.library, DEMO, quiet=self.quiet)
        return self.library.ready(name)

    def load_settings(self, **command_line: Any) -> Loaded:
        """Settings of all sources; keywords are names with `__` for the dot, None: not given.

        Raises:
            MoetError: MD-CFG-01..03.
        """
        from moet_desk.config import load

        values = {name.replace("__", "."): value for name, value in command_line.items()}
        if self.no_color:
            values["ui.color"] = "never"
        if self.verbosity > 0:
            values["log.level"] = "debug"
        return load(self.locations.config_file, command_line=values)

    def say(self, text: str) -> None:
        """Words on stderr, unless quiet."""
        if not self.quiet:
            say(text)

    def bug(self, error: Exception) -> MoetError:
        """The catalogue error for an exception nobody expected; its traceback goes to the log."""
        path = "none could be written"
        with suppress(Exception):  # a drive that fails may hold this program too
            from moet_desk.runtime import write_crash

            path = str(write_crash(self.locations, error))
        return unexpected(error, log=path)


def engine_options(settings: Settings, locations: Locations | None = None) -> EngineOptions:
    """What computes, and the memory settings as constraints on the engine's plan.

    Args:
        settings: of the user.
        locations: where prompts that were read outlive the program; None if they do not.
    """
    from moet_desk.engine.handle import EngineOptions, Quality

    memory = settings.memory
    return EngineOptions(
        device=settings.engine.device,
        opportunistic=settings.engine.opportunistic,
        drafts=settings.engine.drafts,
        draft_depth=settings.engine.draft_depth,
        lookahead=settings.engine.lookahead,
        quality=Quality(settings.answers.quality),
        gate=settings.answers.gate,
        context=memory.context,
        pool_slots=memory.pool_slots,
        fine_slots=memory.fine_slots,
        arena_rows=memory.arena_rows,
        ram_bytes=memory.ram,
        vram_bytes=memory.vram_limit,
        kv_format=memory.kv_format,
        dense_format=memory.dense_format,
        threads=memory.threads,
        prefix_bytes=memory.prefixes,
        saved_prefixes=None if locations is None else locations.prefixes_dir,
        saved_bytes=memory.saved_prefixes,
    )


class Size(click.ParamType[int]):
    """A size like 2GiB, in bytes."""

    name = "size"

    def __init__(self, *, at_least: int = 0) -> None:
        self._at_least = at_least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from moet_desk.units import parse_bytes

        try:
            n_bytes = value if isinstance(value, int) else parse_bytes(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error
        if n_bytes < self._at_least:
            raise click.BadParameter(f"{value!r} is too small", ctx, param)
        return n_bytes


def machine_option(command: _Decorated) -> _Decorated:
    """`--machine FILE`: a record made with `doctor --record`, instead of this computer."""
    words = "A recorded computer instead of this one (doctor --record makes one)."
    return click.option("--machine", type=_PATH, metavar="FILE", help=words)(command)


def device_option(command: _Decorated) -> _Decorated:
    """`--device`, which counts before the setting; the command hands it to `load_settings`."""
    choices = click.Choice(["auto", "cpu", "cuda"])
    return click.option("--device", type=choices, help="What computes; auto by default.")(command)


def drafts_option(command: _Decorated) -> _Decorated:
    """`--drafts`, which counts before the setting; the command hands it to `load_settings`."""
    choices = click.Choice(["auto", "off", "mtp", "lookup"])
    words = "Who guesses words ahead; auto by default. Answers stay the same."
    return click.option("--drafts", type=choices, help=words)(command)


def draft_depth_option(command: _Decorated) -> _Decorated:
    """`--draft-depth`, which counts before the setting."""
    words = "Most tokens guessed for a step."
    return click.option("--draft-depth", type=click.IntRange(1, 7), help=words)(command)


def global_options(command: _Decorated) -> _Decorated:
    """Options of the program; they may stand before the command or after it."""
    return _with_options(
        command,
        _option("--data-dir", keep="data_dir", type=_PATH, help="Folder for all files."),
        _option("--config", keep="config", type=_PATH, help="Settings file to use."),
        _option("--no-color", keep="no_color", is_flag=True, help="No colours."),
        _option("-q", "--quiet", keep="verbosity", flag_value=-1, help="Only errors on stderr."),
        _option("-v", "--verbose", keep="verbosity", flag_value=1, help="More in the log."),
    )


def output_options(command: _Decorated) -> _Decorated:
    """`--json` and `--format`, and the global options."""
    formats = click.Choice([wanted.value for wanted in Format])
    return global_options(
        _with_options(
            command,
            _option("--json", keep="format", flag_value="json", help="One JSON document."),
            _option("--format", keep="format", type=formats, help="How data is printed."),
        )
    )


def _with_options(command: _Decorated, *options: Callable[[Any], Any]) -> _Decorated:
    for option in reversed(options):
        command = option(command)
    return command


def _option(*flags: str, keep: str, **more: Any) -> Callable[[Any], Any]:
    """An option whose value goes into the invocation; left out, it changes nothing there."""

    def put(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value is not None and value is not False:
            kept = Format(value) if keep == "format" else value
            setattr(ctx.find_object(Invocation), keep, kept)

    name = flags[-1].strip("-").replace("-", "_")
    return click.option(*flags, f"given_{name}", expose_value=False, callback=put, **more)
