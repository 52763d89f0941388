"""Guesses of the next tokens. A step checks them, so they change how soon an answer comes, never
what it says.

Two ways to guess: the model's own MTP head, and the text so far, where the same words may have been
followed by something before. Who guesses when is `drafting`'s and `draft_control`'s to say. Owned
by the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from moet_desk.engine.blocks.ffn import Experts
from moet_desk.engine.draft_control import FOLLOWED_TOKENS
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.mtp import MtpHead
from moet_desk.engine.stream_model import StreamHead
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import DraftCounters

LONGEST_MATCH, SHORTEST_MATCH = 4, 2
"""Tokens at the end of the text that must have occurred before: one alone nearly always has."""

MOST_PLACES = 32
"""Places of the same two tokens that are compared, the newest first."""


class TextIndex:
    """Where each pair of neighbouring tokens of a growing text occurred."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}  # pair -> place behind it
        self._before: list[int] = [-1]  # by place: the place behind the same pair before; -1 none

    def grow(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take in what the text has more than before."""
        tokens, start = self._tokens, len(self._tokens)
        if start < len(prompt):
            tokens += prompt[start:]
        tokens += answer[len(tokens) - len(prompt) :]
        for place in range(max(1, start), len(tokens)):
            pair = tokens[place - 1], tokens[place]
            self._before.append(self._newest.get(pair, -1))
            self._newest[pair] = place + 1

    def what_followed(self, depth: int) -> list[int]:
        """Up to `depth` tokens behind an earlier place where the text ended as it ends now.

        A longer common ending is better, up to 4 tokens; of equal ones the newest place.
        """
        tokens, n = self._tokens, len(self._tokens)
        best, longest = -1, SHORTEST_MATCH - 1
        at = self._before[n - 1] if n > 1 else -1
        for _ in range(MOST_PLACES):
            if at < 0 or longest == LONGEST_MATCH:
                break
            size = SHORTEST_MATCH
            while size < min(LONGEST_MATCH, at) and tokens[at - size - 1] == tokens[n - size - 1]:
                size += 1
            if size > longest:
                best, longest = at, size
            at = self._before[at - 1]
        return tokens[best : best + depth] if best >= 0 else []


@dataclass(slots=True)
class DraftState:
    """What drafting keeps of a request. The entries of its MTP head and `pending` together are the
    tokens that the model has read.

    Attributes:
        sequence: the head's own count, on the request's pages.
        follows: whether the head reads along; a head that missed something cannot guess.
        pending: states [n, H] behind tokens whose next token the head has not read, as they came.
        waiting: how many these are together.
        text: for guesses from the text.
    """

    sequence: KvSequence
    follows: bool = True
    pending: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    text: TextIndex = field(default_factory=TextIndex)

    def part(self) -> None:
        """The head reads along no further, and can guess no more."""
        self.follows = False
        self.pending, self.waiting = [], 0


class Drafted(Protocol):
    """As much of an `ActiveRequest` as drafting touches."""

    prompt_ids: list[int]
    out_ids: list[int]
    plane: Plane
    kv: KvSequence
    limit: int  # most tokens of the answer
    draft: DraftState | None


@dataclass(slots=True)
class Acceptance:
    """How many guesses were made and right, by their place behind the newest token."""

    guessed: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def note(self, n_guessed: int, n_right: int) -> None:
        """A step checked guesses: the first `n_right` were right."""
        more = n_guessed - len(self.guessed)
        self.guessed += [0] * more
        self.right += [0] * more
        for place in range(n_guessed):
            self.guessed[place] += 1
            self.right[place] += place < n_right

    def counters(self) -> DraftCounters:
        """What happened since the model was loaded."""
        return DraftCounters(tuple(self.guessed), tuple(self.right))


class Drafter(Protocol):
    """Guesses tokens for a request."""

    def propose(self, request: Drafted, depth: int) -> list[int]:
        """Up to `depth` guesses of what follows the newest token; may be none."""
        ...


class LookupDrafter:
    """Guesses that the text goes on as it did before."""

    def propose(self, request: Drafted, depth: int) -> list[int]:
        """See `Drafter`."""
        text = state_of(request).text
        text.grow(request.prompt_ids, request.out_ids)
        return text.what_followed(min(depth, room_of(request)))


class Head(Protocol):
    """An MTP head that can be asked.

    Attributes:
        most_rows: tokens that it reads at once.
    """

    most_rows: int

    def read(
        self, ids: Sequence[int], states: Tensor, sequence: KvSequence, plane: Plane
    ) -> tuple[int | None, Tensor]:
        """Read tokens with the states behind the tokens before them; the sequence moves on.

        Shapes:
            states [T, H] for T ids

        Returns:
            what may follow the last one (None: the numbers are invalid), and its state [1, H].
        """
        ...


class CpuHead:
    """The head over the CPU's model.

    Args:
        head, kv: the head, and pages with a layer for it.
        one, many: routed experts of each plane for one token and for several.
    """

    most_rows = 256

    def __init__(
        self,
        head: MtpHead | StreamHead,
        kv: KvCache,
        *,
        one: Mapping[Plane, Experts],
        many: Mapping[Plane, Experts],
    ) -> None:
        self.head, self._kv = head, kv
        self._one, self._many = one, many

    def read(
        self, ids: Sequence[int], states: Tensor, sequence: KvSequence, plane: Plane
    ) -> tuple[int | None, Tensor]:
        """See `Head`. Raises as the experts do."""
        experts = self._one if len(ids) == 1 else self._many
        found = self.head.forward(torch.tensor(ids), states, self._kv, sequence, experts[plane])[
            -1:
        ]
        return int(self.head.logits(found)[0].argmax()), found


class MtpDrafter:
    """Guesses with the model's MTP head, applied to its own guesses for more than one."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """The model has read tokens of the request, whose states are `hidden` [T, H].

        Of a prompt's chunk the head reads at once all but the last: the states of a long prompt
        would take more memory than its KV. What is kept is copied. Raises as `Head.read`.
        """
        state = state_of(request)
        state.waiting += len(hidden)
        if request.out_ids:
            state.pending.append(hidden.clone())
            if state.waiting > FOLLOWED_TOKENS:
                state.part()
            return
        state.pending.append(hidden)
        self._catch_up(request, state, 1)
        state.pending = [torch.cat(state.pending)]

    def behind(self, request: Drafted) -> int:
        """Reads that the head must make up for before the one that guesses."""
        return max(0, -(-state_of(request).waiting // self.head.most_rows) - 1)

    def catch_up(self, request: Drafted) -> None:
        """Read as much as leaves one read before a guess. Raises as `Head.read`."""
        self._catch_up(request, state_of(request), self.head.most_rows)

    def propose(self, request: Drafted, depth: int) -> list[int]:
        """See `Drafter`; raises as `Head.read`. Only for a request that the head follows."""
        state, depth = state_of(request), min(depth, room_of(request))
        if depth < 1:
            return []
        self.catch_up(request)
        guess, hidden = self._read(request, state, state.waiting)
        guesses: list[int] = []
        ahead = state.sequence.fork()  # what is read from here on are guesses
        while guess is not None:
            guesses.append(guess)
            if len(guesses) == depth:
                break
            guess, hidden = self.head.read([guess], hidden, ahead, request.plane)
        return guesses

    def _catch_up(self, request: Drafted, state: DraftState, left: int) -> None:
        while state.waiting > left:
            self._read(request, state, min(self.head.most_rows, state.waiting - left))

    def _read(self, request: Drafted, state: DraftState, count: int) -> tuple[int | None, Tensor]:
        """Let the head read the first `count` pending states with the tokens behind them."""
        start = state.sequence.length + 1
        ids = _tokens(request, start, start + count)
        states = state.pending[0] if len(state.pending) == 1 else torch.cat(state.pending)
        found = self.head.read(ids, states[:count], state.sequence, request.plane)
        state.pending, state.waiting = [states[count:]], state.waiting - count
        return found


def room_of(request: Drafted) -> int:
    """Guesses that the answer has room for, besides the token that a step makes anyway."""
    return request.limit - len(request.out_ids) - 1


def state_of(request: Drafted) -> DraftState:
    """What is kept of the request; nothing yet at first."""
    if request.draft is None:
        request.draft = DraftState(replace(request.kv, length=0, base=0))
    return request.draft


def _tokens(request: Drafted, start: int, end: int) -> list[int]:
    """Tokens of prompt and answer from place `start` to before `end`."""
    n_prompt = len(request.prompt_ids)
    if start >= n_prompt:  # an answer's: without a copy of the prompt
        return request.out_ids[start - n_prompt : end - n_prompt]
    return [*request.prompt_ids, *request.out_ids][start:end]
