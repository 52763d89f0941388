"""An engine behind another one: whoever adds something to one method inherits the rest.

Any thread; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from moet_desk.engine.handle import EngineHandle, GenerateRequest, ModelInfo, RequestStream
from moet_desk.telemetry import EngineSnapshot


class Forwarding:
    """An `EngineHandle` that hands every call on to `_handle`."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    def submit(self, request: GenerateRequest) -> RequestStream:
        return self._handle.submit(request)

    def count_tokens(self, request: GenerateRequest) -> int:
        return self._handle.count_tokens(request)

    def encode(self, request: GenerateRequest) -> list[int]:
        return self._handle.encode(request)

    def decode(self, ids: Sequence[int]) -> str:
        return self._handle.decode(ids)

    def snapshot(self) -> EngineSnapshot:
        return self._handle.snapshot()

    def model(self) -> ModelInfo | None:
        return self._handle.model()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return self._handle.wait_ready(timeout_s)

    def limit_vram(self, n_bytes: int | None) -> None:
        self._handle.limit_vram(n_bytes)

    def close(self) -> None:
        self._handle.close()
