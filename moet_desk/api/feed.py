"""One request between the engine and the endpoint's loop: events in, cancel out.

Owns the crossing from the engine thread to asyncio, and the rule that an answer nobody waits for
is cancelled: when the client hangs up, when its handler ends early, when the server stops. No
thread per request. Everything but `_wake` runs in the endpoint's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from moet_desk.engine.handle import RequestStream
from moet_desk.telemetry import Event


class EventFeed:
    """Awaitable view of a `RequestStream`. Make it through `open_feed`."""

    __slots__ = ("_arrived", "_loop", "_stream", "hung_up")

    def __init__(self, stream: RequestStream) -> None:
        self.hung_up = False
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        stream.on_event(self._wake)

    @property
    def done(self) -> bool:
        """True once the last event was taken."""
        return self._stream.done

    def cancel(self) -> None:
        """Ask the engine to stop; its last event still comes."""
        self._stream.cancel()

    async def next(self, timeout_s: float) -> list[Event]:
        """Return what has arrived; maybe nothing, at the latest after `timeout_s`."""
        events = self._stream.take()
        if events or self.hung_up:
            return events
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        # Cleared before taking: an event that comes between the two wakes the next call.
        self._arrived.clear()
        return self._stream.take()

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to hang up, then cancel."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hung_up = True
        self._arrived.set()
        self.cancel()

    def _wake(self) -> None:
        # The loop may be closed while the engine still ends a request.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.set)


@contextlib.asynccontextmanager
async def open_feed(stream: RequestStream, receive: Receive) -> AsyncIterator[EventFeed]:
    """Read a request's events; leaving the block cancels it unless it has ended."""
    feed = EventFeed(stream)
    watcher = asyncio.create_task(feed.watch(receive))
    try:
        yield feed
    finally:
        watcher.cancel()
        if not feed.done:
            feed.cancel()
