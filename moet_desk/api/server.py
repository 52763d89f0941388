"""Runs the endpoint: its socket, its thread, its start and stop.

Owns the listening socket and the thread "endpoint" with its own event loop. Signals are left to the
main thread. `Endpoint` may be used from any one thread.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import uvicorn

from moet_desk.api.app import build_app
from moet_desk.api.calls import Calls
from moet_desk.api.guard import EndpointOptions
from moet_desk.engine.handle import EngineHandle
from moet_desk.errors import fail
from moet_desk.store.responses import ResponseStore

log = logging.getLogger(__name__)

_STOP_GRACE_S = 1  # running answers get this long to end, then they are cancelled
_NEXT_PORTS = 100  # how far the search for a free port goes
_BACKLOG = 128
_SEND_BUFFER = 128 * 2**10  # of each connection; the system would keep megabytes for slow readers
_MAX_CONNECTIONS = 512  # beyond it a bare 503; well below the usual limit of open files


class Endpoint:
    """The local server of one engine.

    Args of the constructor: the engine, and where to listen. `start` may be called again after
    `stop`. `calls` lists who called it since it was made.
    """

    def __init__(self, engine: EngineHandle, options: EndpointOptions | None = None) -> None:
        self._engine = engine
        self._options = options or EndpointOptions()
        self.calls = Calls()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def options(self) -> EndpointOptions:
        """Where it listens; after `start` with the port it really has."""
        return self._options

    @property
    def address(self) -> str:
        """Base address for clients on this computer, without "/v1"."""
        host = self._options.host
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        name = f"[{local}]" if ":" in local else local
        return f"http://{name}:{self._options.port}"

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Bind, start the thread and return when clients can connect.

        Raises:
            MoetError: MD-API-01 port in use, MD-API-06 no key for a network address, MD-CFG-03 an
                address that cannot be bound, MD-ENG-03 the server did not start.
        """
        if self.is_running:
            return
        listener = bind(self._options)
        self._options = replace(self._options, port=listener.getsockname()[1])
        self._server = _Server(self._engine, self._options, self.calls)
        self._thread = threading.Thread(
            target=self._server.run_on, args=(listener,), name="endpoint", daemon=True
        )
        self._thread.start()
        self._server.ready.wait()
        if not self._server.started:
            raise fail("MD-ENG-03", reason="The endpoint did not start", log="moet-desk.log")
        if self._options.note is not None:
            write_note(self._options.note, self.address)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the socket, end running answers, end the thread."""
        if self._server is not None and self._thread is not None:
            if self._options.note is not None:
                self._options.note.unlink(missing_ok=True)
            self._server.should_exit = True
            self._thread.join(timeout_s)
        self._server = self._thread = None


class _Server(uvicorn.Server):
    """uvicorn on a socket of ours, telling when it is up."""

    def __init__(self, engine: EngineHandle, options: EndpointOptions, calls: Calls) -> None:
        self.ready = threading.Event()  # up, or never will be: see `started`
        self._kept = ResponseStore(options.responses)
        super().__init__(
            uvicorn.Config(
                build_app(engine, options, self._kept, calls),
                http="h11",
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_STOP_GRACE_S,
                limit_concurrency=_MAX_CONNECTIONS,
            )
        )

    def run_on(self, listener: socket.socket) -> None:
        try:
            with listener:
                asyncio.run(self.serve(sockets=[listener]))
        finally:
            self._kept.close()
            self.ready.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def write_note(path: Path, address: str) -> None:
    """Say where this process listens, for programs on this computer; best effort."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"address": address, "pid": os.getpid()}), "utf-8")
    except OSError as problem:
        log.warning("%s cannot be written: %s", path, problem)


def bind(options: EndpointOptions) -> socket.socket:
    """Open the listening socket. Raises as `Endpoint.start`."""
    if options.key is None and not options.is_loopback:
        raise fail(
            "MD-API-06",
            reason=f"Listening on {options.host} without a key would serve anyone who can reach it",
            hint="Give a key: moet-desk serve --key KEY, or set endpoint.key.",
        )
    try:
        return _listen(options.host, options.port)
    except socket.gaierror as error:
        raise _bad_address("endpoint.host", options.host, error) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = _next_free(options.host, options.port)
            raise fail("MD-API-01", host=options.host, port=options.port, next_port=free) from error
        name = "endpoint.port" if error.errno == errno.EACCES else "endpoint.host"
        raise _bad_address(name, options.host, error) from error


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # "localhost" may name both; clients try 127.0.0.1 first.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.bind(address)
        # Linux lets two sockets bind one port until one of them listens.
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _next_free(host: str, port: int) -> int:
    """A port above `port` that can be bound now; 0 (any) if none is near."""
    for candidate in range(port + 1, min(port + _NEXT_PORTS, 65536)):
        try:
            _listen(host, candidate).close()
        except OSError:
            continue
        return candidate
    return 0


def _bad_address(name: str, value: object, error: OSError) -> Exception:
    reason = error.strerror or str(error)
    default = "127.0.0.1" if name == "endpoint.host" else "11500"
    return fail("MD-CFG-03", name=name, value=value, source="serve", reason=reason, default=default)
