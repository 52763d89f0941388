"""The demo model on a GPU: logits against the CPU engine, and the same bits however it is run.

Faults are in test_engine_faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import chunk_sizes, expert_stream
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.handle import EngineOptions, Sampling
from moet_desk.engine.sampling import GREEDY, Draw, Sampler
from moet_desk.store.pack_format import Plane
from tests.engine.oracle import loaded, logits_of
from tests.engine.test_parity_demo import some_texts
from tests.kernels.triton.test_chunk import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RMS_LIMIT, SAME_LIMIT, MARGIN_LIMIT = 5e-3, 0.995, 0.05
"""Of the FP4 experts' logits: RMS over their spread, share of the same best tokens, and nats by
which the CPU may prefer its token where the two disagree."""

NOISE = 1.5
"""With 2-bit rows activations are int8, and one that rounds the other way because a sum before it
was added in another order changes all that follows. So much more than the CPU differs from itself,
rows one by one against rows together, may the GPU differ from it (docs/adr/0010)."""


def open_core(pack: Path, widths: tuple[int, ...], **sizes: int) -> CudaCore:
    options = EngineOptions(save_heat=False, kv_format="f32", **sizes)  # type: ignore[arg-type]
    return load_cuda(pack, options, device=torch.device("cuda"), widths=widths)


@pytest.fixture(scope="module")
def core(demo_pack: Path) -> Iterator[CudaCore]:
    core = open_core(demo_pack, (1, 2, 3, 4, 8))
    yield core
    core.close()


@pytest.fixture(scope="module")
def texts(demo_pack: Path) -> list[list[int]]:
    return some_texts(demo_pack, per_file=3, length=256)


def forced(core: CudaCore, ids: list[int], plane: Plane, *, rows: int) -> Tensor:
    """Teacher-forced logits [T, V], `rows` tokens per step."""
    sequence = core.kv.reserve(len(ids))
    assert sequence is not None
    found = []
    for at in range(0, len(ids), rows):
        part = ids[at : at + rows]
        steps = [StepRow(token, sequence, i) for i, token in enumerate(part)]
        found.append(core.model.run(steps, plane).clone())
        sequence.length += len(part)
    core.kv.release(sequence)
    return torch.cat(found)


def read_anew(core: CudaCore, ids: list[int], plane: Plane) -> Tensor:
    """Logits behind a prompt that is read in chunks."""
    sequence = core.kv.reserve(len(ids))
    assert sequence is not None
    how = Reading.FAST if plane is Plane.BASE else Reading.EXACT
    logits = read(core, ids, sequence, how)
    core.kv.release(sequence)
    return logits


@dataclass(frozen=True)
class Agreement:
    """How far logits are from the wanted ones, over some texts."""

    rms: float  # over the wanted logits' standard deviation
    same: float
    margin: float


def agreement(got: Tensor, want: Tensor) -> Agreement:
    best, ours = want.argmax(-1), got.argmax(-1)
    margin = want.gather(1, best[:, None]) - want.gather(1, ours[:, None])
    return Agreement(
        rms=float((got - want).square().mean().sqrt() / want.std()),
        same=float((best == ours).float().mean()),
        margin=float(margin.max()),
    )


@dataclass(frozen=True)
class CpuLogits:
    """Of all texts: rows together, and of 2-bit experts also one by one."""

    together: dict[Plane, Tensor]
    one_by_one: Tensor


@pytest.fixture(scope="module")
def wanted(demo_pack: Path, texts: list[list[int]]) -> CpuLogits:
    with loaded(demo_pack, kv_format="f32") as cpu:
        together = {
            plane: torch.cat([logits_of(cpu, ids, plane=plane) for ids in texts]) for plane in Plane
        }
        single = [logits_of(cpu, ids, plane=Plane.BASE, sizes=[1] * len(ids)) for ids in texts]
    return CpuLogits(together, torch.cat(single))


def near_the_cpu(found: Agreement, wanted: CpuLogits, plane: Plane) -> bool:
    print(plane.value, found)
    if plane is Plane.FINE:
        near = found.same >= SAME_LIMIT and found.margin < MARGIN_LIMIT
        return near and found.rms < RMS_LIMIT
    own = agreement(wanted.one_by_one, wanted.together[Plane.BASE])
    print("the CPU with itself", own)
    return found.rms < NOISE * own.rms and 1 - found.same < NOISE * (1 - own.same) + 1e-3


@pytest.mark.parametrize("plane", list(Plane))
def test_step__teacher_forced__near_the_cpu_engine(
    core: CudaCore, wanted: CpuLogits, texts: list[list[int]], plane: Plane
) -> None:
    got = torch.cat([forced(core, ids, plane, rows=4) for ids in texts])
    assert near_the_cpu(agreement(got, wanted.together[plane]), wanted, plane)


@pytest.mark.parametrize("plane", list(Plane))
def test_chunks__prompts__near_the_cpu_engine(
    core: CudaCore, wanted: CpuLogits, texts: list[list[int]], plane: Plane
) -> None:
    """The logits behind prompts that end anywhere in a text.

    Twice the limits of a step: a prompt's dense products take activations in two bfloat16 parts,
    2**-17 of them, where a step takes float32; and here are some dozens of positions only.
    """
    ends = (1, 7, 64, 131)
    rows, start = list[int](), 0
    for ids in texts:
        rows += [start + min(n, len(ids)) - 1 for n in ends]
        start += len(ids)
    got = torch.stack([read_anew(core, ids[:n], plane) for ids in texts for n in ends])
    found = agreement(got, wanted.together[plane][rows])
    print(plane.value, "chunks", found)
    assert found.rms < (2 * RMS_LIMIT if plane is Plane.FINE else 3e-2)
    assert found.margin < (MARGIN_LIMIT if plane is Plane.FINE else 0.2)


@pytest.fixture(scope="module")
def one_by_one(core: CudaCore, texts: list[list[int]]) -> dict[Plane, Tensor]:
    """Logits of a text, one row per step, with everything in slots."""
    return {plane: forced(core, texts[0][:96], plane, rows=1) for plane in Plane}


@pytest.mark.parametrize("plane", list(Plane))
def test_step__any_number_of_rows__same_bits(
    core: CudaCore, texts: list[list[int]], one_by_one: dict[Plane, Tensor], plane: Plane
) -> None:
    assert core.server is None
    for rows in (1, 2, 3, 4, 8):
        got = forced(core, texts[0][:96], plane, rows=rows)
        assert torch.equal(got, one_by_one[plane]), f"{rows} rows"


WISHES = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=2**63 + 9),
    Sampling(temperature=1.5, min_p=0.05, seed=-4),
]
COMPLETE = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def answered(
    core: CudaCore, first: list[int], wishes: list[Sampling], *, on_device: bool
) -> list[list[int]]:
    """Tokens of some answers side by side, each from its first token."""
    vocab = core.spec.vocab
    samplers = [Sampler(wish, COMPLETE, prompt_ids=(), vocab=vocab) for wish in wishes]
    answers, sequences = [[token] for token in first], []
    for _ in wishes:
        sequence = core.kv.reserve(48)
        assert sequence is not None
        sequences.append(sequence)
    for _ in range(40):
        newest = zip(answers, sequences, strict=True)
        rows = [StepRow(answer[-1], sequence) for answer, sequence in newest]
        if on_device:
            draws = [draw for sampler in samplers if (draw := sampler.draw()) is not None]
            tokens = core.model.choose(rows, Plane.BASE, draws)
            picks = [sampler.take(token) for sampler, token in zip(samplers, tokens, strict=True)]
        else:
            logits = core.model.run(rows, Plane.BASE)
            picks = [sampler.choose(row) for sampler, row in zip(samplers, logits, strict=True)]
        for answer, sequence, pick in zip(answers, sequences, picks, strict=True):
            answer.append(pick.token_id)
            sequence.length += 1
    for sequence in sequences:
        core.kv.release(sequence)
    return answers


@pytest.mark.parametrize("rows", [1, 4, 5, 8])  # five rows have no graph
def test_choose__same_seeds__same_tokens_as_on_the_host(
    core: CudaCore, texts: list[list[int]], rows: int
) -> None:
    first, wishes = texts[0][:rows], (WISHES * 2)[:rows]
    for kinds in (wishes, WISHES[1:2] * rows):  # of one row: greedy, then drawn
        on_host = answered(core, first, kinds, on_device=False)
        assert answered(core, first, kinds, on_device=True) == on_host


def test_choose__invalid_numbers__no_tokens_and_the_next_step_is_as_before(core: CudaCore) -> None:
    sequence = core.kv.reserve(4)
    assert sequence is not None
    rows = [StepRow(5, sequence)]
    before = core.model.choose(rows, Plane.BASE, [GREEDY])
    saved = core.model.final_norm.clone()
    core.model.final_norm.fill_(torch.nan)
    for draw in (GREEDY, Draw(temperature=1.0)):
        assert core.model.choose(rows, Plane.BASE, [draw]) == [None]
    core.model.final_norm.copy_(saved)
    assert core.model.choose(rows, Plane.BASE, [GREEDY]) == before
    core.kv.release(sequence)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="least pool"),
        pytest.param({"arena_rows": 200}, id="arena limited"),
        pytest.param({"arena_rows": 0}, id="from the file"),
    ],
)
def test_step__small_tiers__same_bits(
    demo_pack: Path,
    texts: list[list[int]],
    one_by_one: dict[Plane, Tensor],
    sizes: dict[str, int],
) -> None:
    small = open_core(demo_pack, (1, 4), pool_slots=32, fine_slots=32, **sizes)
    try:
        for plane in Plane:
            for rows in (1, 4):
                got = forced(small, texts[0][:96], plane, rows=rows)
                assert torch.equal(got, one_by_one[plane]), f"{plane.value}, {rows} rows"
        counters = small.residency.counters(step_s=0.0)
        assert counters.evictions > 0
        assert (small.server is not None and small.server.served > 0) == bool(sizes)
    finally:
        small.close()


def test_chunks__small_tiers__same_bits(
    demo_pack: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose rows come from slots, through few staging places, and from the file."""
    ids = [token for text in texts[:3] for token in text][:600]
    monkeypatch.setattr(expert_stream, "AHEAD_PAIRS", 1)
    want: dict[Reading, Tensor] = {}
    for batched, sizes in (
        (32, {}),
        (4, {"pool_slots": 32, "fine_slots": 32}),
        (2, {"pool_slots": 32, "fine_slots": 32, "arena_rows": 100}),
        (3, {"pool_slots": 32, "fine_slots": 32, "arena_rows": 0}),
    ):
        monkeypatch.setattr(chunk_sizes, "MOST_BATCHED", batched)
        core = open_core(demo_pack, (1,), prefill_chunk=256, **sizes)
        try:
            for reading in (*Reading, Reading.FAST):
                for _ in range(3):
                    sequence = core.kv.reserve(len(ids))
                    assert sequence is not None
                    got = read(core, ids, sequence, reading)
                    core.kv.release(sequence)
                    assert torch.equal(got, want.setdefault(reading, got)), f"{reading} {sizes}"
        finally:
            core.close()
