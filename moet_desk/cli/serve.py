"""`serve`: an engine and its endpoint until a signal ends them. Runs in the main thread."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import click

from moet_desk.cli.context import (
    Invocation,
    device_option,
    draft_depth_option,
    drafts_option,
    engine_options,
    output_options,
)
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import Format, print_document, print_event
from moet_desk.errors import fail, from_record
from moet_desk.telemetry import EngineState

if TYPE_CHECKING:
    from moet_desk.api.guard import EndpointOptions
    from moet_desk.engine.handle import EngineHandle
    from moet_desk.locations import Locations
    from moet_desk.settings import Endpoint as EndpointSettings

_WATCH_S = 0.5


@click.command()
@click.argument("model", default="demo", shell_complete=complete_model)
@click.option("--host", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=click.IntRange(0, 65535), help="11500 by default; 0: a free one.")
@click.option("--key", help="Key that clients must send; needed for other addresses.")
@device_option
@drafts_option
@draft_depth_option
@output_options
@click.pass_obj
def serve(
    invocation: Invocation,
    /,
    model: str,
    *,
    host: str | None,
    port: int | None,
    key: str | None,
    device: str | None,
    drafts: str | None,
    draft_depth: int | None,
) -> int:
    """Serve MODEL to OpenAI clients until Ctrl+C."""
    loaded = invocation.load_settings(
        endpoint__host=host,
        endpoint__port=port,
        endpoint__key=key,
        engine__device=device,
        engine__drafts=drafts,
        engine__draft_depth=draft_depth,
    )
    settings = loaded.settings

    from moet_desk import runtime
    from moet_desk.api.server import Endpoint
    from moet_desk.cli.engine import wait_ready
    from moet_desk.cli.signals import interruptible
    from moet_desk.engine.handle import start_engine
    from moet_desk.engine.reloading import Reloadable

    with runtime.instance_lock(invocation.locations), interruptible() as interrupt:
        runtime.start_logging(invocation.locations, settings.log.level)
        pack = invocation.model_path(model)
        how = engine_options(settings, invocation.locations)
        handle = Reloadable(pack.name, lambda: start_engine(pack, how))
        # Listening first: a port in use is known before a big model is loaded, and clients that
        # come early are told that it is loading.
        options = endpoint_options(settings.endpoint, invocation.locations)
        endpoint = Endpoint(handle, options)
        try:
            endpoint.start()
            wait_ready(handle, quiet=invocation.quiet, stop=interrupt.asked)
            if not interrupt.asked():
                _announce(invocation, endpoint.address, model)
            _serve_until(handle, interrupt.came)
        finally:
            endpoint.stop()
            handle.close()
    invocation.say("Stopped.")
    return interrupt.exit_code


def endpoint_options(settings: EndpointSettings, places: Locations) -> EndpointOptions:
    """The endpoint settings as the server takes them."""
    from moet_desk.api.guard import EndpointOptions

    return EndpointOptions(
        host=settings.host,
        port=settings.port,
        key=settings.key or None,
        hosts=settings.hosts,
        cors=settings.cors,
        aliases=settings.aliases,
        responses=places.responses_file,
        note=places.endpoint_file,
    )


def _announce(invocation: Invocation, address: str, model: str) -> None:
    fields = {"model": model, "address": f"{address}/v1", "pid": os.getpid()}
    if invocation.format is Format.JSON:
        print_document(fields)
    elif invocation.format is Format.NDJSON:
        print_event("ready", **fields)
    invocation.say(f"Serving {model} at {address}/v1   (Ctrl+C ends it)")


def _serve_until(handle: EngineHandle, came: threading.Event) -> None:
    """Wait for a signal.

    Raises:
        MoetError: the engine stopped by itself.
    """
    while not came.wait(_WATCH_S):
        now = handle.snapshot()
        if now.state is EngineState.FAULT:
            unnamed = fail("MD-ENG-03", reason="It gave no reason", log="the log folder")
            raise from_record(now.error) or unnamed
