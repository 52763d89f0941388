"""The host's side of a step that lacks rows: reads them from the pack while the step's kernel
waits.

One thread watches the mailbox, a few others read in parallel. During a step the arena belongs to
this thread; the engine thread does not touch it until the step's event. A failed read is answered
as such, so the step ends at once and its requests fail with the error kept here. A step that gave
up leaves its request behind: the engine thread lets it come to its end (`settle`) before the next.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from moet_desk.errors import MoetError
from moet_desk.kernels.mailbox import MAILBOX, Answer, Request, answer, read_request
from moet_desk.store.arena import Arena
from moet_desk.store.pack_format import Plane

log = logging.getLogger("moet_desk.engine")

READERS = 8
"""Threads that read rows side by side (prior art: a single reader gets a third of a drive's rate).
"""

CLOSE_S = 1.0
"""How long the end of the server waits for a read."""

_IDLE_S = 0.0005
"""Between looks while no step is announced; during one the thread looks all the time."""

_SETTLE_LOOK_S = 0.001


class MailboxServer:
    """Serves one mailbox until `close`.

    Args:
        memory: the pinned page of the mailbox.
        arena: where rows are read to.
    """

    def __init__(self, memory: mmap.mmap, arena: Arena) -> None:
        self._words: NDArray[np.int32] = np.frombuffer(memory, dtype=np.int32)
        self._arena = arena
        self._stop, self._step = threading.Event(), threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="io")
        self.error: MoetError | None = None
        self.served = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name="io-mailbox", daemon=True)
        self._thread.start()

    def take_error(self) -> MoetError | None:
        """The error of the last failed request; asking clears it."""
        error, self.error = self.error, None
        return error

    def begin(self) -> None:
        """A step is about to run: wait for its requests without sleeping."""
        self._step.set()

    def end(self) -> None:
        """The step has ended; the next one may be far away."""
        self._step.clear()

    def settle(self, limit_s: float) -> bool:
        """Wait until all that was posted is answered; between steps only. False: not in time."""
        deadline = time.perf_counter() + limit_s
        while self._words[MAILBOX.done] != self._words[MAILBOX.posted]:
            if time.perf_counter() >= deadline:
                return False
            time.sleep(_SETTLE_LOOK_S)
        return True

    def close(self) -> None:
        """End the threads; one whose read does not end is left to itself."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("a read for a step has not ended and is left behind")
        self._readers.shutdown(wait=False)

    def _serve(self) -> None:
        last = int(self._words[MAILBOX.done])
        while not self._stop.is_set():
            request = read_request(self._words, last)
            if request is None:
                if self._step.is_set():
                    time.sleep(0)  # lets other threads have the interpreter's lock
                else:
                    self._step.wait(_IDLE_S)
                continue
            last = request.number
            began = time.perf_counter()
            self._answer(request)
            self.seconds += time.perf_counter() - began
            self.served += 1

    def _answer(self, request: Request) -> None:
        plane = Plane.FINE if request.plane else Plane.BASE
        try:
            brought = self._arena.bring(plane, request.rows, keep=request.kept, run=self._readers)
        except Exception as error:  # the step must be told, whatever went wrong
            log.exception("reading rows for a step failed")
            self.error = error if isinstance(error, MoetError) else None
            answer(self._words, request, status=Answer.FAILED)
            return
        places = [place for place, _ in brought]
        dropped = [row for _, row in brought]
        answer(self._words, request, status=Answer.READ, places=places, dropped=dropped)
