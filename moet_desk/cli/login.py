"""`login`: keep a hub token, for models that ask who fetches them. Runs in the main thread."""

from __future__ import annotations

import sys

import click

from moet_desk.cli.context import Invocation, output_options
from moet_desk.cli.output import Format, print_result
from moet_desk.errors import ExitCode


@click.command()
@output_options
@click.pass_obj
def login(invocation: Invocation) -> int:
    """Sign in to the hub with a token, which is asked for or read from stdin.

    Make one that may read on the hub's page of tokens. It is kept where huggingface_hub keeps
    tokens, readable by you alone; "hf auth logout" of that library forgets it.
    """
    from moet_desk.store.hub import Hub

    hub = Hub()
    if sys.stdin.isatty():
        invocation.say(f"Tokens are made at {hub.token_page}")
        token = click.prompt("Token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline()
    hub.sign_in(token)
    if invocation.format is Format.HUMAN:
        invocation.say(f"Signed in to {hub.host}.")
    else:
        print_result(invocation.format, "login", {"hub": hub.host, "signed_in": True})
    return ExitCode.OK
