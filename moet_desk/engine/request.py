"""One request while the engine works on it: its KV, its sampler, and its text on the way out.

Made by `engine.submit` in the caller's thread, owned by the engine thread from then on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from moet_desk.engine.detokenize import Detokenizer
from moet_desk.engine.draft import DraftState
from moet_desk.engine.handle import DEFAULT_GATE, GenerateRequest, Quality, RequestStream
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.sampling import Chosen, Sampler, with_logprobs
from moet_desk.engine.stops import StopScanner
from moet_desk.engine.text import Text
from moet_desk.errors import without_frames
from moet_desk.marked_text import MarkedText
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import (
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    TextDelta,
    TokenLogprob,
    Usage,
)


@dataclass(slots=True)
class Timing:
    """When things happened to a request, in `time.monotonic` seconds."""

    submitted: float
    admitted: float = 0.0
    read: float = 0.0  # the prompt was prefilled
    first_token: float | None = None
    wait_s: float = 0.0


@dataclass(slots=True)
class Outbox:
    """Text that is ready but not sent yet, because the reader is behind."""

    text: MarkedText = field(default_factory=MarkedText)
    n_tokens: int = 0
    n_reran: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ActiveRequest:
    """A request from admission to its last event.

    Args:
        request: what was asked.
        stream: where the events go.
        prompt_ids: the encoded prompt, shorter than the context.
        text: the model's tokenizer.
        sampler: chooses tokens.
        limit: most tokens the answer may have.
        opportunistic: whether what lies in 4-bit slots has a say; only told to the reader.
    """

    def __init__(
        self,
        request: GenerateRequest,
        stream: RequestStream,
        prompt_ids: list[int],
        *,
        text: Text,
        sampler: Sampler,
        limit: int,
        opportunistic: bool = False,
    ) -> None:
        self.request = request
        self.stream = stream
        self.prompt_ids = prompt_ids
        self.sampler = sampler
        self.limit = limit
        self.opportunistic = opportunistic
        self.plane = Plane.FINE if request.quality is Quality.EXACT else Plane.BASE
        self.tau: float | None = None
        if request.quality is Quality.BALANCED:
            self.tau = DEFAULT_GATE if request.gate is None else request.gate
        self.rerun_tokens = 0
        self.rerun_s = 0.0
        self.reran = False  # the token that comes next is made again with FP4 experts
        self.draft_tokens = self.accepted_tokens = 0
        self.kv = KvSequence()
        self.n_restored: int | None = None  # tokens whose KV was there already; None: not looked
        self.draft: DraftState | None = None
        self.out_ids: list[int] = []
        self.steps = 0
        self.ended = False
        self.cancelled = False
        self.timing = Timing(stream.created)
        self._eos = frozenset[int]() if request.ignore_eos else text.eos_ids
        self._text = text
        self._detokenizer: Detokenizer = text.detokenizer()
        self._stops = StopScanner(request.stop)
        self._held = MarkedText()  # what the scanner holds back
        self._told_rerun_s = 0.0  # what of `rerun_s` the reader knows
        self._outbox = Outbox()
        self._prompt: list[TokenLogprob] = []

    @property
    def id(self) -> str:
        return self.stream.id

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that are in the KV cache."""
        return min(self.kv.length, len(self.prompt_ids))

    @property
    def reading(self) -> bool:
        """Whether the prompt is not in the KV cache yet."""
        return not self.out_ids

    @property
    def most_tokens(self) -> int:
        """KV entries this request can come to need."""
        return len(self.prompt_ids) + self.limit

    def note_read(self) -> None:
        """Tell the reader how far the prompt is."""
        self.stream.push(PrefillProgress(self.n_read, len(self.prompt_ids), self.n_restored or 0))
        if self.n_read == len(self.prompt_ids):
            self.timing.read = time.monotonic()
            if self.limit == 0:
                self._finish(FinishReason.LENGTH)

    def note_prompt(self, start: int, logits: Tensor) -> None:
        """Take the scores behind some tokens of the prompt, if their log-probabilities are wanted.

        Shapes:
            logits [T, V] float32, row 0 behind the prompt's token `start`
        """
        for i, row in enumerate(logits, start + 1):
            if i < len(self.prompt_ids):
                token, n_top = self.prompt_ids[i], self.request.top_logprobs or 0
                self._prompt.append(self._logprob(with_logprobs(row, token, n_top)))

    def accept(self, chosen: Chosen) -> None:
        """Take the next token: send what became readable, and end if this was the last."""
        if self.timing.first_token is None:
            self.timing.first_token = time.monotonic()
        self.out_ids.append(chosen.token_id)
        reran, self.reran = self.reran, False
        self._outbox.n_reran += reran
        if chosen.token_id in self._eos:
            self._finish(FinishReason.STOP)
            return
        piece = self._detokenizer.push_marked(chosen.token_id, marked=reran)
        text, matched = self._scan(piece)
        self._send(text, chosen)
        if matched is not None:
            self._finish(FinishReason.STOP, stop=matched)
        elif len(self.out_ids) >= self.limit:
            self._finish(FinishReason.LENGTH)

    def note_drafts(self, n_guessed: int, n_right: int) -> None:
        """A step checked guesses of its tokens."""
        self.draft_tokens += n_guessed
        self.accepted_tokens += n_right

    def cancel(self) -> None:
        """End now; the text so far was sent."""
        self.cancelled = True
        if not self.ended:
            self._finish(FinishReason.CANCELLED)

    def fail(self, error: Exception) -> None:
        """End with an error; the text so far is sent first.

        Its traceback is dropped: the frames in it would keep the tensors of the failed work.
        """
        if not self.ended:
            self.ended = True
            without_frames(error)
            self._flush()
            self.stream.push(Failed(error, self._usage()))

    def _scan(self, piece: MarkedText) -> tuple[MarkedText, str | None]:
        """What of the text may be shown now, and the stop if one is complete."""
        shown, matched = self._stops.push(piece.text)
        whole = self._held + piece
        self._held = whole.cut(len(shown))
        return whole.cut(0, len(shown)), matched

    def _send(self, text: MarkedText, chosen: Chosen) -> None:
        box = self._outbox
        box.text += text
        box.n_tokens += 1
        if self.request.top_logprobs is not None:
            box.logprobs.append(self._logprob(chosen))
        if (text or box.logprobs) and self.stream.room():
            self._flush()

    def _flush(self) -> None:
        box = self._outbox
        if box.text or box.n_tokens:
            rerun_s, self._told_rerun_s = self.rerun_s - self._told_rerun_s, self.rerun_s
            delta = TextDelta(
                box.text.text, box.n_tokens, tuple(box.logprobs), reran=box.text.marks,
                n_reran=box.n_reran, rerun_s=rerun_s,
            )  # fmt: skip
            self.stream.push(delta)
            self._outbox = Outbox()

    def _finish(self, reason: FinishReason, stop: str | None = None) -> None:
        self.ended = True
        if stop is None:  # what was held back as a possible stop string, or half a character
            tail, stop = self._scan(self._detokenizer.flush_marked())
            self._outbox.text += tail + self._held.cut(0, len(self._stops.flush()))
        self._flush()
        quality = self.request.quality.value
        self.stream.push(Finished(reason, self._usage(), quality, stop, tuple(self._prompt)))

    def _logprob(self, chosen: Chosen) -> TokenLogprob:
        top = tuple((i, self._text.token_bytes(i), value) for i, value in chosen.top)
        own = self._text.token_bytes(chosen.token_id)
        return TokenLogprob(chosen.token_id, own, chosen.logprob or 0.0, top)

    def _usage(self) -> Usage:
        timing, now = self.timing, time.monotonic()
        read = timing.read or now
        first = timing.first_token
        return Usage(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.out_ids),
            cached_tokens=self.n_restored or 0,
            queue_s=(timing.admitted or now) - timing.submitted,
            prefill_s=read - timing.admitted if timing.admitted else 0.0,
            decode_s=now - read if self.out_ids else 0.0,
            first_token_s=None if first is None else first - timing.submitted,
            steps=self.steps,
            wait_s=timing.wait_s,
            rerun_tokens=None if self.tau is None else self.rerun_tokens,
            rerun_s=None if self.tau is None else self.rerun_s,
            opportunistic=self.opportunistic,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
        )
