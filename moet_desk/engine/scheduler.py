"""Who runs when. Pure decisions over the waiting and running requests; no clock, no IO.

Requests are admitted in the order they came, while pages for their longest possible answer are
free. Of the running ones the oldest unread prompt gets one chunk, then every answer gets one token;
so a long prompt delays a running chat by one chunk at most, and by `TURN_S` and a layer.
"""

from __future__ import annotations

from collections import deque

from moet_desk.engine.request import ActiveRequest

TURN_S = 0.15
"""Seconds after which reading a prompt stops at the next layer, so that the answers of others go on
(design §8: a chat waits 250 ms at most).
"""


class Scheduler:
    """Waiting and running requests, oldest first. Owned by the engine thread."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []

    def next_to_admit(self, free_tokens: int) -> ActiveRequest | None:
        """The request whose turn it is, if there is room for it. Nobody overtakes the first."""
        if not self.waiting or len(self.running) >= self._max_running:
            return None
        first = self.waiting[0]
        return first if first.most_tokens <= free_tokens else None

    def admit(self, request: ActiveRequest) -> None:
        """Move the first waiting request to the running ones."""
        self.waiting.popleft()
        self.running.append(request)

    def to_read(self) -> ActiveRequest | None:
        """The oldest running request whose prompt is not read. One that has ended (it was
        cancelled, or its first token was its last) gets no more work.
        """
        return next((r for r in self.running if r.reading and not r.ended), None)

    def to_write(self) -> list[ActiveRequest]:
        """Running requests that want a token."""
        return [r for r in self.running if not r.reading and not r.ended]

    def take_ended(self) -> list[ActiveRequest]:
        """Remove and return the requests that ended."""
        ended = [request for request in self.running if request.ended]
        if ended:
            self.running = [request for request in self.running if not request.ended]
        return ended
