"""Another server in the engine's place: an `EngineHandle` over OpenAI's chat protocol.

The chat screen uses it like the engine; there are no tiers to show. `connect` asks for the models
once; then each request has a thread "remote-answer" and a connection of its own, which ends with
its last event. Imports no torch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moet_desk.engine.handle import GenerateRequest, ModelInfo, RequestStream
from moet_desk.engine.remote_text import WRITTEN, Writer
from moet_desk.engine.remote_wire import Reply, ServedModel, Server, chat_body, served_models
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import (
    EngineSnapshot,
    EngineState,
    Failed,
    Finished,
    FinishReason,
    TextDelta,
    Usage,
)

_MAX_RUNNING = 4
_RATE_S = 3.0
_OFFERED = 6  # names in an error
_NAME_CHARS = 64
_REASONS = {"length": FinishReason.LENGTH}


def connect(server: Server, model: str | None = None) -> RemoteEngine:
    """Ask a server for its models and choose one; blocks for as long as that takes.

    Raises:
        MoetError: MD-CONN-01..04 and 06, MD-NET-03.
    """
    reply = Reply(server, "GET", "/models", None)
    try:
        reply.start()
        offered = served_models(reply.document())
    except MoetError as error:
        if model is None or error.facts.get("status") != 404:
            raise
        return RemoteEngine(server, ServedModel(model))  # some servers have no list
    finally:
        reply.close()
    return RemoteEngine(server, choose(server, offered, model))


def choose(server: Server, offered: Sequence[ServedModel], wished: str | None) -> ServedModel:
    """The model to talk with: the wished one, else the only one.

    Raises:
        MoetError: MD-CONN-06.
    """
    if wished is None:
        bases = [model for model in offered if model.is_base]
        one = len(bases) == 1 or (bases and all(model.is_ours for model in bases))  # ours: aliases
        if one:
            return bases[0]
    for model in offered:
        if model.id == wished:
            return model
    names = [model.id for model in offered[:_OFFERED]]
    more = len(offered) - len(names)
    words = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    raise fail("MD-CONN-06", address=server.address, offered=words or "no model")


@dataclass(slots=True, eq=False)
class _Job:
    """One request; its thread owns it but for `cancelled` and `reply`, which the lock guards."""

    stream: RequestStream
    body: bytes
    quality: str
    started_s: float
    reply: Reply | None = None
    cancelled: bool = False
    n_pieces: int = 0
    first_s: float | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    writer: Writer = field(default_factory=Writer)


class RemoteEngine:
    """See the module's paragraph. Made by `connect`; ready from the start."""

    def __init__(
        self,
        server: Server,
        model: ServedModel,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._served = model
        self._now = now
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._ids = itertools.count()
        self._recent: deque[float] = deque()  # when pieces of text came
        self._n_pieces = 0
        self._closed = False
        name = "".join(filter(str.isprintable, model.id))[:_NAME_CHARS]
        self._info = ModelInfo(
            name=name, family="", context=model.context, model_context=model.context, vocab=0,
            n_layers=0, n_moe_layers=0, n_experts=0, top_k=0, identity="",
            has_qualities=model.is_ours,
        )  # fmt: skip
        self._snapshot = EngineSnapshot(
            EngineState.READY, name, device=server.name, context=model.context,
            remote=server.address,
        )  # fmt: skip

    # -- EngineHandle ------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Send a request; failures of the server come as the stream's last event.

        Raises:
            MoetError: MD-API-04 a part that is not asked of other servers, MD-ENG-06 too many at a
                time, MD-ENG-07 closed.
        """
        body = chat_body(request, self._served)
        stream = RequestStream(f"remote-{next(self._ids)}", self._cancel)
        stream.answers = WRITTEN
        quality = request.quality.value if self._served.is_ours else ""
        job = _Job(stream, body, quality, self._now())
        with self._lock:
            if self._closed:
                raise fail("MD-ENG-07", why="")
            if len(self._jobs) >= _MAX_RUNNING:
                raise fail("MD-ENG-06", n_waiting=len(self._jobs))
            self._jobs[stream.id] = job
            self._publish()
        threading.Thread(target=self._run, args=(job,), name="remote-answer", daemon=True).start()
        return stream

    def count_tokens(self, request: GenerateRequest) -> int:
        """Raises MD-API-04: only the server has the tokenizer. So do `encode` and `decode`."""
        raise _no_tokenizer()

    def encode(self, request: GenerateRequest) -> list[int]:
        raise _no_tokenizer()

    def decode(self, ids: Sequence[int]) -> str:
        raise _no_tokenizer()

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    def model(self) -> ModelInfo | None:
        return self._info

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        return True

    def limit_vram(self, n_bytes: int | None) -> None:
        """The other server's card is its own affair."""

    def close(self) -> None:
        """Cut all answers; they end as cancelled."""
        with self._lock:
            self._closed = True
            ids = list(self._jobs)
        for request_id in ids:
            self._cancel(request_id)

    # -- one answer --------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        error: Exception | None = None
        try:
            self._answer(job)
        except Exception as problem:  # the reader gets whatever it was
            error = problem
        finally:
            if job.reply is not None:
                job.reply.close()
        with self._lock:
            del self._jobs[job.stream.id]
            cancelled = job.cancelled
            self._publish()
        if error is None or cancelled:
            tail = job.writer.end()
            if tail:
                job.stream.push(TextDelta(tail, n_tokens=0))
            reason = FinishReason.CANCELLED if cancelled else _REASONS.get(job.reason or "")
            usage = self._usage(job)
            job.stream.push(Finished(reason or FinishReason.STOP, usage, job.quality))
        else:
            job.stream.push(Failed(error, self._usage(job)))

    def _answer(self, job: _Job) -> None:
        reply = Reply(self._server, "POST", "/chat/completions", job.body)
        with self._lock:
            job.reply = reply
            if job.cancelled:
                return
        reply.start()
        for event in reply.events():
            self._take(job, event)
        if job.reason is None:
            reason = "the connection was cut in the middle of the answer"
            raise fail("MD-CONN-01", address=self._server.address, reason=reason)

    def _take(self, job: _Job, event: Mapping[str, Any]) -> None:
        if isinstance(event.get("usage"), dict):
            job.usage = event["usage"]
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        delta = choice.get("delta")
        text = self._text_of(job.writer, delta) if isinstance(delta, dict) else ""
        if isinstance(choice.get("finish_reason"), str):
            job.reason = choice["finish_reason"]
        if not text:
            return
        now_s = self._now()
        if job.first_s is None:
            job.first_s = now_s
        job.n_pieces += 1
        with self._lock:
            self._n_pieces += 1
            self._recent.append(now_s)
            self._publish()
        job.stream.push(TextDelta(text))

    def _text_of(self, writer: Writer, delta: Mapping[str, Any]) -> str:
        """The text of a delta. Servers name reasoning in two ways."""
        parts = [
            writer.reasoning(_string(delta.get("reasoning_content") or delta.get("reasoning"))),
            writer.content(_string(delta.get("content"))),
        ]
        calls = delta.get("tool_calls")
        for i, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                index = call.get("index")
                writer.call(
                    index if isinstance(index, int) else i,
                    _string(function.get("name")),
                    _string(function.get("arguments")),
                )
        return "".join(parts)

    def _usage(self, job: _Job) -> Usage:
        """The server's counts, else pieces of text for tokens. The times are seen from here."""
        now_s = self._now()
        first_s = job.first_s
        written = job.usage.get("completion_tokens")
        prompt = job.usage.get("prompt_tokens")
        details = job.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Usage(
            prompt_tokens=prompt if isinstance(prompt, int) else 0,
            completion_tokens=written if isinstance(written, int) else job.n_pieces,
            cached_tokens=cached if isinstance(cached, int) else 0,
            prefill_s=(now_s if first_s is None else first_s) - job.started_s,
            decode_s=0.0 if first_s is None else now_s - first_s,
            first_token_s=None if first_s is None else first_s - job.started_s,
            steps=job.n_pieces,
        )

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None:
                return
            job.cancelled = True
            reply = job.reply
        if reply is not None:
            reply.cut()

    # -- snapshot ----------------------------------------------------------------------------

    def _publish(self) -> None:
        """Swap in a new snapshot; under the lock."""
        now_s = self._now()
        while self._recent and self._recent[0] < now_s - _RATE_S:
            self._recent.popleft()
        spread_s = now_s - self._recent[0] if self._recent else 0.0
        jobs = self._jobs.values()
        writing = any(job.first_s is not None for job in jobs)
        state = EngineState.READY
        if jobs:
            state = EngineState.WRITING if writing else EngineState.READING
        self._snapshot = replace(
            self._snapshot,
            state=state,
            requests_running=len(jobs),
            decode_tok_per_s=(len(self._recent) - 1) / spread_s if spread_s > 0 else None,
            steps=self._n_pieces,
            tokens=self._n_pieces,
            generation=self._snapshot.generation + 1,
        )


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _no_tokenizer() -> MoetError:
    return fail("MD-API-04", parameter="prompt", reason="another server has the tokenizer")
