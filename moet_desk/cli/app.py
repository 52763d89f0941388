"""No command: the app. Wires engine, desk, chats and endpoint to the screens.

Screens and endpoint do not know each other; both see the same engine. Runs in the main thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moet_desk.cli.context import Invocation, engine_options
from moet_desk.errors import fail

_AT_HOME = "The models of this computer answer in moet-desk without --connect."

if TYPE_CHECKING:
    from collections.abc import Callable

    from moet_desk.cli.app_endpoint import AppEndpoint
    from moet_desk.cli.desk import AppDesk
    from moet_desk.engine.handle import EngineHandle
    from moet_desk.locations import Locations
    from moet_desk.settings import Settings
    from moet_desk.store.jobs import Job
    from moet_desk.store.library import Library
    from moet_desk.ui.desk import PlanWishes
    from moet_desk.ui.setup_steps import Setup


def open_app(invocation: Invocation) -> int:
    """Open the app: on the model that was used last, at the first start in the wizard.

    Raises:
        MoetError: MD-TERM-03 or 04 no terminal, MD-ENG-01 another one runs, MD-CFG-.., MD-CHAT-02.
    """
    check_terminal()
    settings = invocation.load_settings().settings

    from moet_desk import runtime
    from moet_desk.cli.app_endpoint import AppEndpoint
    from moet_desk.cli.desk import AppDesk
    from moet_desk.cli.recording import start_recording
    from moet_desk.cli.serve import endpoint_options
    from moet_desk.store.chats import ChatStore
    from moet_desk.ui import app

    places = invocation.locations
    runtime.tune_interpreter()
    with runtime.instance_lock(places):
        runtime.start_logging(places, settings.log.level)
        chats = ChatStore.open(places.chats_file, on_delete=partial(_forget_prompts, places))
        endpoint = AppEndpoint(endpoint_options(settings.endpoint, places))
        desk = AppDesk(invocation, settings, partial(open_pack, invocation, settings, endpoint))
        desk.forget_done()
        start = plan_start(desk, invocation.library, quality=settings.answers.quality)
        with runtime.terminal_guard(places):
            return app.run(
                settings,
                places,
                open_engine=desk.opener(start.model) if start.model else None,
                pack_job=_pack_job(invocation) if start.packs_first else None,
                chats=chats,
                desk=desk,
                endpoint=endpoint,
                model=start.model,
                setup=start.setup,
                record=start_recording,
            )


def check_terminal() -> None:
    """The app needs one.

    Raises:
        MoetError: MD-TERM-03 or 04.
    """
    from moet_desk import config

    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if not stream.isatty():
            raise fail("MD-TERM-03", stream=name)
    terminal = config.read_terminal()
    if terminal.is_dumb:
        raise fail("MD-TERM-04", term=terminal.term or "without a name")


def open_connected(invocation: Invocation, connect: Callable[[], EngineHandle]) -> int:
    """Open the app on another server. An app or endpoint on models of this computer may run beside.

    Args:
        invocation: of this command.
        connect: asks the server; called before the app opens, so that a wrong address shows in the
            terminal, and again if the person asks for it.

    Raises:
        MoetError: as `open_app`, and what `connect` raises.
    """
    check_terminal()
    settings = invocation.load_settings().settings
    opened: list[EngineHandle] = [connect()]

    from moet_desk import runtime
    from moet_desk.cli.app_endpoint import AppEndpoint
    from moet_desk.cli.desk import AppDesk
    from moet_desk.cli.serve import endpoint_options
    from moet_desk.store.chats import ChatStore, Window
    from moet_desk.ui import app
    from moet_desk.ui.desk import NoEndpoint

    places = invocation.locations
    runtime.tune_interpreter()
    with runtime.instance_lock(places, runtime.CONNECTED_LOCK):
        runtime.start_logging(places, settings.log.level, runtime.CONNECTED_LOG)
        chats = ChatStore.open(
            places.chats_file,
            on_delete=partial(_forget_prompts, places),
            window=Window.CONNECTED,
        )
        unused = AppEndpoint(endpoint_options(settings.endpoint, places))
        desk = AppDesk(invocation, settings, partial(open_pack, invocation, settings, unused))
        with runtime.terminal_guard(places):
            return app.run(
                settings,
                places,
                open_engine=lambda: opened.pop() if opened else connect(),
                pack_job=None,
                chats=chats,
                desk=desk,
                endpoint=NoEndpoint(),
                model="",
                setup=None,
                log_name=runtime.CONNECTED_LOG,
                no_loading=_AT_HOME,
            )


@dataclass(frozen=True, slots=True)
class Start:
    """What the app begins with. `model` "": none is loaded; `setup` None: no wizard."""

    model: str = ""
    packs_first: bool = False  # the shipped model, of another version's format
    setup: Setup | None = None


def plan_start(desk: AppDesk, library: Library, *, quality: str) -> Start:
    """The model that was used last, else the shipped one, else the wizard.

    A wizard that was in front when the window was closed goes on where it was; without any model on
    this computer it does so in any case.
    """
    from moet_desk.store.library import DEMO
    from moet_desk.ui.desk import PlanWishes
    from moet_desk.ui.setup_steps import Setup, Step, from_kept

    kept = from_kept(desk.load_setup())
    setup = kept if kept is not None and kept.open else None
    model = desk.last_model()
    if setup is not None and setup.step is Step.START:
        return Start(setup=setup)  # it loads a model of its own
    if model is not None:
        return Start(model, setup=setup)
    if setup is None and any(pack.name == DEMO for pack in library.packs()):
        return Start(DEMO, packs_first=library.needs_packing(DEMO))
    return Start(setup=setup or kept or Setup(wishes=PlanWishes(quality=quality)))


def _forget_prompts(places: Locations) -> None:
    """What models computed of prompts could be turned back into their words. All of it goes: a file
    of it does not say whose it is.
    """
    from moet_desk.store.saved_prefixes import clear  # brings in numpy

    clear(places.prefixes_dir)


def _pack_job(invocation: Invocation) -> Job:
    """The packing of the shipped model, which is here in another format or in part."""
    from moet_desk.store.jobs import start_pack
    from moet_desk.store.library import DEMO, embedded_source

    invocation.library.drop_other_format(DEMO)
    return start_pack(embedded_source(), DEMO, invocation.locations.data_dir)


def open_pack(
    invocation: Invocation,
    settings: Settings,
    endpoint: AppEndpoint,
    name: str,
    wishes: PlanWishes | None,
) -> EngineHandle:
    """Start the engine on a pack, with the endpoint beside it."""
    from moet_desk.engine.handle import start_engine

    pack = invocation.library.ready(name)
    options = engine_options(settings, invocation.locations)
    if wishes is not None:
        from moet_desk.cli.desk_plans import options_for
        from moet_desk.cli.machine import machine_facts

        options = options_for(machine_facts(invocation, None), options, wishes)
    return endpoint.serve(start_engine(pack, options))
