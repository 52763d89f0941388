"""What the command line, the endpoint and the screens see of the engine.

Plain data in (`GenerateRequest`), plain data out (`telemetry` events and snapshots). This module
imports no torch; `start_engine` loads the real engine by name inside its own thread. A scripted
engine (`engine.scripted`) offers the same `EngineHandle`.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from moet_desk.engine.parsers.answers import AnswerFormat, PromptEnd
from moet_desk.telemetry import EngineSnapshot, Event, Failed, Finished


class Quality(Enum):
    """How an answer is computed: with 2-bit experts, with those and FP4 where they are unsure, or
    with the exact FP4 ones.
    """

    FAST = "fast"
    BALANCED = "balanced"
    EXACT = "exact"


class Codebook(Enum):
    """The levels of 2-bit experts. What packs hold is SYMMETRIC."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"  # for `eval` on a CPU: shows what the symmetry is worth


DEFAULT_GATE = 0.6
"""A balanced token below this probability is made again with FP4 experts. Not calibrated yet."""


class GateSource(Enum):
    """Who said below which probability balanced tokens are made again."""

    SETTINGS = "settings"
    PACK = "pack"
    BUILT_IN = "built in"


@dataclass(frozen=True, slots=True)
class GateInfo:
    """The threshold of balanced answers that give none, and what a calibration knows of it."""

    tau: float = DEFAULT_GATE
    source: GateSource = GateSource.BUILT_IN
    date: str = ""  # of the calibration; it and the rest only with `GateSource.PACK`
    budget: float | None = None  # share of tokens that was allowed to be made again
    rerun: float | None = None  # share of the calibration's tokens that was
    caught: float | None = None  # share of the flips among those


class PromptReading(Enum):
    """How prompts of fast and balanced requests are read. Those of exact ones: with FP4 experts."""

    FP4 = "fp4"
    NO_ROOM = "2 bits: FP4 rows do not fit RAM"
    CPU = "2 bits: on a CPU always"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. None means: the model's own recommendation.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off. Penalties
    follow OpenAI (presence, frequency) and Hugging Face (repetition). With a `seed`, the same
    request gives the same answer, alone or beside others.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


class GrammarKind(Enum):
    """What describes the form of an answer."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # as llguidance writes it


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have. Reasoning before it is free.

    `strict`: a schema with a part that cannot be enforced is refused; else that part is left out.
    """

    kind: GrammarKind
    text: str
    strict: bool = True


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer to be made. Give exactly one of `messages`, `prompt` and `prompt_ids`.

    `messages` are OpenAI-shaped dicts and go through the model's chat template; `prompt` is encoded
    as it is. `max_tokens` None means: up to the end of the context; an answer that ends there, or
    at a stop string, is cut off in the middle of its form.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    quality: Quality = Quality.FAST
    gate: float | None = None  # of balanced answers: 0 never, 1 for every token in doubt
    top_logprobs: int | None = None  # None: no logprobs; 0: of the chosen token only
    prompt_logprobs: bool = False  # of the prompt's tokens too; `max_tokens` may be 0 then
    template: Mapping[str, Any] = field(default_factory=dict)  # see `ModelInfo.switches`
    ignore_eos: bool = False
    grammar: Grammar | None = None  # of the text; with tools, calls may come instead
    must_call: tuple[str, ...] = ()  # the answer is a call of one of these tools
    one_call: bool = False  # one call at most
    thinking_budget: int | None = None  # most tokens of reasoning; then it is ended
    client: str = ""  # who asked, for the log


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is, for `/v1/models` and the screens.

    `opportunistic`: fast and balanced answers use FP4 experts that happen to lie in 4-bit slots, so
    the same request may get another answer. Exact answers never depend on it.
    `thinks`: its reasoning has tags, so that a `thinking_budget` can end it.
    `switches`: variables about reasoning that the chat template reads (`engine.reasoning`), and
    `efforts` the levels it tells apart, the least first.
    `has_qualities`: the quality of a request counts; another server may know none.
    """

    name: str
    family: str
    context: int
    model_context: int
    vocab: int
    n_layers: int
    n_moe_layers: int
    n_experts: int
    top_k: int
    identity: str
    default_quality: Quality = Quality.FAST
    default_gate: float = DEFAULT_GATE
    gate: GateInfo = field(default_factory=GateInfo)  # where `default_gate` comes from
    prompts: PromptReading = PromptReading.CPU
    opportunistic: bool = False
    thinks: bool = False
    switches: tuple[str, ...] = ()
    efforts: tuple[str, ...] = ()
    has_qualities: bool = True


class RequestStream:
    """The events of one request, from the engine thread to one reader.

    The engine calls `push`; the reader calls `take` (never blocks) or iterates (blocks). The queue
    is bounded by the producer: see `room`. Both sides only use operations that the interpreter
    makes atomic, so no lock is held in the decode loop.
    """

    LIMIT = 256

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.id = request_id
        self.created = time.monotonic()
        self.prompt_tokens = 0  # set by the engine before the reader has the stream
        self.ended = False  # the last event was pushed
        self.answers = AnswerFormat()  # how to read the text, and where it begins; set by `submit`
        self.prompt_end = PromptEnd.UNSAID
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._ready = threading.Event()
        self._wake: Callable[[], None] | None = None
        self._watch: Callable[[Event], None] | None = None
        self._done = False

    def push(self, event: Event) -> None:
        """Add an event (engine thread)."""
        if isinstance(event, Finished | Failed):
            self.ended = True  # before the reader sees it: its place is free now
        self._events.append(event)
        self._ready.set()
        wake = self._wake
        if wake is not None:
            wake()

    def room(self) -> bool:
        """Whether the reader keeps up; if not, the engine holds text back and sends it joined."""
        return len(self._events) < self.LIMIT

    def on_event(self, wake: Callable[[], None]) -> None:
        """Have `wake` called from the engine thread after each event (for event loops)."""
        self._wake = wake
        if self._events:
            wake()

    def watch(self, watch: Callable[[Event], None]) -> None:
        """Have each event told to `watch` too, in the reader's thread, when it is taken."""
        self._watch = watch

    def cancel(self) -> None:
        """Ask the engine to stop; a `Finished(CANCELLED)` follows unless it ended already."""
        self._cancel(self.id)

    @property
    def done(self) -> bool:
        """True once the reader has taken the last event."""
        return self._done

    def take(self) -> list[Event]:
        """Return all events that have arrived, possibly none."""
        taken: list[Event] = []
        while self._events:
            taken.append(self._events.popleft())
        if self._watch is not None:
            for event in taken:
                self._watch(event)
        if taken and isinstance(taken[-1], Finished | Failed):
            self._done = True
        return taken

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until an event is there; False on time-out."""
        if self._events:
            return True
        self._ready.clear()
        if self._events:
            return True
        return self._ready.wait(timeout_s)

    def __iter__(self) -> Iterator[Event]:
        while not self._done:
            self.wait()
            yield from self.take()


class EngineHandle(Protocol):
    """The engine as seen from any other thread. Every method may be called from any thread."""

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Check and queue a request.

        Raises:
            MoetError: MD-ENG-07 no model, MD-API-03 prompt too long, MD-API-04 bad parameter,
                MD-CHAT-01 template, MD-ENG-06 queue full.
        """
        ...

    def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the request's prompt as the model would read it. Raises as `submit`."""
        ...

    def encode(self, request: GenerateRequest) -> list[int]:
        """The ids of the request's prompt as the model would read it. Raises as `submit`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelt out.

        Raises:
            MoetError: MD-ENG-07 no model, MD-API-04 an id outside of the vocabulary.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """The newest snapshot; costs one attribute read."""
        ...

    def model(self) -> ModelInfo | None:
        """The loaded model, None while loading or without one."""
        ...

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Block until the model is loaded. False on time-out.

        Raises:
            MoetError: loading failed.
        """
        ...

    def limit_vram(self, n_bytes: int | None) -> None:
        """From now on take so many bytes of a card's memory at most; None: what is free there.

        Experts move out or in between steps; nothing else is as flexible, so a limit below the rest
        counts as the least. Without a card, and where slots have a fixed size, nothing happens.
        """
        ...

    def close(self) -> None:
        """Stop requests (they end as cancelled), save heat, release memory, end the thread."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a pack. None means: sized by the plan. These are constraints on the plan."""

    context: int | None = None
    pool_slots: int | None = None  # base slots
    fine_slots: int | None = None
    arena_rows: int | None = None
    prefill_chunk: int | None = None
    ram_bytes: int | None = None  # what all tiers together may take, on a GPU: the pinned ones
    vram_bytes: int | None = None  # most that the engine may take of the card
    device: str = "cpu"  # auto | cpu | cuda; resolved when the engine thread loads
    kv_format: str = "auto"  # auto | nvfp4 | fp8 | bf16 | f32
    dense_format: str = "auto"  # auto | stored | int8
    threads: int | None = None
    quality: Quality = Quality.FAST  # for requests that do not say; so is the gate
    gate: float | None = None  # None: what the pack was calibrated to, else DEFAULT_GATE
    drafts: str = "off"  # off | mtp | lookup | auto: who guesses ahead; never changes an answer
    draft_depth: int = 1  # tokens guessed for each step; "auto": at most so many
    draft_head: bool | None = None  # with "auto": load the MTP head; None: on a GPU
    max_running: int = 4
    max_waiting: int = 32
    activations: str = "integer"  # "float" is the oracle path of the tests
    codebook: Codebook = Codebook.SYMMETRIC  # another one: measurements on a CPU only
    save_heat: bool = True
    prefix_bytes: int | None = 0  # RAM for prompts that were read; part of `ram_bytes`
    saved_prefixes: Path | None = None  # folder where they outlive the program
    saved_bytes: int = 0  # most bytes there
    opportunistic: bool = False  # see `ModelInfo`
    lookahead: bool = False  # on a GPU: bring rows that the next layer will probably ask for
    hot_set: bool = True  # promote hot experts into spare 4-bit slots; off for comparisons


def start_engine(pack: Path, options: EngineOptions | None = None) -> EngineHandle:
    """Start the engine thread on a pack and return at once; loading goes on in that thread.

    Torch is imported there, not here. Errors while loading come out of `wait_ready` and as
    `snapshot().error`.
    """
    engine = importlib.import_module("moet_desk.engine.engine")
    handle: EngineHandle = engine.launch(pack, options or EngineOptions())
    return handle
