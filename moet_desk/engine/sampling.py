"""The sampler of one request: penalties, biases, the draw and log-probabilities.

Owned and called by the engine thread, one `choose` per token, or one `draw` and `take` where a
device chooses. The choice depends on the logits, the
request and the number of tokens chosen so far, on nothing else; a seed therefore gives the same
answer alone and beside other requests.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moet_desk.engine.checks import check_sampling
from moet_desk.engine.handle import Sampling
from moet_desk.errors import MoetError, fail
from moet_desk.kernels.reference.sampling import sample, uniform

if TYPE_CHECKING:
    from moet_desk.engine.grammar import Constraint
    from moet_desk.engine.thinking import ThinkingBudget


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and its log-probability with the best alternatives if they were asked for.

    Log-probabilities are of the raw logits: no temperature, filter, penalty or bias.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """All that the next choice depends on beside the logits, for whoever chooses elsewhere.

    Attributes:
        temperature, top_k, top_p, min_p: as `kernels.reference.sampling.sample` takes them.
        seed, position: of the uniform number; the position counts the tokens chosen so far.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


GREEDY = Draw(temperature=0.0)


class Sampler:
    """Chooses the tokens of one answer.

    Invariant: `_n_chosen` tokens have been chosen and are counted in `_counts` and `_seen`.
    """

    __slots__ = (
        "_bias",
        "_budget",
        "_constraint",
        "_counts",
        "_frequency",
        "_min_p",
        "_model",
        "_n_chosen",
        "_presence",
        "_repetition",
        "_seed",
        "_seen",
        "_temperature",
        "_top_k",
        "_top_logprobs",
        "_top_p",
    )

    def __init__(
        self,
        sampling: Sampling,
        defaults: Sampling,
        *,
        prompt_ids: Sequence[int],
        vocab: int,
        top_logprobs: int | None = None,
        model: str = "MODEL",
        constraint: Constraint | None = None,
        budget: ThinkingBudget | None = None,
    ) -> None:
        """Prepare the choice of tokens.

        Args:
            sampling: what the request asks for; None values come from `defaults`.
            defaults: the model's recommendation; it must be complete.
            prompt_ids: the repetition penalty counts these too.
            vocab: number of logits.
            top_logprobs: None for no log-probabilities, else how many alternatives.
            model: its name, for the words of an error.
            constraint: the form that the answer must have.
            budget: ends its reasoning.

        Raises:
            MoetError: MD-API-04, a value is out of range.
        """
        check_sampling(sampling, vocab)
        self._temperature = _first(sampling.temperature, defaults.temperature, 1.0)
        self._top_p = _first(sampling.top_p, defaults.top_p, 1.0)
        self._top_k = int(_first(sampling.top_k, defaults.top_k, 0))
        self._min_p = _first(sampling.min_p, defaults.min_p, 0.0)
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        # 1.0 is also what a request without a wish says, so the model's own value applies then.
        asked = sampling.repetition_penalty
        self._repetition = asked if asked != 1.0 else defaults.repetition_penalty
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._n_chosen = 0
        self._constraint, self._budget = constraint, budget
        self._model = model
        self._top_logprobs = top_logprobs
        self._bias = _bias_of(sampling.logit_bias, vocab)
        self._counts = (
            torch.zeros(vocab) if self._presence != 0 or self._frequency != 0 else None
        )  # [V] float32: how often each token was chosen
        self._seen: Tensor | None = None  # [V] bool: in the prompt or the answer
        if self._repetition != 1.0:
            self._seen = torch.zeros(vocab, dtype=torch.bool)
            self._seen[torch.tensor(sorted(set(prompt_ids)), dtype=torch.long)] = True

    def choose(self, logits: Tensor) -> Chosen:
        """Choose the next token and count it.

        Shapes:
            logits [V] float32, left unchanged

        Raises:
            MoetError: MD-ENG-04, the logits hold NaN or infinity; MD-GRAM-02, no token fits the
                answer's form. No token is chosen then.
        """
        adjusted = self._adjust(logits)
        if not math.isfinite(adjusted.max()):  # NaN counts as the largest
            raise self._invalid()
        forced = None if self._budget is None else self._budget.forced()
        token_id = self._pick(adjusted) if forced is None else forced
        if self._constraint is not None:
            self._constraint.take(token_id)
        if self._budget is not None:
            self._budget.take(token_id)
        self._count(token_id)
        if self._top_logprobs is None:
            return Chosen(token_id)
        return with_logprobs(logits, token_id, self._top_logprobs)

    def draw(self, ahead: int = 0) -> Draw | None:
        """What a choice takes beside the logits; None if it must be made by `choose`.

        `ahead` counts the choices that will have been made before it. Penalties, biases and a form
        change the logits first, a budget may say what comes, and log-probabilities need all logits.
        """
        changes = (self._seen, self._counts, self._bias, self._constraint)
        alters = any(change is not None for change in changes)
        alters |= self._budget is not None and self._budget.active
        if alters or self._top_logprobs is not None:
            return None
        place = self._n_chosen + ahead
        return Draw(self._temperature, self._top_k, self._top_p, self._min_p, self._seed, place)

    def take(self, token_id: int | None) -> Chosen:
        """Count the token that was chosen elsewhere, by `draw`.

        Args:
            token_id: None if the logits held NaN or infinity.

        Raises:
            MoetError: MD-ENG-04, there is no token.
        """
        if token_id is None:
            raise self._invalid()
        self._count(token_id)
        return Chosen(token_id)

    def _pick(self, adjusted: Tensor) -> int:
        if self._constraint is not None:
            adjusted = self._constraint.apply(adjusted)
        if self._temperature <= 0:
            return int(adjusted.max(0).indices)  # the first of equal ones
        return sample(
            adjusted,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            u=uniform(self._seed, self._n_chosen),
        )

    def _adjust(self, logits: Tensor) -> Tensor:
        """Apply the repetition penalty (Hugging Face), then the other two (OpenAI), then biases."""
        if self._seen is not None:
            penalty = self._repetition
            scaled = torch.where(logits > 0, logits / penalty, logits * penalty)  # [V]
            logits = torch.where(self._seen, scaled, logits)
        if self._counts is not None:
            logits = logits - self._counts * self._frequency
            logits = logits - (self._counts > 0) * self._presence
        return logits if self._bias is None else logits + self._bias

    def _invalid(self) -> MoetError:
        return fail("MD-ENG-04", reason="the model gave invalid numbers", model=self._model)

    def _count(self, token_id: int) -> None:
        self._n_chosen += 1
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True


def _first(asked: float | None, recommended: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if recommended is None else recommended


def _bias_of(logit_bias: Mapping[int, float], vocab: int) -> Tensor | None:
    if not logit_bias:
        return None
    bias = torch.zeros(vocab)
    for token_id, value in logit_bias.items():
        bias[token_id] = value
    return bias


def with_logprobs(logits: Tensor, token_id: int, n_top: int) -> Chosen:
    """A token with its log-probability and the `n_top` best, from raw scores [V]."""
    logprobs = logits.float().log_softmax(0)  # [V]
    values, ids = logprobs.topk(min(n_top, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Chosen(token_id, float(logprobs[token_id]), top)
