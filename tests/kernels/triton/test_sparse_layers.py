"""Sparse attention and rounded dense weights on a device's launches, interpreted, against the CPU
engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda import chunk_sizes
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import CONFIGS, random_model, save_source
from tests.kernels.triton.test_chunk import OPTIONS, on_device, read

N_PROMPT, N_STEP = 21, 3
SMALL = {
    **CONFIGS["glm_dsa"], "num_hidden_layers": 3, "index_skip_topk_offset": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
"""8 tokens are chosen of up to 24; the layer between two others has no indexer."""
SIZES = [5, 17, 1, 24, 20]
"""Chunks of a prompt that fills a page and begins another; blocks are of 16 rows."""


@pytest.mark.slow
def test_engine__prompt_in_chunks_then_a_step__near_the_cpu_engine(tmp_path: Path) -> None:
    save_source(random_model(SMALL, 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = torch.randint(
        3, 256, (N_PROMPT + N_STEP,), generator=torch.Generator().manual_seed(3)
    ).tolist()  # fmt: skip
    with loaded(pack, **OPTIONS, dense_format="int8") as cpu:
        sizes = [N_PROMPT] + [1] * N_STEP
        want = logits_of(cpu, ids, plane=Plane.FINE, sizes=sizes)[N_PROMPT - 1 :]
    with on_device(
        pack, dense_format="int8"
    ) as core:  # chunks of 8: the first one sees all, the others do not
        kinds = {layer.attention.w_out.kind.value for layer in core.model.layers}
        assert kinds == {"int8"}
        sequence, other = core.kv.reserve(len(ids)), core.kv.reserve(len(ids))
        assert sequence is not None
        assert other is not None
        prompt = read(core, ids[:N_PROMPT], sequence, Reading.EXACT)
        rows = [StepRow(token, sequence, i) for i, token in enumerate(ids[N_PROMPT:])]
        together = core.model.run(rows, Plane.FINE).clone()
        assert (prompt - want[0]).abs().max() < 1e-3 * want.std()
        assert (together - want[1:]).abs().max() < 1e-3 * want.std()
        # beside a row of a sequence that sees only itself, and after being undone
        mixed = core.model.run([StepRow(9, other), rows[0]], Plane.FINE)
        assert torch.equal(mixed[1], together[0])


@pytest.mark.long
@pytest.mark.slow
def test_engine__prompt_in_odd_chunks__every_row_near_the_cpu_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sizes, "BLOCK_ROWS", 16)
    save_source(random_model(SMALL, 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = torch.randint(3, 256, (sum(SIZES),), generator=torch.Generator().manual_seed(5)).tolist()
    options = {**OPTIONS, "context": 128}
    with loaded(pack, **options) as cpu:
        want = logits_of(cpu, ids, plane=Plane.FINE)
    with on_device(pack, context=128, prefill_chunk=24) as core:
        taken, sequence = core.kv.reserve(64), core.kv.reserve(len(ids))
        assert taken is not None
        assert sequence is not None
        assert len(sequence.pages) == 2
        assert 0 not in sequence.pages
        model, found = core.prefiller._model, []
        for size in SIZES:
            start = sequence.length
            chunk = model.begin(ids[start : start + size], sequence, Reading.EXACT)
            while chunk.next_layer < model.n_layers:
                model.layer(chunk)
            while len(found) < start + size:
                found += [*model.scores(chunk, len(found) - start).clone()]
            sequence.length += size
        assert (torch.stack(found) - want).abs().max() < 1e-3 * want.std()
