"""Models with residual streams and pooled attention on a device's launches, interpreted, against
the CPU engine. Dense products, which have tests of their own, are torch's: interpreted they would
take nine tenths of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import blocks, products, step, stream_chunk, streams
from moet_desk.engine.cuda.draft import DeviceHead
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.draft import CpuHead, state_of
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.kernels.triton.dense import NormOf
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.test_v4_head import with_head
from tests.engine.tiny_v4 import CONFIG, random_v4, save_v4
from tests.kernels.triton.makers import real_values
from tests.kernels.triton.slow_drive import check_steps_done_again
from tests.kernels.triton.test_chunk import OPTIONS, on_device, read
from tests.kernels.triton.test_head import Greedy

SMALL: dict[str, Any] = {
    **CONFIG, "num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 8],
    "hidden_size": 32, "vocab_size": 64, "head_dim": 128, "qk_rope_head_dim": 64,
    "num_attention_heads": 2, "index_head_dim": 64, "index_n_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 1, "hc_sinkhorn_iters": 3, "index_topk": 1, "sliding_window": 4,
    "hc_mult": 2,
}  # fmt: skip
"""All kinds of layers, with heads that kernels take."""

N_PROMPT, N_STEP = 13, 3
IDS = torch.randint(
    3, 64, (N_PROMPT + N_STEP,), generator=torch.Generator().manual_seed(3)
).tolist()  # fmt: skip


def product(
    x: Tensor, weight: DenseWeight, out: Tensor, *, bias: Tensor | None = None,
    residual: Tensor | None = None, norm: NormOf | None = None,
) -> None:  # fmt: skip
    """`gemv`, row by row."""
    values = real_values(weight).float()
    y = torch.stack([values @ row for row in x])
    y = y if bias is None else y + bias
    out.copy_(y if residual is None else y + residual)
    if norm is not None:
        rms_norm(out[:, : norm.weight.shape[0]], norm.weight, norm.eps, out=norm.out)


def by_head(
    x: Tensor, weight: DenseWeight, out: Tensor, *, first: int, count: int, pitch: int
) -> None:
    """`head_gemv`."""
    for head in range(x.shape[1]):
        rows = slice(first + head * pitch, first + head * pitch + count)
        part = DenseWeight(weight.values[rows])
        product(x[:, head], part, out[:, head * count : (head + 1) * count])


def glu(x: Tensor, gate_up: DenseWeight, out: Tensor, *, limit: float | None = None) -> None:
    """`swiglu_gemv`."""
    both = torch.empty(x.shape[0], gate_up.n)
    product(x, gate_up, both)
    gate, up = both.chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(torch.nn.functional.silu(gate) * up)


def of_parts(parts: Tensor, weight: DenseWeight, out: Tensor) -> None:
    """`gemm`."""
    product(parts.float().sum(0), weight, out)


def of_group_parts(parts: Tensor, weight: DenseWeight, out: Tensor) -> None:
    """`gemm_by_group`."""
    count = weight.n // parts.shape[1]
    by_head(parts.float().sum(0).transpose(0, 1), weight, out, first=0, count=count, pitch=count)


@pytest.fixture(scope="module", autouse=True)
def quick_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, products, step, streams):
            patch.setattr(module, "gemv", product)
        patch.setattr(products, "head_gemv", by_head)
        patch.setattr(products, "gemm_by_group", of_group_parts)
        patch.setattr(blocks, "swiglu_gemv", glu)
        for module in (products, stream_chunk):
            patch.setattr(module, "gemm", of_parts)
        yield


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    save_v4(random_v4(SMALL, 0.25), SMALL, folder / "source")
    return pack_source(folder / "source", folder / "pack")


def reserved(core: CudaCore) -> KvSequence:
    sequence = core.kv.reserve(len(IDS) + 8)
    assert sequence is not None
    return sequence


@pytest.fixture(scope="module")
def want(pack: Path) -> Tensor:
    with loaded(pack, **OPTIONS) as cpu:
        return logits_of(cpu, IDS, plane=Plane.FINE, sizes=[1] * len(IDS))


@pytest.mark.slow
def test_prompt__in_one_chunk_then_a_step__near_the_cpu_engine(pack: Path, want: Tensor) -> None:
    with on_device(pack, max_running=1, prefill_chunk=N_PROMPT) as core:
        sequence = reserved(core)
        assert core.kv.reserve(1) is None  # states of one
        prompt = read(core, IDS[:N_PROMPT], sequence, Reading.EXACT)
        rows = [StepRow(token, sequence, i) for i, token in enumerate(IDS[N_PROMPT:])]
        steps = core.model.run(rows, Plane.FINE).clone()
        sequence.length -= 1  # from where the step began
        with pytest.raises(ValueError, match="no state was kept behind"):
            core.model.run([StepRow(9, sequence)], Plane.FINE)
    found = torch.cat([prompt[None], steps])
    assert (found - want[N_PROMPT - 1 :]).abs().max() < 1e-3 * want.std()


@pytest.mark.long
@pytest.mark.slow
def test_steps__with_guesses_undone__near_the_cpu_engine(pack: Path, want: Tensor) -> None:
    """Steps of several rows, of which wrong ones are written over, through all windows."""
    near, found = 1e-3 * want.std(), []
    with on_device(pack, max_running=2) as core:
        sequence, other = reserved(core), reserved(core)
        while sequence.length < len(IDS):
            at = sequence.length
            n_right = min(1 + at % 4, len(IDS) - at)
            tokens = [*IDS[at : at + n_right], 9, 9][:4]
            rows = [StepRow(token, sequence, i) for i, token in enumerate(tokens)]
            found.append(core.model.run(rows, Plane.FINE)[:n_right].clone())
            sequence.length += n_right
        assert (torch.cat(found) - want).abs().max() < near
        first = core.model.run([StepRow(IDS[0], other)], Plane.FINE)[0]
        assert torch.equal(first, found[0][0])


@pytest.mark.long
@pytest.mark.slow
def test_steps__drive_too_slow_for_one_wait__done_again_same_bits(tmp_path: Path) -> None:
    config = {**SMALL, "n_routed_experts": 32}
    save_v4(random_v4(config, 0.25), config, tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    check_steps_done_again(pack, IDS[:5])  # through a window of 4


@pytest.mark.long
@pytest.mark.slow
def test_prompt__kept_and_put_in_elsewhere__same_bits(pack: Path, want: Tensor) -> None:
    near = 1e-3 * want.std()
    with on_device(pack, max_running=2) as core:  # chunks of 8
        sequence, other = reserved(core), reserved(core)
        prompt = read(core, IDS[:N_PROMPT], sequence, Reading.EXACT)
        assert (prompt - want[N_PROMPT - 1]).abs().max() < near
        sequence.length -= 1  # as a balanced answer does
        again = core.model.run([StepRow(IDS[N_PROMPT - 1], sequence)], Plane.FINE)[0].clone()
        assert (again - want[N_PROMPT - 1]).abs().max() < near
        sequence.length += 1
        kept = core.kv.take_out(sequence, 0, N_PROMPT)
        rows = [StepRow(token, sequence, i) for i, token in enumerate(IDS[N_PROMPT:])]
        together = core.model.run([*rows, StepRow(9, other)], Plane.FINE).clone()
        assert (together[:N_STEP] - want[N_PROMPT:]).abs().max() < near
        core.kv.put_in(other, 0, kept)  # in another slot, on other pages
        other.length = N_PROMPT
        assert (core.kv.take_out(other, 0, N_PROMPT) == kept).all()
        rows = [StepRow(token, other, i) for i, token in enumerate(IDS[N_PROMPT:])]
        assert torch.equal(core.model.run(rows, Plane.FINE), together[:N_STEP])


@pytest.mark.long
@pytest.mark.slow
def test_head__prompt_in_chunks_and_a_step__near_the_cpu_engine(tmp_path: Path) -> None:
    pack = with_head(0.25, tmp_path, SMALL)[2]
    ids = torch.tensor(IDS[:11])
    with loaded(pack, **OPTIONS, drafts="mtp") as cpu, torch.inference_mode():
        drafter = cpu.decoder.drafting.mtp
        assert drafter is not None
        assert isinstance(drafter.head, CpuHead)
        kv, own = cpu.kv.reserve(32), cpu.kv.reserve(32)
        assert kv is not None
        assert own is not None
        many = cpu.prefiller._experts[Plane.FINE]
        hidden = cpu.model.forward(ids[:-1], cpu.kv, kv, many)
        states = drafter.head.head.forward(ids[1:], hidden, cpu.kv, own, many)[-1:]
        logits = drafter.head.head.logits(states)[0]
    with on_device(pack, drafts="mtp", max_running=1) as core:
        request: Any = Greedy(core, Plane.FINE)
        request.prompt_ids = IDS[:10]  # the head reads the last token in a step of its own
        while not request.out_ids:
            core.prefiller.step(request)
            assert not request.errors
        state = state_of(request)
        assert (state.sequence.length, state.waiting) == (9, 1)
        head = core.decoder.drafting.mtp.head
        assert isinstance(head, DeviceHead)
        guess, found = head.read(IDS[10:11], state.pending[0], state.sequence, Plane.FINE)
        got = core.model.buffers.logits[0]
        assert (got - logits).abs().max() < 2e-3 * logits.std()
        assert (found[0] - states[0]).abs().max() < 2e-3 * states.std()
        assert guess == int(got.argmax())
        assert state.sequence.length == 10
