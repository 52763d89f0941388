"""Tokens that the device chooses behind the step, interpreted: those the host would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda.decode import CudaDecoder
from moet_desk.engine.cuda.step import ERROR_READ, StepModel
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.cuda.synthetic import SyntheticLoader
from moet_desk.engine.draft_control import Fixed
from moet_desk.engine.draft_estimates import Source
from moet_desk.engine.drafting import Drafting
from moet_desk.engine.gate import confidence
from moet_desk.engine.handle import Sampling
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.sampling import GREEDY, Chosen, Sampler
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import GateCounters
from tests.engine.test_shape_bench import tiny_spec

VOCAB = tiny_spec().vocab
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
KINDS = {
    "greedy": Sampling(temperature=0.0, seed=1),
    "plain": Sampling(temperature=1.5, seed=-3),
    "filters": Sampling(temperature=0.9, top_p=0.8, top_k=20, min_p=0.02, seed=2**64 - 5),
}
PENALTY = Sampling(temperature=1.0, seed=4, frequency_penalty=0.5)


def sampler(sampling: Sampling) -> Sampler:
    return Sampler(sampling, PLAIN, prompt_ids=[1, 2], vocab=VOCAB)


@dataclass
class Answer:
    """As much of an `ActiveRequest` as the decoder touches."""

    sampler: Sampler
    kv: KvSequence
    out_ids: list[int]
    plane: Plane = Plane.BASE
    tau: float | None = None
    rerun_tokens: int = 0
    rerun_s: float = 0.0
    reran: bool = False
    prompt_ids: tuple[int, ...] = (5,)
    steps: int = 0
    errors: list[Exception] = field(default_factory=list)
    limit: int = 100
    draft: Any = None
    ended: bool = False
    drafts: list[tuple[int, int]] = field(default_factory=list)

    def accept(self, chosen: Chosen) -> None:
        self.out_ids.append(chosen.token_id)

    def note_drafts(self, n_guessed: int, n_right: int) -> None:
        self.drafts.append((n_guessed, n_right))

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.ended = True


@dataclass(frozen=True)
class Bench:
    model: StepModel
    kv: KvCache


@pytest.fixture
def bench() -> Bench:
    """A step without layers, which would take seconds: embedding, head and choice."""
    spec, device = tiny_spec(), torch.device("cpu")
    kv = KvCache(
        spec.layers[0].mixer, n_layers=2, n_pages=4, page_tokens=16, form=KvFormat.BF16,
        device=device,
    )  # fmt: skip
    error = torch.zeros(1, dtype=torch.int32)
    nobody: Any = dict.fromkeys(
        Plane, SimpleNamespace(pools_in_ram=[], recover=lambda: None, forget=lambda: None)
    )
    model = StepModel(
        spec, SyntheticLoader(spec, device), kv, nobody, context=64, device=device, error=error
    )
    model.layers.clear()
    return Bench(model, kv)


def answers(bench: Bench, kinds: Sequence[Sampling]) -> list[Answer]:
    made = []
    for i, kind in enumerate(kinds):
        sequence = bench.kv.reserve(16)
        assert sequence is not None
        made.append(Answer(sampler(kind), sequence, [7 + i]))
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who chose, step by step."""
    seen: list[str] = []

    def noted(name: str) -> None:
        intact = getattr(StepModel, name)

        def call(self: StepModel, *given: Any) -> Any:
            seen.append(name)
            return intact(self, *given)

        monkeypatch.setattr(StepModel, name, call)

    noted("run")
    noted("choose")
    return seen


def test_choose__greedy_and_drawn_rows__tokens_of_the_host(bench: Bench) -> None:
    device, hosts = answers(bench, list(KINDS.values())), [sampler(k) for k in KINDS.values()]
    for _ in range(5):
        rows = [StepRow(answer.out_ids[-1], answer.kv) for answer in device]
        logits = bench.model.run(rows, Plane.BASE).clone()
        draws = [draw for answer in device if (draw := answer.sampler.draw()) is not None]
        got = bench.model.choose(rows, Plane.BASE, draws)
        assert got == [host.choose(row).token_id for host, row in zip(hosts, logits, strict=True)]
        for answer, token in zip(device, got, strict=True):
            answer.accept(answer.sampler.take(token))
            answer.kv.length += 1
    assert len({tuple(answer.out_ids) for answer in device}) == 3


def test_choose__one_greedy_row__tokens_of_the_host(bench: Bench) -> None:
    (answer,) = answers(bench, [KINDS["greedy"]])
    rows = [StepRow(5, answer.kv)]
    best = int(bench.model.run(rows, Plane.BASE).argmax())
    assert bench.model.choose(rows, Plane.BASE, [GREEDY]) == [best]
    with pytest.raises(ValueError, match="2 draws for 1 rows"):
        bench.model.choose(rows, Plane.BASE, [GREEDY] * 2)


def test_decoder__penalties_in_the_group__host_chooses_and_others_get_the_same_tokens(
    bench: Bench, asked: list[str]
) -> None:
    decoder, found = CudaDecoder(bench.model), []
    for beside in ([], [PENALTY]):
        group = answers(bench, [KINDS["greedy"], KINDS["filters"], *beside])
        for _ in range(3):
            decoder.step(group)  # type: ignore[arg-type]
        assert all(answer.kv.length == answer.steps == 3 for answer in group)
        assert not any(answer.errors for answer in group)
        found.append([answer.out_ids for answer in group[:2]])
        for answer in group:
            bench.kv.release(answer.kv)
    assert found[0] == found[1]
    assert asked == ["choose"] * 3 + ["run"] * 3


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide")
@pytest.mark.parametrize("kind", ["greedy", "filters"])
def test_decoder__invalid_numbers_in_a_row__only_that_request_fails(
    bench: Bench, asked: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    intact = StepModel._logits

    def poisoned(self: StepModel, x: Tensor, rows: int) -> None:
        intact(self, x, rows)
        self.buffers.logits[1, 9] = torch.nan

    decoder, group = CudaDecoder(bench.model), answers(bench, [KINDS[kind]] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(StepModel, "_logits", poisoned)
        decoder.step(group)  # type: ignore[arg-type]
    (error,) = group[1].errors
    assert isinstance(error, MoetError)
    assert error.code == "MD-ENG-04"
    assert group[1].sampler.draw() == sampler(KINDS[kind]).draw()  # nothing was counted
    decoder.step([group[0], group[2]])  # type: ignore[list-item]
    assert [len(answer.out_ids) for answer in group] == [3, 1, 3]
    assert not group[0].errors
    assert not group[2].errors
    assert asked == ["choose"] * 2


def test_decoder__step_fails__no_token_is_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = StepModel._logits

    def failing(self: StepModel, x: Tensor, rows: int) -> None:
        intact(self, x, rows)
        self.buffers.logits[0, 9] = torch.nan
        self.error.fill_(ERROR_READ)

    decoder, group = CudaDecoder(bench.model), answers(bench, [KINDS["greedy"]] * 2)
    with monkeypatch.context() as patch:
        patch.setattr(StepModel, "_logits", failing)
        decoder.step(group)  # type: ignore[arg-type]
    for answer in group:
        (error,) = answer.errors
        assert isinstance(error, MoetError)
        assert error.code == "MD-NVME-04"
        assert (answer.kv.length, len(answer.out_ids)) == (0, 1)


@pytest.fixture
def planes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plane, list[int]]]:
    """Plane and positions of each step that runs. FP4 steps give other scores than 2-bit ones."""
    seen: list[tuple[Plane, list[int]]] = []
    intact, compute = StepModel.launch, StepModel._compute

    def launch(self: StepModel, rows: int, plane: Plane) -> None:
        intact(self, rows, plane)
        if plane is Plane.FINE:
            self.buffers.logits[:rows] = self.buffers.logits[:rows].flip(-1)

    def noted(self: StepModel, rows: Sequence[StepRow], plane: Plane, draws: Any) -> None:
        seen.append((plane, [row.sequence.length for row in rows]))
        compute(self, rows, plane, draws)

    monkeypatch.setattr(StepModel, "launch", launch)
    monkeypatch.setattr(StepModel, "_compute", noted)
    return seen


def balanced(bench: Bench, kinds: Sequence[Sampling], taus: Sequence[float | None]) -> list[Answer]:
    group = answers(bench, kinds)
    for answer, tau in zip(group, taus, strict=True):
        answer.tau = tau
    return group


def test_balanced__all_unsure__tokens_of_fp4_with_the_same_draws(
    bench: Bench, planes: list[tuple[Plane, list[int]]]
) -> None:
    exact = answers(bench, list(KINDS.values()))
    for answer in exact:
        answer.plane = Plane.FINE
    decoder = CudaDecoder(bench.model)
    for _ in range(3):
        decoder.step(exact)  # type: ignore[arg-type]
    for answer in exact:
        bench.kv.release(answer.kv)
    planes.clear()
    group = balanced(bench, list(KINDS.values()), [1.0] * 3)
    for _ in range(3):
        decoder.step(group)  # type: ignore[arg-type]
    assert [answer.out_ids for answer in group] == [answer.out_ids for answer in exact]
    assert planes == [(plane, [n] * 3) for n in range(3) for plane in (Plane.BASE, Plane.FINE)]
    assert all(answer.kv.length == answer.steps == answer.rerun_tokens == 3 for answer in group)
    counters = decoder.gate.counters()
    assert replace(counters, rerun_s=0.0) == GateCounters(judged=9, rerun=9, flips=9)
    assert all(answer.reran for answer in group)
    # Each waited for every launch that the others shared with it.
    assert {answer.rerun_s for answer in group} == {counters.rerun_s}
    assert counters.rerun_s > 0


@pytest.mark.parametrize("beside", [None, PENALTY], ids=["device chooses", "host chooses"])
def test_balanced__some_unsure__those_alone_are_rerun(
    bench: Bench, planes: list[tuple[Plane, list[int]]], beside: Sampling | None
) -> None:
    kinds, taus = [KINDS["greedy"], KINDS["filters"], KINDS["filters"]], [0.0, 1.0, None]
    alone = []
    for kind, tau in zip(kinds, taus, strict=True):
        (answer,) = balanced(bench, [kind], [tau])
        answer.out_ids = [9]
        CudaDecoder(bench.model).step([answer])  # type: ignore[list-item]
        alone.append(answer.out_ids)
        bench.kv.release(answer.kv)
    planes.clear()
    more: list[Sampling] = [] if beside is None else [beside]
    group = balanced(bench, [*kinds, *more], [*taus, *([None] * len(more))])
    for answer in group:
        answer.out_ids = [9]
    CudaDecoder(bench.model).step(group)  # type: ignore[arg-type]
    assert [answer.out_ids for answer in group[:3]] == alone
    assert [answer.rerun_tokens for answer in group[:3]] == [0, 1, 0]
    assert planes == [(Plane.BASE, [0] * len(group)), (Plane.FINE, [0])]
    assert alone[1] != alone[2]


def test_balanced__confidence__of_the_raw_scores_whoever_chooses(bench: Bench) -> None:
    (answer,) = answers(bench, [KINDS["filters"]])
    rows = [StepRow(9, answer.kv)] * 2
    want = confidence(bench.model.run(rows, Plane.BASE)[0])
    best = int(bench.model.run(rows, Plane.BASE)[0].argmax())
    assert bench.model.judge(2) == [best, best]
    judged = bench.model.confidence(2)
    draw = answer.sampler.draw()
    assert draw is not None
    bench.model.choose(rows, Plane.BASE, [draw, GREEDY])
    assert bench.model.confidence(2) == judged
    assert judged == pytest.approx([want, want], rel=1e-5)


@pytest.mark.parametrize("kind", ["greedy", "filters"])
def test_balanced__unsure_behind_the_prompt__its_last_token_is_read_again(
    bench: Bench, planes: list[tuple[Plane, list[int]]], kind: str
) -> None:
    found = []
    for tau in (None, 0.0, 1.0):
        (answer,) = balanced(bench, [KINDS[kind]], [tau])
        answer.out_ids, answer.kv.length = [], 4  # the prompt is read, its last token is 5
        logits = bench.model.run([StepRow(5, answer.kv)], Plane.BASE)[0]
        planes.clear()
        CudaDecoder(bench.model).first(answer, logits)  # type: ignore[arg-type]
        assert planes == ([(Plane.FINE, [3])] if tau else [])
        assert (answer.kv.length, len(answer.out_ids), answer.errors) == (4, 1, [])
        found.append(answer.out_ids)
        bench.kv.release(answer.kv)
    assert found[0] == found[1] != found[2]


def test_balanced__rerun_fails__sure_rows_keep_their_token(
    bench: Bench, planes: list[tuple[Plane, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = StepModel.launch

    def failing(self: StepModel, rows: int, plane: Plane) -> None:
        intact(self, rows, plane)
        if plane is Plane.FINE:
            self.error.fill_(ERROR_READ)

    monkeypatch.setattr(StepModel, "launch", failing)
    sure, unsure = balanced(bench, [KINDS["greedy"]] * 2, [0.0, 1.0])
    decoder = CudaDecoder(bench.model)
    decoder.step([sure, unsure])  # type: ignore[list-item]
    assert (sure.errors, len(sure.out_ids), sure.kv.length) == ([], 2, 1)
    assert (len(unsure.errors), len(unsure.out_ids), unsure.kv.length) == (1, 1, 0)
    decoder.step([sure])  # type: ignore[list-item]
    assert len(sure.out_ids) == 3


# -- guesses ---------------------------------------------------------------------------------


class Oracle:
    """Guesses from known answers, by their first tokens; at every fourth place not all right."""

    def __init__(self, known: Sequence[list[int]]) -> None:
        self._known = {ids[0]: ids for ids in known}

    def propose(self, request: Any, depth: int) -> list[int]:
        ids, at = self._known[request.out_ids[0]], len(request.out_ids)
        guesses = ids[at : at + depth]
        if at % 4 == 1 and guesses:
            guesses = [*guesses[:-1], (guesses[-1] + 1) % VOCAB]
        return guesses


def oracle(known: Sequence[list[int]], depth: int) -> Drafting:
    return Drafting(Fixed(Source.LOOKUP, depth), lookup=Oracle(known))


def decoded(
    bench: Bench, taus: Sequence[float | None], drafting: Drafting, n_tokens: int
) -> tuple[list[Answer], CudaDecoder, int]:
    """Answers of every kind, with at least so many tokens, and the steps it took."""
    group = balanced(bench, [*KINDS.values(), PENALTY], taus)
    decoder, n_steps = CudaDecoder(bench.model, drafting), 0
    while running := [answer for answer in group if len(answer.out_ids) < n_tokens]:
        decoder.step(running)  # type: ignore[arg-type]
        n_steps += 1
    for answer in group:
        assert answer.kv.length == len(answer.out_ids) - 1
        bench.kv.release(answer.kv)
    return group, decoder, n_steps


@pytest.mark.parametrize("taus", [[None] * 4, [0.0, 1.0, 0.05, 0.05]], ids=["fast", "balanced"])
def test_drafts__some_wrong__tokens_of_a_run_without(
    bench: Bench, planes: list[tuple[Plane, list[int]]], taus: list[float | None]
) -> None:
    plain, without, _ = decoded(bench, taus, Drafting(), 11)
    known = [answer.out_ids for answer in plain]
    for depth in (1, 3):
        # those that have enough tokens already may get some more
        found, decoder, n_steps = decoded(bench, taus, oracle(known, depth), 7)
        for answer, ids in zip(found, known, strict=True):
            assert answer.out_ids == ids[: len(answer.out_ids)]
        counts = decoder.drafting.acceptance.counters()
        guessed, right = counts.guessed, counts.right
        assert len(guessed) == depth
        assert 0 < right[-1] < guessed[-1]
        if taus[0] is None:
            assert n_steps < 6  # without guesses
    assert (without.gate.counters().judged > 0) == (taus[0] is not None)


def test_drafts__unsure_behind_a_right_guess__that_row_alone_is_rerun(
    bench: Bench, planes: list[tuple[Plane, list[int]]]
) -> None:
    """Its KV stands behind the rows that were sure, and rows behind it are dropped."""
    (sure,) = balanced(bench, [KINDS["greedy"]], [0.0])
    CudaDecoder(bench.model).step([sure])  # type: ignore[list-item]
    first = sure.out_ids[-1]
    rows = [StepRow(sure.out_ids[0], sure.kv), StepRow(first, sure.kv, 1)]
    bench.model.choose(rows, Plane.BASE, [GREEDY] * 2)
    confident, doubtful = bench.model.confidence(2)
    bench.kv.release(sure.kv)
    assert confident > doubtful, "the made-up weights are always the same; other ones are needed"
    (answer,) = balanced(bench, [KINDS["greedy"]], [(confident + doubtful) / 2])
    planes.clear()
    decoder = CudaDecoder(bench.model, oracle([[answer.out_ids[0], first, 0, 0]], 3))
    decoder.step([answer])  # type: ignore[list-item]
    assert planes == [(Plane.BASE, [0] * 4), (Plane.FINE, [1])]
    assert answer.out_ids[:2] == [7, first]
    assert (len(answer.out_ids), answer.kv.length, answer.rerun_tokens) == (3, 2, 1)
    assert answer.drafts == [(3, 1)]


def test_drafts__more_rows_than_a_launch_has__several_launches(
    bench: Bench, planes: list[tuple[Plane, list[int]]]
) -> None:
    group = answers(bench, [KINDS["greedy"]] * 4)
    drafting = oracle([[answer.out_ids[0], 1, 2, 3] for answer in group], 3)
    CudaDecoder(bench.model, drafting).step(group)  # type: ignore[arg-type]
    assert [len(lengths) for _, lengths in planes] == [8, 8]
    assert all(len(answer.out_ids) >= 2 for answer in group)


# -- answers of a given form -----------------------------------------------------------------


class Climbing:
    """A form in which each token is one to three above the one before, as `grammar.Constraint`."""

    def __init__(self, first: int) -> None:
        self._last = first

    def apply(self, logits: Tensor) -> Tensor:
        barred = torch.ones(VOCAB, dtype=torch.bool)
        barred[[(self._last + i) % VOCAB for i in (1, 2, 3)]] = False
        return logits.masked_fill(barred, -torch.inf)

    def take(self, token_id: int) -> None:
        assert (token_id - self._last) % VOCAB in (1, 2, 3)
        self._last = token_id


@pytest.mark.slow
def test_form__with_guesses__kept_and_tokens_of_a_run_without(
    bench: Bench, asked: list[str]
) -> None:
    found: list[Answer] = []
    for depth, n_tokens in ((0, 10), (2, 8)):
        (answer,) = answers(bench, [KINDS["filters"]])
        form: Any = Climbing(answer.out_ids[0])
        answer.sampler = Sampler(
            KINDS["filters"], PLAIN, prompt_ids=[1, 2], vocab=VOCAB, constraint=form
        )
        drafting = oracle([one.out_ids for one in found], depth) if depth else Drafting()
        decoder = CudaDecoder(bench.model, drafting)
        while len(answer.out_ids) < n_tokens:
            decoder.step([answer])  # type: ignore[list-item]
        assert not answer.errors
        found.append(answer)
        bench.kv.release(answer.kv)
    plain, guessed = found
    assert guessed.out_ids == plain.out_ids[: len(guessed.out_ids)]
    steps = {(b - a) % VOCAB for a, b in zip(plain.out_ids, plain.out_ids[1:], strict=False)}
    assert steps <= {1, 2, 3}
    right = sum(right for _, right in guessed.drafts)
    assert 0 < right < sum(n for n, _ in guessed.drafts)
    assert set(asked) == {"run"}  # a mask is put on by the host
