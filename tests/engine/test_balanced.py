"""Balanced answers: the gate's decision, and an engine that makes unsure tokens again at FP4."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moet_desk.engine.checks import check_gate
from moet_desk.engine.gate import Gate, confidence
from moet_desk.engine.gate_curve import Limit
from moet_desk.engine.gate_file import Calibration, GatePoint, gate_in_use, write_gate
from moet_desk.engine.handle import (
    DEFAULT_GATE,
    EngineHandle,
    GateInfo,
    GateSource,
    GenerateRequest,
    PromptReading,
    Quality,
    Sampling,
)
from moet_desk.errors import MoetError
from moet_desk.marked_text import MarkedText, join
from moet_desk.settings import SETTINGS
from moet_desk.store.pack_meta import read_meta
from moet_desk.telemetry import Finished, GateCounters, TextDelta, Usage
from tests.engine.test_promise import FEW, STORY, SUM, TOKENS, Answer, answer, ask, engine


class Row:
    def __init__(self, tau: float | None) -> None:
        self.tau = tau
        self.rerun_tokens = 0
        self.rerun_s = 0.0
        self.reran = False


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_confidence__random_logits__largest_of_softmax(scale: float) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * scale
    want = float(logits.double().softmax(0).max())
    assert confidence(logits) == pytest.approx(want, rel=1e-5)
    assert confidence(logits - 300) == pytest.approx(want, rel=1e-4)


def test_confidence__edges() -> None:
    assert confidence(torch.zeros(4)) == 0.25
    assert confidence(torch.tensor([-math.inf, 2.0, -math.inf])) == 1.0
    for bad in (math.nan, math.inf):
        assert math.isnan(confidence(torch.tensor([0.0, bad])))


def test_gate__below_tau__rerun_and_counted() -> None:
    gate, row, other = Gate(), Row(0.6), Row(None)
    assert [gate.is_unsure(row, sure) for sure in (0.59, 0.6, 0.61, math.nan)] == [
        True, False, False, False,
    ]  # fmt: skip
    assert not gate.is_unsure(other, 0.1)
    assert not gate.is_unsure(Row(0.0), 0.0)
    gate.note_rerun(3, 4)
    gate.note_rerun(3, 3)
    assert (row.rerun_tokens, other.rerun_tokens) == (1, 0)
    gate.note_time([row], 0.25)
    assert (row.reran, row.rerun_s, other.reran) == (True, 0.25, False)
    assert gate.counters() == GateCounters(judged=5, rerun=1, flips=1, rerun_s=0.25)
    assert gate.counters().rerun_share == 0.2
    assert GateCounters().rerun_share is None


@pytest.mark.parametrize("gate", [-0.1, 1.01, math.nan, math.inf])
def test_check__gate_that_is_no_probability__refused(gate: float) -> None:
    with pytest.raises(MoetError) as caught:
        check_gate(gate)
    assert (caught.value.code, caught.value.facts["parameter"]) == ("MD-API-04", "gate")


def test_default__setting_and_request__agree() -> None:
    assert SETTINGS["answers.gate"].default is GenerateRequest().gate is None


def balanced(prompt: str, sampling: Sampling, gate: float = DEFAULT_GATE) -> GenerateRequest:
    return replace(ask(prompt, Quality.BALANCED, sampling, tokens=tokens_of(prompt)), gate=gate)


def tokens_of(prompt: str) -> int:
    return FEW if prompt == STORY else TOKENS


GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=0.8, seed=11)
REQUESTS = [
    balanced(STORY, GREEDY),
    balanced(SUM, DRAWN, gate=0.8),
    ask(STORY, Quality.EXACT, GREEDY, tokens=FEW),
    ask(SUM, Quality.FAST, DRAWN),
]


def usage_of(handle: EngineHandle, request: GenerateRequest) -> Usage:
    *_, last = handle.submit(request)
    assert isinstance(last, Finished)
    assert last.quality == request.quality.value
    return last.usage


@pytest.fixture(scope="module")
def wanted(demo_pack: Path) -> list[Answer]:
    """Each request alone, everything resident."""
    with engine(demo_pack) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


def test_tokens__default_gate__reruns_some_and_counts_them(
    demo_pack: Path, wanted: list[Answer]
) -> None:
    with engine(demo_pack) as handle:
        usage = usage_of(handle, REQUESTS[0])
        fast = usage_of(handle, REQUESTS[3])
    assert fast.rerun_tokens is fast.rerun_s is None
    gate = handle.snapshot().gate
    assert usage.rerun_tokens == gate.rerun
    assert usage.rerun_s == gate.rerun_s
    assert 0 < gate.rerun_s < usage.decode_s
    assert gate.judged == usage.completion_tokens
    assert 0 < gate.rerun < gate.judged
    assert gate.flips <= gate.rerun
    assert wanted[0] != wanted[2]
    assert wanted[1] != wanted[3]


@pytest.mark.parametrize("gate", [0.0, 0.6, 1.0])
def test_text__of_reruns__is_marked_and_told_piece_by_piece(demo_pack: Path, gate: float) -> None:
    with engine(demo_pack) as handle:
        *events, last = handle.submit(balanced(STORY, GREEDY, gate=gate))
    assert isinstance(last, Finished)
    pieces = [event for event in events if isinstance(event, TextDelta)]
    text = join(MarkedText(piece.text, piece.reran) for piece in pieces)
    n_marked = sum(end - start for start, end in text.marks)
    assert all(bool(piece.reran) == (piece.n_reran > 0) for piece in pieces if piece.text)
    assert all((piece.rerun_s > 0) == (piece.n_reran > 0) for piece in pieces)
    told = sum(piece.n_reran for piece in pieces)
    assert last.usage.rerun_tokens in (told, told + 1)  # the end token has no piece
    if gate == 0.0:
        assert n_marked == 0
    else:
        assert 0 < n_marked <= len(text)


@pytest.mark.parametrize(("prompt", "sampling"), [(STORY, GREEDY), (SUM, DRAWN)])
def test_tokens__gate_0__those_of_fast(demo_pack: Path, prompt: str, sampling: Sampling) -> None:
    with engine(demo_pack) as handle:
        fast = answer(handle, [ask(prompt, Quality.FAST, sampling, tokens=tokens_of(prompt))])
        assert answer(handle, [balanced(prompt, sampling, gate=0.0)]) == fast
    assert handle.snapshot().gate.rerun == 0


def test_tokens__every_one_rerun_behind_a_prompt_of_one_token__those_of_exact(
    demo_pack: Path,
) -> None:
    # A longer prompt is read at 2 bits, and its KV stays so: then the answers may differ.
    drawn = Sampling(temperature=1.5, seed=5)
    request = replace(balanced("", drawn, gate=1.0), messages=None, prompt_ids=[300])
    with engine(demo_pack) as handle:
        exact = answer(handle, [replace(request, quality=Quality.EXACT)])
        usage = usage_of(handle, request)
        assert usage.rerun_tokens == usage.completion_tokens
        assert answer(handle, [request]) == exact
        assert answer(handle, [replace(request, quality=Quality.FAST)]) != exact


SIZES = {
    "least pools": {"pool_slots": 4, "fine_slots": 4},
    "4-bit slots of one layer's experts": {"fine_slots": 4},
    "few rows in RAM": {"arena_rows": 20, "pool_slots": 30, "fine_slots": 12},
}


@pytest.mark.parametrize("sizes", list(SIZES))
def test_tokens__any_tier_sizes_beside_others__same_bits(
    demo_pack: Path, wanted: list[Answer], sizes: str
) -> None:
    with engine(demo_pack, **SIZES[sizes]) as handle:
        assert answer(handle, REQUESTS[::-1]) == wanted[::-1]


def test_gate__unset__of_the_pack_or_ours(demo_pack: Path, tmp_path: Path) -> None:
    pack = tmp_path / "demo"
    shutil.copytree(demo_pack, pack)
    assert gate_in_use(pack, None) == GateInfo(DEFAULT_GATE, GateSource.BUILT_IN)
    point = GatePoint(0.42, 0.1, 0.9)
    identity = read_meta(pack).identity
    write_gate(
        pack,
        Calibration(
            1, identity, 0.42, Limit.TARGET, 0.9, 0.15, [point], 10, 1, ["a.txt"], "2026-11-29"
        ),
    )
    assert gate_in_use(pack, None) == GateInfo(
        0.42, GateSource.PACK, date="2026-11-29", budget=0.15, rerun=0.1, caught=0.9
    )
    assert gate_in_use(pack, 0.7) == GateInfo(0.7, GateSource.SETTINGS)
    with engine(pack, pool_slots=4, arena_rows=4) as handle:
        info = handle.model()
    assert info is not None
    assert (info.default_gate, info.gate.source) == (0.42, GateSource.PACK)
    assert info.prompts is PromptReading.CPU
