"""The decode step: one token for every running answer. Read this after engine.py.

On a CPU the rows of a step go through the model one by one, so that an answer is the same alone and
beside others. A missing expert is fetched inside the step, in the layer that asks for it, and the
step goes on: nothing is ever replayed, skipped or approximated (design §7).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from moet_desk.engine.blocks.expert_math import ExpertMath
from moet_desk.engine.blocks.ffn import Experts
from moet_desk.engine.drafting import Drafting
from moet_desk.engine.gate import Gate, confidence
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.model import Model
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.residency import Residency
from moet_desk.errors import MoetError
from moet_desk.kernels.reference import combine
from moet_desk.store.pack_format import Plane


class DecodeExperts:
    """Routed experts of one token: look up, fetch what is missing, compute, add up."""

    def __init__(self, residency: Residency, math: ExpertMath, plane: Plane) -> None:
        self._residency = residency
        self._math = math
        self._plane = plane

    def expect(self, moe_layer: int, ids: Tensor) -> None:
        """See `Expecting`."""
        self._residency.expect(self._plane, moe_layer, ids[0].tolist())

    def __call__(self, moe_layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`; here T is 1."""
        slots = self._residency.slots(self._plane, moe_layer, ids[0].tolist())
        codes, scales = self._math.prepare(x)
        parts = self._math.rows(codes, scales, slots, moe_layer=moe_layer, ids=ids[0])  # [K, H]
        return combine(parts[None], weights)


class OpportunisticExperts:
    """The same, with FP4 weights for the experts that lie in a 4-bit slot, whatever put them there.

    Nearer to `exact` than 2 bits, but which experts these are depends on what ran before, so the
    answer does too: used only where the user asked for it.
    """

    def __init__(self, residency: Residency, math: Mapping[Plane, ExpertMath]) -> None:
        self._residency = residency
        self._math = math

    def __call__(self, moe_layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`; here T is 1."""
        found = self._residency.mixed_slots(moe_layer, ids[0].tolist())
        parts = x.new_empty((len(found), x.shape[1]))  # [K, H]
        for plane, math in self._math.items():
            places = [i for i, (its, _) in enumerate(found) if its is plane]
            if places:
                codes, scales = math.prepare(x)
                slots = [found[i][1] for i in places]
                chosen = ids[0, places]
                parts[places] = math.rows(codes, scales, slots, moe_layer=moe_layer, ids=chosen)
        return combine(parts[None], weights)


class Decoder:
    """Makes tokens for the running requests."""

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        residency: Residency,
        experts: Mapping[Plane, Experts],
        *,
        drafting: Drafting,
    ) -> None:
        self._model = model
        self._kv = kv
        self._residency = residency
        self._experts = experts
        self.drafting = drafting
        self.gate = Gate()

    def step(self, requests: list[ActiveRequest]) -> None:
        """A token for each request, and more where drafts were right.

        A request that fails ends alone; the others go on.
        """
        for request in requests:
            waited_before = self._residency.wait_s
            request.steps += 1
            try:
                self._write(request)
            except MoetError as error:
                request.fail(error)
            request.timing.wait_s += self._residency.wait_s - waited_before

    def _write(self, request: ActiveRequest) -> None:
        """Guess some tokens, then go on for as long as each guess was right: rows are read one by
        one here, so none is read behind a wrong one, and nothing has to be undone.
        """
        step = self.drafting.begin([request], self.gate.rerun_s)
        for _, guesses in step.runs:
            n_right = 0
            for guess in (*guesses, None):
                chosen = request.sampler.choose(self.logits(request))
                request.accept(chosen)
                n_right += chosen.token_id == guess
                if request.ended or chosen.token_id != guess:
                    break
            self.drafting.checked(step, request, len(guesses), n_right)
        self.drafting.end(step, self.gate.rerun_s)

    def logits(self, request: ActiveRequest) -> Tensor:
        """Scores [V] of the token after the request's newest one, which is read here."""
        newest = request.out_ids[-1]
        return self.gated(request, newest, self._read(request, newest, request.plane))

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [T, V] behind states [T, H]."""
        return self._model.logits(hidden)

    def gated(self, request: ActiveRequest, newest: int, hidden: Tensor) -> Tensor:
        """The scores that count behind the token just read: those of its states, or those of
        reading it again with FP4 experts if these are too unsure for a balanced answer. Its KV is
        then written anew.

        Shapes:
            hidden [T, H], the newest token last; returns [V]
        """
        logits = self._model.logits(hidden[-1:])[0]
        if request.tau is not None and self.gate.is_unsure(request, confidence(logits)):
            began = time.monotonic()
            self._kv.rewind(request.kv, request.kv.length - 1)
            again = self._read(request, newest, Plane.FINE)
            hidden = torch.cat([hidden[:-1], again])
            better = self._model.logits(again)[0]
            self.gate.note_rerun(int(logits.argmax()), int(better.argmax()))
            self.gate.note_time([request], time.monotonic() - began)
            logits = better
        self.drafting.note(request, hidden)
        return logits

    def _read(self, request: ActiveRequest, token: int, plane: Plane) -> Tensor:
        """States [1, H] behind a token."""
        ids = torch.tensor([token])
        return self._model.forward(ids, self._kv, request.kv, self._experts[plane])
