"""Models with residual streams and pooled attention on a device's launches, interpreted, against
the CPU engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.cuda.step import StepRow
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_v4 import CONFIG, random_v4, save_v4
from tests.kernels.triton.test_chunk import OPTIONS, on_device

SMALL: dict[str, Any] = {
    **CONFIG, "num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 16],
    "hidden_size": 32, "vocab_size": 64, "head_dim": 128, "qk_rope_head_dim": 64,
    "num_attention_heads": 2, "index_head_dim": 64, "index_n_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 1, "hc_sinkhorn_iters": 3, "index_topk": 2, "hc_mult": 2,
}  # fmt: skip
"""All kinds of layers, with heads that kernels take."""

N_PROMPT, N_STEP = 21, 3
IDS = torch.randint(
    3, 64, (N_PROMPT + N_STEP,), generator=torch.Generator().manual_seed(3)
).tolist()  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    save_v4(random_v4(SMALL, 0.25), SMALL, folder / "source")
    return pack_source(folder / "source", folder / "pack")


def test_steps__token_by_token__near_the_cpu_engine(pack: Path) -> None:
    with loaded(pack, **OPTIONS) as cpu:
        want = logits_of(cpu, IDS, plane=Plane.FINE, sizes=[1] * len(IDS))
    with on_device(pack) as core:
        sequence = core.kv.reserve(len(IDS))
        assert sequence is not None
        found = []
        for token in IDS:
            found.append(core.model.run([StepRow(token, sequence)], Plane.FINE)[0].clone())
            sequence.length += 1
    got = torch.stack(found)
    print((got - want).abs().amax(1) / want.std())
    assert (got - want).abs().max() < 1e-3 * want.std()
