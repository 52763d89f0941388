"""The endpoint beside the app: it serves whatever model is loaded, while the person wants it.

Owns the one `Endpoint` of the app, from the thread that started it on to the next model's. Its
failure (the port is in use) is no reason for the app to fail: the screen says so. Any thread.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from moet_desk.engine.forwarding import Forwarding
from moet_desk.errors import MoetError
from moet_desk.telemetry import EndpointState, EndpointView

if TYPE_CHECKING:
    from moet_desk.api.guard import EndpointOptions
    from moet_desk.api.server import Endpoint
    from moet_desk.engine.handle import EngineHandle

log = logging.getLogger(__name__)


class AppEndpoint:
    """See the module's paragraph. What `start` and `stop` do takes up to seconds."""

    def __init__(self, options: EndpointOptions) -> None:
        self._options = options
        self._lock = threading.Lock()  # guards all below; not the decode loop's
        self._handle: EngineHandle | None = None
        self._endpoint: Endpoint | None = None
        self._wanted = True
        self._error: MoetError | None = None

    # -- models ------------------------------------------------------------------------------

    def serve(self, handle: EngineHandle) -> EngineHandle:
        """Serve a model from when it is loaded until what is returned is closed."""
        threading.Thread(
            target=self._serve_when_ready, args=(handle,), name="endpoint-start", daemon=True
        ).start()
        return Served(handle, self)

    def _serve_when_ready(self, handle: EngineHandle) -> None:
        try:
            handle.wait_ready()
        except MoetError:
            return  # whoever opened it shows why
        with self._lock:
            self._handle = handle
            self._start_if_wanted()

    def leave(self, handle: EngineHandle) -> None:
        """A model is closed: what runs on it ends."""
        with self._lock:
            if self._handle is handle:
                self._stop_now()
                self._handle = None

    # -- the person --------------------------------------------------------------------------

    def start(self) -> None:
        """Let programs connect, now or once a model is loaded."""
        with self._lock:
            self._wanted = True
            self._start_if_wanted()

    def stop(self) -> None:
        """Let nobody connect; answers that are being written end."""
        with self._lock:
            self._wanted = False
            self._error = None
            self._stop_now()

    def stop_call(self, number: int) -> bool:
        """Stop the answer of one call; False if it has ended."""
        endpoint = self._endpoint
        return endpoint is not None and endpoint.calls.stop(number)

    def view(self) -> EndpointView:
        """As it is now. Quick."""
        endpoint, error = self._endpoint, self._error
        running = endpoint is not None and endpoint.is_running
        if running:
            state = EndpointState.RUNNING
        elif error is not None:
            state = EndpointState.FAILED
        else:
            state = EndpointState.WAITS if self._wanted else EndpointState.OFF
        return EndpointView(
            state=state,
            address="" if endpoint is None else endpoint.address,
            calls=() if endpoint is None else endpoint.calls.views(),
            error=None if error is None else error.to_dict(),
        )

    # -- inside ------------------------------------------------------------------------------

    def _start_if_wanted(self) -> None:
        from moet_desk.api.server import Endpoint

        if self._handle is None or not self._wanted:
            return
        if self._endpoint is not None and self._endpoint.is_running:
            return
        before = self._endpoint
        endpoint = Endpoint(self._handle, self._options)
        if before is not None:
            endpoint.calls = before.calls
        try:
            endpoint.start()
        except MoetError as error:
            log.warning("no endpoint: %s", error)
            self._error = error
            return
        # Programs that know a free port which was chosen once find the next model there too.
        self._options = replace(self._options, port=endpoint.options.port)
        self._endpoint, self._error = endpoint, None
        log.info("endpoint at %s/v1", endpoint.address)

    def _stop_now(self) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()


class Served(Forwarding):
    """An engine that leaves the endpoint when it is closed."""

    def __init__(self, handle: EngineHandle, endpoint: AppEndpoint) -> None:
        super().__init__(handle)
        self._endpoint = endpoint

    def close(self) -> None:
        self._endpoint.leave(self._handle)
        super().close()
