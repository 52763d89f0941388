"""`chat`: the app, also on an OpenAI-compatible server elsewhere. Runs in the main thread."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from moet_desk.cli.context import Invocation, global_options

if TYPE_CHECKING:
    from moet_desk.engine.remote_wire import Server


@click.command()
@click.option("--connect", "address", metavar="URL", help="Base address of another server.")
@click.option("--model", help="Which of its models; not needed if it has one.")
@click.option("--ask-key", is_flag=True, help="Ask for its key and keep that; stdin works too.")
@global_options
@click.pass_obj
def chat(
    invocation: Invocation, /, *, address: str | None, model: str | None, ask_key: bool
) -> int:
    """Open the app. With --connect the answers come from an OpenAI-compatible server.

    Its key is taken from MOET_DESK_CONNECT_KEY, else from what --ask-key kept for this server in a
    file that only you can read.
    """
    from moet_desk.cli import app

    if address is None:
        if model is not None or ask_key:
            raise click.UsageError("--model and --ask-key belong to --connect URL")
        return app.open_app(invocation)

    from moet_desk.engine.remote import connect

    server = _server(invocation, address, asks=ask_key)
    return app.open_connected(invocation, lambda: connect(server, model))


def _server(invocation: Invocation, address: str, *, asks: bool) -> Server:
    """The server with its key."""
    from moet_desk import config
    from moet_desk.api.guard import is_loopback
    from moet_desk.engine.remote_wire import read_address
    from moet_desk.store.server_keys import read_key, save_key

    try:
        server = read_address(address)
    except ValueError as error:
        raise click.UsageError(f"--connect: {error}") from error
    file = invocation.locations.server_keys_file
    if asks:
        save_key(file, server.origin, _ask(server.name))
    key = _checked(config.connect_key()) or read_key(file, server.origin)
    if key and server.scheme == "http" and not is_loopback(server.host):
        invocation.say(f"Note: {server.name} is reached without encryption; so is its key.")
    return replace(server, key=key)


def _ask(name: str) -> str:
    if sys.stdin.isatty():
        asked = f"Key of {name} (empty forgets it)"
        given = click.prompt(asked, hide_input=True, err=True, default="", show_default=False)
    else:
        given = sys.stdin.readline()
    return _checked(given)


def _checked(key: str) -> str:
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise click.UsageError("The key has characters that no key has")
    return key
