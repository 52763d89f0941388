"""Guesses of the next tokens. A step checks them, so they change how soon an answer comes, never
what it says.

Two ways to guess: the model's own MTP head, and the text so far, where the same words may have been
followed by something before. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from moet_desk.engine.blocks.ffn import Experts
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.model import Model
from moet_desk.engine.mtp import MtpHead
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import DraftCounters

LONGEST_MATCH, SHORTEST_MATCH = 4, 2
"""Tokens at the end of the text that must have occurred before: one alone nearly always has."""


@dataclass(slots=True)
class DraftState:
    """What a request's MTP head has read. Its entries and `pending` together are the tokens that
    the model has read.

    Attributes:
        sequence: the head's own count, on the request's pages.
        pending: states [H] behind tokens whose next token the head has not read.
    """

    sequence: KvSequence
    pending: list[Tensor] = field(default_factory=list)


class Drafted(Protocol):
    """As much of an `ActiveRequest` as drafting touches."""

    prompt_ids: list[int]
    out_ids: list[int]
    plane: Plane
    kv: KvSequence
    limit: int  # most tokens of the answer
    draft: DraftState | None


class Drafter(Protocol):
    """Guesses tokens for a request."""

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """The model has read tokens of the request, whose states are `hidden` [T, H]."""
        ...

    def propose(self, request: Drafted) -> list[int]:
        """Guesses of what follows the newest token, likeliest first to come; may be empty."""
        ...


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


class NoDrafts:
    """Guesses nothing."""

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """See `Drafter`."""

    def propose(self, request: Drafted) -> list[int]:
        """See `Drafter`."""
        return []


class LookupDrafter:
    """Guesses that the text goes on as it did before. `depth` is the most tokens guessed."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """See `Drafter`."""

    def propose(self, request: Drafted) -> list[int]:
        """See `Drafter`."""
        depth = min(self._depth, _room(request))
        return what_followed([*request.prompt_ids, *request.out_ids], depth)


def what_followed(tokens: Sequence[int], depth: int) -> list[int]:
    """Up to `depth` tokens behind the newest earlier place where the text ended as it ends now.

    Longer endings come first: of 4 tokens, then 3, then 2.
    """
    n = len(tokens)
    for size in range(min(LONGEST_MATCH, n - 1), SHORTEST_MATCH - 1, -1):
        end = list(tokens[n - size :])
        for at in range(n - size - 1, -1, -1):
            if tokens[at : at + size] == end:
                return list(tokens[at + size : at + size + depth])
    return []


class MtpDrafter:
    """Guesses with the model's MTP head, applied to its own guesses for more than one.

    Args:
        head, model, kv: the head, its model, and pages with a layer for it.
        one, many: routed experts of each plane for one token and for several.
        depth: tokens guessed.
    """

    def __init__(
        self,
        head: MtpHead,
        model: Model,
        kv: KvCache,
        *,
        one: Mapping[Plane, Experts],
        many: Mapping[Plane, Experts],
        depth: int,
    ) -> None:
        self._head, self._model, self._kv = head, model, kv
        self._one, self._many, self._depth = one, many, depth

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """See `Drafter`. Of a prompt's chunk the head reads at once all whose next token is known:
        the states of a long prompt would take more memory than its KV.
        """
        state = _state_of(request)
        state.pending += hidden
        known = len(request.prompt_ids) + len(request.out_ids) - 1 - state.sequence.length
        if len(state.pending) > 1 and known > 0:
            self._read(request, state, min(known, len(state.pending)))

    def propose(self, request: Drafted) -> list[int]:
        """See `Drafter`. Raises as the experts do."""
        state, depth = _state_of(request), min(self._depth, _room(request))
        if depth < 1:
            return []
        hidden = self._read(request, state, len(state.pending))[-1:]
        guesses: list[int] = []
        ahead = replace(state.sequence)  # what is read from here on are guesses
        while True:
            guesses.append(int(self._model.logits(hidden)[0].argmax()))
            if len(guesses) == depth:
                return guesses
            ids = torch.tensor(guesses[-1:])
            experts = self._one[request.plane]
            hidden = self._head.forward(ids, hidden, self._kv, ahead, experts)

    def _read(self, request: Drafted, state: DraftState, count: int) -> Tensor:
        """Let the head read the first `count` pending states with the tokens behind them."""
        start = state.sequence.length + 1
        ids = _tokens(request, start, start + count)
        hidden = torch.stack(state.pending[:count])
        experts = self._one if count == 1 else self._many
        found = self._head.forward(
            torch.tensor(ids), hidden, self._kv, state.sequence, experts[request.plane]
        )
        del state.pending[:count]
        return found


def _room(request: Drafted) -> int:
    """Guesses that the answer has room for, besides the token that a step makes anyway."""
    return request.limit - len(request.out_ids) - 1


def _state_of(request: Drafted) -> DraftState:
    if request.draft is None:
        request.draft = DraftState(replace(request.kv, length=0))
    return request.draft


def _tokens(request: Drafted, start: int, end: int) -> list[int]:
    """Tokens of prompt and answer from place `start` to before `end`."""
    n_prompt = len(request.prompt_ids)
    if start >= n_prompt:  # an answer's: without a copy of the prompt
        return request.out_ids[start - n_prompt : end - n_prompt]
    return [*request.prompt_ids, *request.out_ids][start:end]
