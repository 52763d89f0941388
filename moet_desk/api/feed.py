"""The answers of one call between the engine and the endpoint's loop: events in, cancel out.

Owns the crossing from the engine thread to asyncio, and the rule that an answer nobody waits for
is cancelled: when the client hangs up, when its handler ends early, when the server stops. No
thread per request. Everything but `_wake` runs in the endpoint's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from starlette.types import Receive

from moet_desk.engine.handle import RequestStream
from moet_desk.telemetry import Event


class EventFeed:
    """Awaitable view of some `RequestStream`s. Make it through `open_feed`."""

    __slots__ = ("_arrived", "_loop", "_streams", "hung_up")

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.hung_up = False
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        for stream in streams:
            stream.on_event(self._wake)

    @property
    def done(self) -> bool:
        """True once the last event of each was taken."""
        return all(stream.done for stream in self._streams)

    def cancel(self) -> None:
        """Ask the engine to stop all that runs; the last events still come."""
        for stream in self._streams:
            if not stream.done:
                stream.cancel()

    def cancel_one(self, index: int) -> None:
        """Ask the engine to stop one of them."""
        self._streams[index].cancel()

    async def next(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Return what has arrived, with the number of its stream; maybe nothing, at the latest
        after `timeout_s`.
        """
        events = self._take()
        if events or self.hung_up:
            return events
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        # Cleared before taking: an event that comes between the two wakes the next call.
        self._arrived.clear()
        return self._take()

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to hang up, then cancel."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hung_up = True
        self._arrived.set()
        self.cancel()

    def _take(self) -> list[tuple[int, Event]]:
        return [(i, event) for i, stream in enumerate(self._streams) for event in stream.take()]

    def _wake(self) -> None:
        # The loop may be closed while the engine still ends a request.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.set)


@contextlib.asynccontextmanager
async def open_feed(streams: Sequence[RequestStream], receive: Receive) -> AsyncIterator[EventFeed]:
    """Read the events of some requests; leaving the block cancels those that have not ended."""
    feed = EventFeed(streams)
    watcher = asyncio.create_task(feed.watch(receive))
    try:
        yield feed
    finally:
        watcher.cancel()
        if not feed.done:
            feed.cancel()
