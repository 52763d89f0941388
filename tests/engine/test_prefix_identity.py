"""Kept prompts of an engine are not another's whose sequences keep something else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.prefix_cache import Prefix
from moet_desk.engine.serving import Serving
from tests.engine.test_v4_head import with_head
from tests.kernels.triton.test_stream_layers import SMALL


def test_identity__head_with_a_state_but_no_layer_of_entries__another_one(tmp_path: Path) -> None:
    """DeepSeek-V4's on a card: a chunk has its state too, and no layer of the KV cache says so."""
    pack = with_head(0.25, tmp_path, SMALL)[2]
    keys, n_layers, sizes = [], [], []
    for drafts in ("off", "mtp"):
        options = EngineOptions(
            save_heat=False, context=64, ram_bytes=10**9, vram_bytes=10**9, drafts=drafts,
            kv_format="f32", prefill_chunk=8,
        )  # fmt: skip
        core = load_cuda(pack, options, device=torch.device("cpu"))
        sequence = core.kv.reserve(16)
        assert sequence is not None
        n_layers.append(core.kv.n_layers)
        sequence.base = 8
        sizes.append(core.kv.take_out(sequence, 0, 8).nbytes)
        engine: Any = SimpleNamespace(core=core, _options=options, _saved_prefixes=None)
        cache = Serving._prefix_cache(engine)
        keys.append(list(cache._keys(Prefix(range(9), "base"))))
        core.close()
    assert n_layers[0] == n_layers[1]
    assert sizes[0] < sizes[1]
    assert len(keys[0]) == 1
    assert keys[0] != keys[1]
