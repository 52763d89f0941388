"""An engine whose model can be put away and loaded again, behind one handle.

Owns which handle is the one in use. The engine itself knows nothing of it: to put a model away is
to close its engine, and its memory is free then. Any thread.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moet_desk.engine.handle import EngineHandle, GenerateRequest, ModelInfo, RequestStream
from moet_desk.errors import fail
from moet_desk.telemetry import EngineSnapshot


class Reloadable:
    """An `EngineHandle` with `load` and `unload`.

    Args:
        name: of the model.
        start: starts an engine for it and returns at once.
    """

    def __init__(self, name: str, start: Callable[[], EngineHandle]) -> None:
        self.name = name
        self._start = start
        self._changing = threading.Lock()  # one load or unload at a time
        self._calls = 0  # into the handle that must not be closed under them
        self._quiet = threading.Condition()
        self._limits: list[int | None] = []  # of the card's memory, the newest last
        self._handle: EngineHandle | None = start()

    def load(self) -> None:
        """Begin to load the model; nothing if it is there."""
        with self._changing:
            if self._handle is None:
                handle = self._start()
                for limit in self._limits[-1:]:
                    handle.limit_vram(limit)
                self._handle = handle

    def unload(self) -> None:
        """Put the model away: answers end as cancelled, and its memory is free on return. Waits
        for a model that is being loaded.
        """
        with self._changing:
            with self._quiet:
                handle, self._handle = self._handle, None
                self._quiet.wait_for(lambda: not self._calls)
            if handle is None:
                return
            handle.close()
            del handle
            gc.unfreeze()  # the engine froze what was to live as long as its model
            gc.collect()
            _empty_card_cache()

    @contextmanager
    def _in_use(self) -> Iterator[EngineHandle]:
        with self._quiet:
            handle = self._handle
            if handle is None:
                raise fail("MD-ENG-07", why=": it was put away")
            self._calls += 1
        try:
            yield handle
        finally:
            with self._quiet:
                self._calls -= 1
                self._quiet.notify_all()

    # -- EngineHandle ------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """See `EngineHandle.submit`."""
        with self._in_use() as handle:
            return handle.submit(request)

    def count_tokens(self, request: GenerateRequest) -> int:
        """See `EngineHandle.count_tokens`."""
        with self._in_use() as handle:
            return handle.count_tokens(request)

    def encode(self, request: GenerateRequest) -> list[int]:
        """See `EngineHandle.encode`."""
        with self._in_use() as handle:
            return handle.encode(request)

    def decode(self, ids: Sequence[int]) -> str:
        """See `EngineHandle.decode`."""
        with self._in_use() as handle:
            return handle.decode(ids)

    def snapshot(self) -> EngineSnapshot:
        """See `EngineHandle.snapshot`; without a model, an empty one."""
        handle = self._handle
        return EngineSnapshot() if handle is None else handle.snapshot()

    def model(self) -> ModelInfo | None:
        """See `EngineHandle.model`."""
        handle = self._handle
        return None if handle is None else handle.model()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """See `EngineHandle.wait_ready`; without a model it only lets the time pass."""
        handle = self._handle
        if handle is None:
            time.sleep(timeout_s or 0.0)
            return False
        return handle.wait_ready(timeout_s)

    def limit_vram(self, n_bytes: int | None) -> None:
        """See `EngineHandle.limit_vram`; it counts for a model that is loaded later too."""
        with self._changing:
            self._limits = [n_bytes]
            if self._handle is not None:
                self._handle.limit_vram(n_bytes)

    def close(self) -> None:
        """See `EngineHandle.close`."""
        self.unload()


def _empty_card_cache() -> None:
    """Give back what torch keeps of a card for its next tensors."""
    torch = sys.modules.get("torch")  # if no engine brought it in, there is nothing to give back
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
