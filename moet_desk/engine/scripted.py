"""An engine without a model: plays written answers, moving tiers, loading and failures.

It offers the `EngineHandle` protocol, so screens, tests and demonstrations use it like the real
one. It owns a simulated expert cache and a simulated clock; it computes nothing and imports no
torch. Time passes only through `advance`, called by a test or by the thread that `start` makes.
The same script and the same calls give the same events and snapshots.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moet_desk.engine.checks import check_ids
from moet_desk.engine.handle import (
    GateInfo,
    GenerateRequest,
    ModelInfo,
    PromptReading,
    Quality,
    RequestStream,
)
from moet_desk.engine.messages import prepare_messages, prepare_tools
from moet_desk.engine.parsers.answers import AnswerFormat
from moet_desk.engine.scripted_cache import ScriptedCache
from moet_desk.errors import MoetError, fail
from moet_desk.marked_text import MarkedText, join
from moet_desk.telemetry import (
    DraftChoice,
    EngineSnapshot,
    EngineState,
    Failed,
    Finished,
    FinishReason,
    LoadStep,
    PrefillProgress,
    TextDelta,
    TierSizes,
    Usage,
    VramView,
)

_MAX_WAITING = 32
_VOCAB = 8192

DEFAULT_ANSWER = """\
A mixture-of-experts layer sends each token to a **few** experts only:

1. The router scores all experts.
2. The best four are kept, and their answers are added up.

```python
scores = router(x).sigmoid() + bias
top = scores.topk(4).indices
```

So most weights rest, and the busy ones decide what must stay in fast memory.
"""


@dataclass(frozen=True, slots=True)
class ScriptedFailure:
    """A failure of one request after `after_tokens` tokens, or of loading; with `ends_engine` of
    all requests, as when a card is lost.
    """

    code: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    after_tokens: int = 0
    ends_engine: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """What a `ScriptedEngine` plays.

    `answers` are given in turn. `load` lists the loading steps; `seconds` of each is how long it
    takes, `done` is ignored. `failures` names requests (counted from 0) that fail. Of a balanced
    answer every `rerun_every`-th token is made again, which is a part `rerun_share` of its time.
    The oldest `running` requests get a token or a chunk in turn.
    """

    answers: tuple[str, ...] = (DEFAULT_ANSWER,)
    load: tuple[LoadStep, ...] = ()
    load_failure: ScriptedFailure | None = None
    failures: Mapping[int, ScriptedFailure] = field(default_factory=dict)
    seed: int = 0
    tokens_per_s: float = 40.0
    prompt_tok_per_s: float = 400.0
    prompt_chunk: int = 64
    model: str = "moet-demo"
    context: int = 2048
    n_layers: int = 8
    n_experts: int = 32
    top_k: int = 4
    pool_share: float = 0.3
    fine_share: float = 0.03
    arena_share: float = 0.8
    rerun_every: int = 5
    rerun_share: float = 0.5
    running: int = 1
    vram: VramView | None = None
    gate: GateInfo = field(default_factory=GateInfo)
    prompts: PromptReading = PromptReading.CPU
    drafts: DraftChoice = field(default_factory=DraftChoice)
    tokens_per_step: float = 1.0
    format: AnswerFormat = field(default_factory=AnswerFormat)  # with tags: `answers` may reason


@dataclass(slots=True, eq=False)
class _Job:
    """One request being played. Owned by the thread that calls `advance`."""

    number: int
    request: GenerateRequest
    stream: RequestStream
    prompt_tokens: int
    tokens: list[str]
    submitted_s: float
    read: int = 0
    written: int = 0
    held: list[MarkedText] = field(default_factory=list)
    held_reran: int = 0
    reran: int = 0
    first_token_s: float | None = None
    started_s: float = 0.0
    wait_before_s: float = 0.0
    cancelled: bool = False

    @property
    def balanced(self) -> bool:
        return self.request.quality is Quality.BALANCED


class ScriptedEngine:
    """An `EngineHandle` that plays a `Script`. See the module's paragraph for time and threads."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self._now_s = 0.0
        self._credit_s = 0.0
        self._cache, self._vram = _cache_of(self.script), self.script.vram
        self._jobs: deque[_Job] = deque()
        self._numbers = itertools.count()
        self._load_s = 0.0
        self._turn = 0
        self._steps = 0
        self._error: MoetError | None = None
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.script.load and self.script.load_failure is None:
            self._ready.set()
        self._snapshot = EngineSnapshot()
        self._publish()

    # -- EngineHandle ------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Queue a request. Raises what ended the engine, MD-ENG-07, MD-API-03, MD-API-04 and
        MD-ENG-06 like the real engine; the played model does not reason.
        """
        if self._error is not None:
            raise self._error
        if not self._ready.is_set():
            raise fail("MD-ENG-07", why=" yet")
        prompt_tokens = self.count_tokens(request)
        if prompt_tokens >= self.script.context:
            raise fail(
                "MD-API-03",
                prompt_tokens=prompt_tokens,
                context=self.script.context,
                reserve=1,
                model_context=self.script.context,
            )
        if len(self._jobs) >= _MAX_WAITING + self.script.running:
            raise fail("MD-ENG-06", n_waiting=_MAX_WAITING)
        if request.prompt_ids is not None:
            check_ids(request.prompt_ids, _VOCAB)
        if request.thinking_budget is not None:
            reason = "this model has no tags around its reasoning"
            raise fail("MD-API-04", parameter="thinking_budget", reason=reason)
        number = next(self._numbers)
        answer = self.script.answers[number % len(self.script.answers)]
        stream = RequestStream(f"scripted-{number}", self._cancel)
        stream.prompt_tokens = prompt_tokens
        stream.answers = self.script.format
        tokens = re.findall(r"\s*\S{1,5}|\s+$", answer)[: request.max_tokens]
        job = _Job(number, request, stream, prompt_tokens, tokens, self._now_s)
        self._jobs.append(job)
        return stream

    def count_tokens(self, request: GenerateRequest) -> int:
        """About four characters per token, plus two per message."""
        if request.prompt_ids is not None:
            return len(request.prompt_ids)
        if request.messages is not None:
            prepare_messages(request.messages)
            prepare_tools(request.tools)
        texts = [str(message.get("content") or "") for message in request.messages or ()]
        return sum(2 + len(text) // 4 for text in [*texts, request.prompt or ""])

    def encode(self, request: GenerateRequest) -> list[int]:
        """One id per byte of the prompt, unlike `count_tokens`."""
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        self.count_tokens(request)  # what is wrong with the messages
        texts = [str(message.get("content") or "") for message in request.messages or ()]
        return list("".join([*texts, request.prompt or ""]).encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `encode` made ids of; what is no byte reads as "?"."""
        check_ids(ids, _VOCAB)
        return bytes(i if i < 256 else 63 for i in ids).decode("utf-8", "replace")

    def snapshot(self) -> EngineSnapshot:
        """The newest snapshot."""
        return self._snapshot

    def model(self) -> ModelInfo | None:
        """The played model, None while loading."""
        if not self._ready.is_set():
            return None
        script = self.script
        return ModelInfo(
            name=script.model, family="scripted", context=script.context,
            model_context=script.context, vocab=_VOCAB, n_layers=script.n_layers + 1,
            n_moe_layers=script.n_layers, n_experts=script.n_experts, top_k=script.top_k,
            identity="scripted", default_gate=script.gate.tau, gate=script.gate,
            prompts=script.prompts,
        )  # fmt: skip

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Block until loaded; returns at once when time only passes through `advance`."""
        ready = self._ready.wait(timeout_s if self._thread is not None else 0.0)
        if self._error is not None:
            raise self._error
        return ready

    def limit_vram(self, n_bytes: int | None) -> None:
        """Show the limit, if the script has a card."""
        if self._vram is not None:
            self._vram = replace(self._vram, limit=n_bytes)
            self._snapshot = replace(self._snapshot, vram=self._vram)

    def close(self) -> None:
        """End all requests as cancelled and stop the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._jobs:
            self._finish(self._jobs.popleft(), FinishReason.CANCELLED)
        self._publish()

    # -- time --------------------------------------------------------------------------------

    def start(self, period_s: float = 0.01) -> ScriptedEngine:
        """Let real time pass in a thread of its own; returns the engine."""
        self._thread = threading.Thread(
            target=self._run, args=(period_s,), name="engine", daemon=True
        )
        self._thread.start()
        return self

    def _run(self, period_s: float) -> None:
        before = time.monotonic()
        while not self._ended.wait(period_s):
            now = time.monotonic()
            self.advance(now - before)
            before = now

    def advance(self, seconds: float) -> None:
        """Let time pass: load, read prompts and write tokens that fall due."""
        self._now_s += seconds
        self._credit_s += seconds
        while self._pay_for_one_thing():
            pass
        self._publish()

    def _pay_for_one_thing(self) -> bool:
        if not self._ready.is_set():
            return self._load()
        if self._error is not None or not self._jobs:
            self._credit_s = 0.0
            return False
        for job in [job for job in list(self._jobs) if job.cancelled]:
            self._jobs.remove(job)
            self._finish(job, FinishReason.CANCELLED)
        if not self._jobs:
            return True
        job = self._jobs[self._turn % min(len(self._jobs), self.script.running)]
        worked = self._read(job) if job.read < job.prompt_tokens else self._write(job)
        self._turn += worked
        return worked

    def _pay(self, cost_s: float) -> bool:
        if self._credit_s < cost_s:
            return False
        self._credit_s -= cost_s
        return True

    def _load(self) -> bool:
        total_s = sum(step.seconds for step in self.script.load)
        self._load_s = min(total_s, self._load_s + self._credit_s)
        self._credit_s = 0.0
        if self._load_s < total_s:
            return False
        failure = self.script.load_failure
        if failure is not None:
            self._error = fail(failure.code, **failure.facts)
        self._ready.set()
        return True

    def _read(self, job: _Job) -> bool:
        chunk = min(self.script.prompt_chunk, job.prompt_tokens - job.read)
        if not self._pay(chunk / self.script.prompt_tok_per_s):
            return False
        job.read += chunk
        job.stream.push(PrefillProgress(job.read, job.prompt_tokens))
        if job.read == job.prompt_tokens:
            job.started_s = self._now_s - self._credit_s
            job.wait_before_s = self._cache.counters.wait_s
        return True

    def _write(self, job: _Job) -> bool:
        failure = self.script.failures.get(job.number)
        if failure is not None and job.written >= failure.after_tokens:
            error = fail(failure.code, **failure.facts)
            if failure.ends_engine:
                self._error = error
            for failed in [*self._jobs] if failure.ends_engine else [job]:
                self._jobs.remove(failed)
                self._push_held(failed)
                failed.stream.push(Failed(error, self._usage(failed)))
            return True
        if job.written == len(job.tokens):
            self._jobs.remove(job)
            asked = job.request.max_tokens
            cut = asked is not None and asked == job.written
            self._finish(job, FinishReason.LENGTH if cut else FinishReason.STOP)
            return True
        cost_s = 1.0 / self.script.tokens_per_s
        if not self._pay(cost_s):
            return False
        self._cache.step(cost_s)
        self._steps += 1
        reran = job.balanced and job.written % self.script.rerun_every == 0
        job.held.append(MarkedText.whole(job.tokens[job.written], marked=reran))
        job.held_reran += reran
        job.written += 1
        if job.first_token_s is None:
            job.first_token_s = self._now_s - self._credit_s - job.submitted_s
        if job.stream.room():
            self._push_held(job)
        return True

    def _push_held(self, job: _Job) -> None:
        if job.held:
            text, n_reran = join(job.held), job.held_reran
            delta = TextDelta(
                text.text, n_tokens=len(job.held), reran=text.marks, n_reran=n_reran,
                rerun_s=self._rerun_s(n_reran),
            )  # fmt: skip
            job.stream.push(delta)
            job.reran, job.held_reran = job.reran + n_reran, 0
            job.held.clear()

    def _rerun_s(self, n_tokens: int) -> float:
        return n_tokens * self.script.rerun_share / self.script.tokens_per_s

    def _finish(self, job: _Job, reason: FinishReason) -> None:
        self._push_held(job)
        job.stream.push(Finished(reason, self._usage(job), job.request.quality.value))

    def _usage(self, job: _Job) -> Usage:
        now_s = self._now_s - self._credit_s
        started_s = job.started_s if job.written else now_s
        return Usage(
            prompt_tokens=job.prompt_tokens,
            completion_tokens=job.written,
            prefill_s=job.read / self.script.prompt_tok_per_s,
            decode_s=now_s - started_s,
            first_token_s=job.first_token_s,
            steps=job.written,
            wait_s=self._cache.counters.wait_s - job.wait_before_s if job.written else 0.0,
            rerun_tokens=job.reran if job.balanced else None,
            rerun_s=self._rerun_s(job.reran) if job.balanced else None,
        )

    def _cancel(self, request_id: str) -> None:
        for job in tuple(self._jobs):
            if job.stream.id == request_id:
                job.cancelled = True

    # -- snapshot ----------------------------------------------------------------------------

    def _state(self) -> EngineState:
        if not self._ready.is_set():
            return EngineState.LOADING
        if self._error is not None:
            return EngineState.FAULT
        if not self._jobs:
            return EngineState.READY
        job = self._jobs[0]
        reading = job.read < job.prompt_tokens
        return EngineState.READING if reading else EngineState.WRITING

    def _loading(self) -> tuple[LoadStep, ...]:
        left_s, steps = self._load_s, []
        for step in self.script.load:
            part_s = max(0.0, min(step.seconds, left_s))
            left_s -= step.seconds
            share = part_s / step.seconds if step.seconds else 1.0
            done = int(step.total * share)
            steps.append(replace(step, done=done, seconds=part_s, finished=left_s >= 0))
        return tuple(steps)

    def _publish(self) -> None:
        state = self._state()
        job = self._jobs[0] if self._jobs else None
        loaded = self._ready.is_set() and self._error is None
        counters = self._cache.counters
        waiting = counters.wait_s / counters.step_s if counters.step_s else None
        reading = job is not None and state is EngineState.READING
        self._snapshot = EngineSnapshot(
            state=state,
            model=self.script.model,
            family="scripted",
            device="cpu",
            context=self.script.context,
            context_used=job.read + job.written if job is not None else 0,
            requests_running=min(self.script.running, len(self._jobs)),
            requests_waiting=max(0, len(self._jobs) - self.script.running),
            decode_tok_per_s=self.script.tokens_per_s if self._steps else None,
            prefill_tok_per_s=self.script.prompt_tok_per_s if self._steps else None,
            prompt_done=job.read if job is not None and reading else 0,
            prompt_total=job.prompt_tokens if job is not None and reading else 0,
            steps=self._steps,
            tokens=self._steps,
            step_ms=1000.0 / self.script.tokens_per_s if self._steps else None,
            draft_choice=self.script.drafts,
            tokens_per_step=self.script.tokens_per_step if self._steps else None,
            wait_share=waiting,
            tier_share=self._cache.shares(),
            counters=counters,
            sizes=self._cache.sizes() if loaded else TierSizes(),
            vram=self._vram,
            cache=self._cache.view() if loaded else None,
            loading=() if self._ready.is_set() else self._loading(),
            error=self._error.to_dict() if self._error is not None else None,
            generation=self._snapshot.generation + 1,
        )


def _cache_of(script: Script) -> ScriptedCache:
    n_rows = script.n_layers * script.n_experts
    return ScriptedCache(
        script.n_layers, script.n_experts, script.top_k, seed=script.seed,
        n_slots=max(script.n_layers * script.top_k, int(n_rows * script.pool_share)),
        n_fine=int(n_rows * script.fine_share), n_arena=int(n_rows * script.arena_share),
    )  # fmt: skip
