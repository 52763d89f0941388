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
from moet_desk.engine.spec import Layer, Spec
from moet_desk.errors import fail
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
    """Guesses tokens for a request.

    Attributes:
        wants_states: whether `note` does anything.
    """

    wants_states: bool

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

    wants_states = False

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """See `Drafter`."""

    def propose(self, request: Drafted) -> list[int]:
        """See `Drafter`."""
        return []


class LookupDrafter:
    """Guesses that the text goes on as it did before. `depth` is the most tokens guessed."""

    wants_states = False

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


class Head(Protocol):
    """An MTP head that can be asked."""

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
        head, model, kv: the head, its model, and pages with a layer for it.
        one, many: routed experts of each plane for one token and for several.
    """

    def __init__(
        self,
        head: MtpHead,
        model: Model,
        kv: KvCache,
        *,
        one: Mapping[Plane, Experts],
        many: Mapping[Plane, Experts],
    ) -> None:
        self.head, self._model, self._kv = head, model, kv
        self._one, self._many = one, many

    def read(
        self, ids: Sequence[int], states: Tensor, sequence: KvSequence, plane: Plane
    ) -> tuple[int | None, Tensor]:
        """See `Head`. Raises as the experts do."""
        experts = self._one if len(ids) == 1 else self._many
        found = self.head.forward(torch.tensor(ids), states, self._kv, sequence, experts[plane])[
            -1:
        ]
        return int(self._model.logits(found)[0].argmax()), found


class MtpDrafter:
    """Guesses with the model's MTP head, applied to its own guesses for more than one.

    `depth` is how many tokens are guessed.
    """

    wants_states = True

    def __init__(self, head: Head, depth: int) -> None:
        self.head, self._depth = head, depth

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """See `Drafter`. Of a prompt's chunk the head reads at once all but the last: the states of
        a long prompt would take more memory than its KV.
        """
        state = state_of(request)
        state.pending += hidden
        if not request.out_ids and len(state.pending) > 1:
            self._read(request, state, len(state.pending) - 1)

    def propose(self, request: Drafted) -> list[int]:
        """See `Drafter`. Raises as `Head.read`."""
        state, depth = state_of(request), min(self._depth, _room(request))
        if depth < 1:
            return []
        guess, hidden = self._read(request, state, len(state.pending))
        guesses: list[int] = []
        ahead = replace(state.sequence)  # what is read from here on are guesses
        while guess is not None:
            guesses.append(guess)
            if len(guesses) == depth:
                break
            guess, hidden = self.head.read([guess], hidden, ahead, request.plane)
        return guesses

    def _read(self, request: Drafted, state: DraftState, count: int) -> tuple[int | None, Tensor]:
        """Let the head read the first `count` pending states with the tokens behind them."""
        start = state.sequence.length + 1
        ids = _tokens(request, start, start + count)
        states = torch.stack(state.pending[:count])
        found = self.head.read(ids, states, state.sequence, request.plane)
        del state.pending[:count]
        return found


def _room(request: Drafted) -> int:
    """Guesses that the answer has room for, besides the token that a step makes anyway."""
    return request.limit - len(request.out_ids) - 1


def state_of(request: Drafted) -> DraftState:
    """What the request's head has read; nothing yet at first."""
    if request.draft is None:
        request.draft = DraftState(replace(request.kv, length=0))
    return request.draft


def _tokens(request: Drafted, start: int, end: int) -> list[int]:
    """Tokens of prompt and answer from place `start` to before `end`."""
    n_prompt = len(request.prompt_ids)
    if start >= n_prompt:  # an answer's: without a copy of the prompt
        return request.out_ids[start - n_prompt : end - n_prompt]
    return [*request.prompt_ids, *request.out_ids][start:end]


def mtp_of(spec: Spec) -> Layer:
    """The layer of a model's MTP head. Raises MD-ENG-05: it has none."""
    if spec.mtp is None:
        raise fail("MD-ENG-05", model=spec.model_type, reason="its files hold none")
    return spec.mtp


def running_layers(spec: Spec, drafts: str) -> tuple[int, ...]:
    """Model layer numbers of the MoE layers that run: the head's is the last one if it guesses.

    Raises:
        MoetError: as `mtp_of`.
    """
    if drafts == "mtp":
        return (*spec.main_moe_layers, mtp_of(spec).index)
    return spec.main_moe_layers
