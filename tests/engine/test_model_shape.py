"""What the planner is told of a model: the same numbers that the engine then allocates."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.chunk_sizes import SCALE_BLOCK, chunk_bytes
from moet_desk.engine.cuda.shapes import SHAPES
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.model_shape import (
    RowSizes,
    device_shape,
    kv_token_bytes,
    loads_head,
    running_layers,
    slot_bytes,
    wishes_of,
)
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.row_sizes import ExpertLayout
from moet_desk.kernels.triton import dense_weight


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize(("rows", "context"), [(256, 300), (2048, 8192), (8192, 131_072)])
def test_chunk_bytes__as_many_as_the_buffers_have(name: str, rows: int, context: int) -> None:
    spec = SHAPES[name](context).spec
    made = ChunkBuffers.make(spec, rows, context=context, device=torch.device("meta"))
    assert chunk_bytes(spec, rows, context=context) == made.n_bytes()


def test_scale_block__the_kernels_own() -> None:
    assert SCALE_BLOCK == dense_weight.SCALE_BLOCK


def test_import__without_torch() -> None:
    code = "import moet_desk.engine.model_shape, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("drafts", "device", "loaded"),
    [("auto", True, 1), ("auto", False, 0), ("off", True, 0), ("mtp", False, 1)],
)
def test_shapes__mtp_head__counts_where_it_is_loaded(
    drafts: str, device: bool, loaded: int
) -> None:
    """Its experts and its KV, in plans on paper as in the loaders."""
    shape = SHAPES["deepseek-v4-flash"](8192).with_head()
    spec, options = shape.spec, EngineOptions(drafts=drafts)
    with_head = loads_head(spec, options, on_card=device)
    sizes = RowSizes.of(ExpertLayout(spec.hidden, spec.moe_ffn.inter))
    found = device_shape(
        spec, sizes, KvFormat.NVFP4, wishes_of(options), dense_bytes=1, with_head=with_head
    )
    assert found.n_rows == (43 + loaded) * 256
    each = spec.layers[0].mixer.slot_bytes(KvFormat.NVFP4)  # a window, as the head's
    assert found.state_bytes == slot_bytes(spec, KvFormat.NVFP4) + loaded * each
    glm = SHAPES["glm-5.2"](8192).with_head().spec
    found = device_shape(
        glm, sizes, KvFormat.NVFP4, wishes_of(options), dense_bytes=1, with_head=with_head
    )
    token = kv_token_bytes(glm, KvFormat.NVFP4)
    assert (found.kv_token_bytes > token) == bool(loaded)
    assert len(running_layers(spec, with_head=with_head)) == 43 + loaded
