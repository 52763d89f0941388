"""Frozen records that cross threads: what the engine shows of itself, and what a request reports.

The engine thread makes a new `EngineSnapshot` and swaps one reference; readers keep the one they
took. Nothing here changes after it is made, so no lock is needed. Imports nothing heavy (no torch,
no numpy).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from moet_desk.marked_text import Ranges

CPU = "cpu"
"""`EngineSnapshot.device` of an engine that computes without a card."""


class EngineState(Enum):
    """What the engine is doing, in the words of the status line."""

    NO_MODEL = "no model"
    LOADING = "loading"
    READY = "ready"
    READING = "reading"  # a prompt is being prefilled
    WRITING = "writing"  # tokens are being decoded
    FAULT = "fault"


class Tier(IntEnum):
    """The fastest place an expert row is in now (design §2). The values are the cell codes."""

    NVME = 0
    RAM = 1
    BASE = 2  # a 2-bit slot
    FINE = 3  # a 4-bit slot


TIER_LETTERS = "NRGQ"
"""Letter of each `Tier`, in its order."""


@dataclass(frozen=True, slots=True)
class Story:
    """What happened to one expert since the model was loaded. Times are seconds after that."""

    uses: float
    fetches: int
    evictions: int
    used_s: float | None  # the last use; None: none was seen
    fetched_s: float | None  # the last fetch
    source: Tier | None  # where that came from


@dataclass(frozen=True, slots=True)
class Stories:
    """What happened to every expert, packed: arrays over (layer, expert) in native byte order.

    `uses` float32, `fetches` and `evictions` uint32, `used_s` and `fetched_s` float32 (below 0:
    never), `source` uint8. Where `exact` is False they were worked out from pictures taken up to
    five times a second: uses are estimates, and what came and went between two pictures is missing.
    """

    now_s: float
    uses: bytes
    fetches: bytes
    evictions: bytes
    used_s: bytes
    fetched_s: bytes
    source: bytes
    exact: bool

    def of(self, row: int) -> Story:
        """The story of row layer * E + expert."""
        used_s, fetched_s = self.floats(self.used_s)[row], self.floats(self.fetched_s)[row]
        return Story(
            uses=self.floats(self.uses)[row],
            fetches=self.counts(self.fetches)[row],
            evictions=self.counts(self.evictions)[row],
            used_s=None if used_s < 0 else used_s,
            fetched_s=None if fetched_s < 0 else fetched_s,
            source=None if fetched_s < 0 else Tier(self.source[row]),
        )

    @staticmethod
    def floats(packed: bytes) -> memoryview[float]:
        """Read a float32 array."""
        return memoryview(packed).cast("f")

    @staticmethod
    def counts(packed: bytes) -> memoryview[int]:
        """Read a uint32 array."""
        return memoryview(packed).cast("I")


@dataclass(frozen=True, slots=True)
class CacheView:
    """Where every expert of every MoE layer is: the heatmap's data.

    `tiers[i]` and `heat[i]` are one byte per expert of MoE layer `i`: a `Tier` value, and a ramp
    step 0 (never used) to 7 (hottest). `generations[i]` grows when one of the two changed, so a
    view repaints only those rows. `hit_share[i]` is the share of recent look-ups that a slot
    answered, None before the first one. `stories` is None where nobody keeps them.
    """

    layers: tuple[int, ...]
    n_experts: int
    tiers: tuple[bytes, ...]
    heat: tuple[bytes, ...]
    generations: tuple[int, ...]
    hit_share: tuple[float | None, ...]
    stories: Stories | None = None


@dataclass(frozen=True, slots=True)
class TierCounters:
    """Totals since the model was loaded. Look-ups are (token, layer, expert) triples."""

    lookups: int = 0
    hits_base: int = 0
    hits_fine: int = 0
    from_ram: int = 0
    from_nvme: int = 0
    evictions: int = 0
    bytes_ram_to_slot: int = 0
    bytes_nvme_to_ram: int = 0
    wait_s: float = 0.0  # time spent fetching rows a token was waiting for
    step_s: float = 0.0  # time spent in decode steps, waiting included
    read_errors: int = 0
    promotions: int = 0  # rows put into 4-bit slots before a token asked for them
    bytes_promoted: int = 0  # into slots, beside bytes_ram_to_slot


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """Guesses of tokens since the model was loaded: how many were made at each place behind the
    newest token, and how many of these were right. A guess behind a wrong one counts as wrong.
    """

    guessed: tuple[int, ...] = ()
    right: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What is done about guesses now, and the numbers behind that (engine/draft_control.py).

    Attributes:
        asked: what the settings say: off, mtp, lookup or auto.
        source: who guessed in the newest step: off, mtp or lookup.
        depth: tokens guessed for an answer there.
        gain: expected speed over none, 1 for the same; None: not known or not asked.
        is_probe: made to find out, not because it pays.
        acceptance: lately, share of guesses that were right where those before them were.
        rows_ms: milliseconds of a step by its rows.
        guess_ms: of one guess of the head.
        spare_steps: how many steps' time guessing may still lose before it has to pause.
        probes: times that it was tried again.
    """

    asked: str = "off"
    source: str = "off"
    depth: int = 0
    gain: float | None = None
    is_probe: bool = False
    acceptance: tuple[float, ...] = ()
    rows_ms: tuple[tuple[int, float], ...] = ()
    guess_ms: float | None = None
    spare_steps: float | None = None
    probes: int = 0


@dataclass(frozen=True, slots=True)
class GateCounters:
    """Tokens of balanced answers since the model was loaded."""

    judged: int = 0  # made with 2-bit experts
    rerun: int = 0  # of those: made again with FP4 experts
    flips: int = 0  # of those: the rerun found another token likeliest
    rerun_s: float = 0.0  # time that took; rows made again together count once

    @property
    def rerun_share(self) -> float | None:
        """Part of the tokens that was made again; None before the first one."""
        return self.rerun / self.judged if self.judged else None


@dataclass(frozen=True, slots=True)
class TierSizes:
    """How much each tier holds and how full it is, in rows and bytes."""

    base_slots: int = 0
    base_slots_used: int = 0
    fine_slots: int = 0
    fine_slots_used: int = 0
    arena_rows: int = 0
    arena_rows_used: int = 0
    rows: int = 0  # base rows in the pack
    slot_bytes: int = 0  # bytes of one base slot as it lies in the pool
    row_bytes: int = 0  # bytes of one base row at rest


@dataclass(frozen=True, slots=True)
class VramView:
    """A card's memory, which the slots follow.

    Attributes:
        free: bytes that nobody had at the last look.
        slots, planned: bytes of slots now, and when the model was loaded.
        limit: bytes that the engine may take in all; None: what there is.
        changes: how often slots were given back or came again.
        why: what the newest change followed from, or why there can be none.
    """

    free: int = 0
    slots: int = 0
    planned: int = 0
    limit: int | None = None
    changes: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """How long the newest reads of single rows from disk took, with the check of their bytes."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    direct: bool  # past the page cache; else some may have come from there


@dataclass(frozen=True, slots=True)
class LoadStep:
    """One line of the loading screen. `total` 0 means: no bar, only seconds."""

    name: str
    done: int = 0
    total: int = 0
    unit: str = "bytes"
    seconds: float = 0.0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Everything a screen or `/metrics` needs, taken at one moment."""

    state: EngineState = EngineState.NO_MODEL
    model: str = ""
    family: str = ""
    device: str = ""  # CPU or the card's name
    remote: str = ""  # address of the server that answers in the engine's place
    opportunistic: bool = False  # answers other than exact ones may differ from run to run
    context: int = 0  # tokens a request may use, prompt and answer together
    context_used: int = 0  # tokens of the longest running request
    requests_running: int = 0
    requests_waiting: int = 0
    decode_tok_per_s: float | None = None  # over the last 3 s of decoding
    prefill_tok_per_s: float | None = None  # of the last finished prompt
    prompt_done: int = 0  # while reading: tokens of the prompt done, and in all
    prompt_total: int = 0
    steps: int = 0
    tokens: int = 0
    step_ms: float | None = None  # median of the last 64 steps
    wait_share: float | None = None  # wait_s / step_s over the last 64 steps
    tier_share: tuple[float, float, float, float] | None = None  # recent look-ups by N, R, G, Q
    counters: TierCounters = field(default_factory=TierCounters)
    gate: GateCounters = field(default_factory=GateCounters)
    drafts: DraftCounters = field(default_factory=DraftCounters)
    draft_choice: DraftChoice = field(default_factory=DraftChoice)
    tokens_per_step: float | None = None  # of one answer, over the last 3 s of decoding
    sizes: TierSizes = field(default_factory=TierSizes)
    vram: VramView | None = None  # None: slots have a fixed size
    reads: ReadTimes | None = None  # None: no row was read since the model was loaded
    cache: CacheView | None = None
    loading: tuple[LoadStep, ...] = ()
    error: Mapping[str, Any] | None = None  # MoetError.to_dict() of the fault
    generation: int = 0  # grows with each published snapshot


# -- events of one request -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of a finished request. Times are seconds."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None  # from submit to the first token
    steps: int = 0
    wait_s: float = 0.0
    rerun_tokens: int | None = None  # made again with FP4 experts; None: not a balanced answer
    rerun_s: float | None = None  # the part of `decode_s` that took
    opportunistic: bool = False  # the answer depends on which experts were in 4-bit slots
    draft_tokens: int = 0  # guessed ahead
    accepted_tokens: int = 0  # of those, the ones that were right


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, with the best alternatives, from the raw (unscaled) logits."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Tokens of the prompt read so far. Sent at most once per chunk. `restored` of those done were
    known from an earlier prompt.
    """

    done: int
    total: int
    restored: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New answer text; always whole characters. `n_tokens` tokens were behind it.

    `reran` says which characters came, if only in part, from tokens that a balanced answer made
    again with FP4 experts; `n_reran` of the tokens were, which took `rerun_s` seconds.
    """

    text: str
    n_tokens: int = 1
    logprobs: tuple[TokenLogprob, ...] = ()
    reran: Ranges = ()
    n_reran: int = 0
    rerun_s: float = 0.0


class FinishReason(Enum):
    """Why an answer ended, in OpenAI's words plus `cancelled`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well (or was cancelled)."""

    reason: FinishReason
    usage: Usage
    quality: str  # "fast", "balanced" or "exact"
    stop: str | None = None  # the stop string that matched
    prompt: tuple[TokenLogprob, ...] = ()  # of the prompt from its second token on, if asked for


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that did not. `error` is from the catalogue."""

    error: Exception
    usage: Usage | None = None


Event = PrefillProgress | TextDelta | Finished | Failed


# -- calls of the endpoint -------------------------------------------------------------------


class CallState(Enum):
    """How far a call of the endpoint is; the values are shown to people."""

    QUEUED = "waiting"
    READING = "reading"
    WRITING = "writing"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # here, by its client, or as the model was put away


@dataclass(frozen=True, slots=True)
class EndpointCall:
    """One call as it is now. Times are seconds since it came in; None: not known, or no answer."""

    number: int
    wall_s: float  # when it came in, since the epoch
    client: str  # the program's name
    route: str  # "chat, stream"
    model: str = ""
    state: CallState = CallState.QUEUED
    prompt_tokens: int | None = None
    prompt_done: int = 0
    n_tokens: int | None = None  # written so far
    queue_s: float | None = None
    first_s: float | None = None
    total_s: float = 0.0
    tok_per_s: float | None = None
    status: int | None = None  # of HTTP
    error: str = ""  # code and cause

    @property
    def goes_on(self) -> bool:
        """Whether it can still be stopped."""
        return self.state in (CallState.QUEUED, CallState.READING, CallState.WRITING)


class EndpointState(Enum):
    """Whether programs can connect; the values are shown to people."""

    OFF = "off"
    WAITS = "waits for a model"
    RUNNING = "running"
    FAILED = "not running"


@dataclass(frozen=True, slots=True)
class EndpointView:
    """The endpoint as it is now. `address` is without "/v1"; "" before it was known. `error` is
    `MoetError.to_dict()` of why it does not run.
    """

    state: EndpointState = EndpointState.OFF
    address: str = ""
    calls: tuple[EndpointCall, ...] = ()
    error: Mapping[str, Any] | None = None
