"""`launch`: a coding agent on the local endpoint. Shows what it would do; `--run` does it.

Runs in the main thread, and gives way to the agent.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.agents import (
    AGENTS,
    KEY_VARIABLE,
    NO_KEY,
    Setup,
    Target,
    child_variables,
    is_cloud_key,
)
from moet_desk.cli.context import Invocation, output_options
from moet_desk.cli.output import Format, print_result, print_text
from moet_desk.errors import fail
from moet_desk.errors.disk import unwritable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moet_desk.settings import Endpoint

_ASK_S = 2.0
_EVERYWHERE = ("0.0.0.0", "::", "")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("agent", type=click.Choice(list(AGENTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--run", "runs", is_flag=True, help="Write the files and start the agent.")
@click.option("--model", help="Name of the model; by default the one that is served.")
@output_options
@click.pass_obj
def launch(
    invocation: Invocation,
    /,
    agent: str,
    arguments: tuple[str, ...],
    *,
    runs: bool,
    model: str | None,
) -> int:
    """Point AGENT at the model on this computer. Without --run it only shows how.

    ARGUMENTS go to the agent; put "--" before its own options. Its settings are kept in a folder of
    this program: yours stay as they are. Keys of services are taken out of its environment.
    """
    from moet_desk import config

    endpoint = invocation.load_settings().settings.endpoint
    address = noted_address(invocation.locations.endpoint_file) or address_of(endpoint)
    served = _served(address, endpoint.key)
    name = model or (served or {}).get("id") or "demo"
    context = (served or {}).get("max_model_len")
    target = Target(address, str(name), endpoint.key or NO_KEY, context)
    setup = AGENTS[agent](target, invocation.locations.data_dir / "agents" / agent)
    environment = config.child_environment(config.read_terminal())
    command = [*setup.command, *arguments]
    if not runs:
        removed = sorted(filter(is_cloud_key, environment))
        _show(invocation, setup, command, removed, answers=served is not None)
        return 0
    if served is None:
        raise fail("MD-CLI-03", address=target.openai)
    program = shutil.which(command[0])
    if program is None:
        raise fail("MD-CLI-02", program=command[0])
    for path, text in setup.files.items():
        _write(path, text)
    invocation.say(f"Starting {agent} with {target.model} at {target.openai}")
    return _become(program, command, child_variables(environment, setup))


def noted_address(file: Path) -> str | None:
    """Where the program that runs here listens, as it noted it; None if none does. Its port may be
    another one than in the settings: a free one, or one of its command line.
    """
    try:
        note = json.loads(file.read_text("utf-8"))
        os.kill(int(note["pid"]), 0)
        return str(note["address"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def address_of(endpoint: Endpoint) -> str:
    """Where programs on this computer reach the endpoint of the settings."""
    host = "127.0.0.1" if endpoint.host in _EVERYWHERE else endpoint.host
    return f"http://{f'[{host}]' if ':' in host else host}:{endpoint.port}"


def _served(address: str, key: str) -> Mapping[str, Any] | None:
    """What the endpoint says of its model; None if it does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{address}/v1/models", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=_ASK_S) as answer:
            models = json.load(answer)["data"]
            return dict(models[0]) if models else {}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _show(
    invocation: Invocation, setup: Setup, command: list[str], removed: list[str], *, answers: bool
) -> None:
    variables = {
        name: "•••" if name in _SECRET and value != NO_KEY else value
        for name, value in setup.variables.items()
    }
    files = {str(path): _without_key(text, setup) for path, text in setup.files.items()}
    if invocation.format is not Format.HUMAN:
        print_result(
            invocation.format,
            "launch",
            {
                "command": command,
                "variables": variables,
                "files": files,
                "removed_variables": removed,
                "endpoint_answers": answers,
            },
        )
        return
    lines = ["# This is what --run does; nothing was written or started."]
    for path, text in files.items():
        lines += [f"# {path}", *(f"    {line}" for line in text.splitlines())]
    if removed:
        lines.append("# taken out: " + " ".join(removed))
    lines += [f"{name}={shlex.quote(value)} \\" for name, value in variables.items()]
    print_text("\n".join([*lines, shlex.join(command)]))
    if not answers:
        invocation.say("The endpoint does not answer now. Open moet-desk, or use: moet-desk serve")


_SECRET = frozenset(("ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", KEY_VARIABLE))


def _without_key(text: str, setup: Setup) -> str:
    """A file's text for the eye: Continue has the key in its file."""
    return "\n".join(
        line if "apiKey:" not in line or NO_KEY in line else line.partition(":")[0] + ': "•••"'
        for line in text.splitlines()
    )


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner may read; it may hold the endpoint's key."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(path.name + ".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        partial.replace(path)
    except OSError as problem:
        raise unwritable(path, problem, done="nothing") from problem


def _become(program: str, command: list[str], environment: dict[str, str]) -> int:
    """Replace this process by the agent, so that the terminal and its signals are the agent's."""
    try:
        os.execve(program, command, environment)
    except OSError as problem:
        raise fail("MD-CLI-02", program=f"{program} ({problem.strerror})") from problem
