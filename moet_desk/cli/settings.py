"""`config`, `version` and `completion`: commands that need no model. Run in the main thread."""

from __future__ import annotations

import click

from moet_desk import __version__
from moet_desk.cli.context import Invocation, global_options, output_options
from moet_desk.cli.output import Format, print_result, print_table, print_text


@click.group()
@global_options
def config() -> None:
    """Show and change settings."""


@config.command("list")
@output_options
@click.pass_obj
def list_settings(invocation: Invocation) -> None:
    """All settings with their values and where these come from."""
    from moet_desk.config import read_value
    from moet_desk.settings import SETTINGS

    loaded = invocation.load_settings()
    if invocation.format is Format.HUMAN:
        rows = [["Setting", "Value", "From"]]
        for name, setting in SETTINGS.items():
            source = loaded.source_of(name)
            value = setting.show(read_value(loaded.settings, name))
            rows.append([name, value, source.name or source.kind.value])
        rows += [
            [f"keys.{key}", value, "config.toml"] for key, value in loaded.settings.keys.items()
        ]
        print_table(rows)
        return
    listed = []
    for name, setting in SETTINGS.items():
        source = loaded.source_of(name)
        value = read_value(loaded.settings, name)
        listed.append(
            {
                "name": name,
                "value": setting.show(value) if setting.is_secret else value,
                "source": source.kind.value,
                "source_name": source.name or None,
                "default": setting.default,
                "unit": setting.unit or None,
                "applies": setting.applies.value,
                "help": setting.help,
            }
        )
    document = {"settings": listed, "keys": loaded.settings.keys}
    print_result(invocation.format, "settings", document)


@config.command("get")
@click.argument("name")
@output_options
@click.pass_obj
def get_setting(invocation: Invocation, name: str) -> None:
    """The value of one setting."""
    from moet_desk.config import read_value
    from moet_desk.settings import find_setting

    setting = find_setting(name)
    loaded = invocation.load_settings()
    value = read_value(loaded.settings, name)
    if invocation.format is Format.HUMAN:
        # A person who asks for the key by name wants to copy it.
        print_text(value if setting.is_secret else setting.show(value))
    else:
        source = loaded.source_of(name).kind.value
        document = {"name": name, "value": value, "source": source}
        print_result(invocation.format, "setting", document)


@config.command("set")
@click.argument("name")
@click.argument("value", required=False)
@click.option("--default", "unset", is_flag=True, help="Back to the default.")
@output_options
@click.pass_obj
def set_setting(invocation: Invocation, name: str, value: str | None, *, unset: bool) -> None:
    """Change one setting in the settings file."""
    from moet_desk.config import save_setting
    from moet_desk.settings import find_setting

    if (value is None) is not unset:
        raise click.UsageError("Give a value, or --default")
    setting = find_setting(name)
    typed = save_setting(invocation.locations.config_file, name, value)
    if invocation.format is not Format.HUMAN:
        shown = setting.show(typed) if setting.is_secret else typed
        document = {"name": name, "value": shown, "applies": setting.applies.value}
        print_result(invocation.format, "setting", document)
        return
    invocation.say(f"{name} = {setting.show(typed)}   (counts: {setting.applies.value})")
    source = invocation.load_settings().source_of(name)
    if source.is_locked:
        invocation.say(f"Note: {source.name} overrides it at the moment.")


@config.command("paths")
@output_options
@click.pass_obj
def show_paths(invocation: Invocation) -> None:
    """Where settings, models, chats and logs are."""
    places = invocation.locations
    paths = {
        "config_file": places.config_file,
        "data_dir": places.data_dir,
        "models_dir": places.models_dir,
        "chats_file": places.chats_file,
        "logs_dir": places.logs_dir,
    }
    if invocation.format is Format.HUMAN:
        print_table([["What", "Where"], *([name, str(path)] for name, path in paths.items())])
    else:
        document = {name: str(path) for name, path in paths.items()}
        print_result(invocation.format, "paths", document)


@click.command()
@output_options
@click.pass_obj
def version(invocation: Invocation) -> None:
    """Show the version."""
    if invocation.format is Format.HUMAN:
        print_text(f"moet-desk {__version__}")
    else:
        print_result(invocation.format, "version", {"version": __version__})


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    Load it with: source <(moet-desk completion bash)
    """
    from click.shell_completion import get_completion_class

    root = ctx.find_root()
    made_by = get_completion_class(shell)
    if made_by is None:
        raise click.UsageError(f"There is no completion for {shell}")
    program = root.info_name or "moet-desk"
    print_text(made_by(root.command, {}, program, "_MOET_DESK_COMPLETE").source())
