"""What the planner is told of a model: the same numbers that the engine then allocates."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.chunk_sizes import SCALE_BLOCK, chunk_bytes
from moet_desk.engine.cuda.shapes import SHAPES
from moet_desk.kernels.triton import dense


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize(("rows", "context"), [(256, 300), (2048, 8192), (8192, 131_072)])
def test_chunk_bytes__as_many_as_the_buffers_have(name: str, rows: int, context: int) -> None:
    spec = SHAPES[name](context).spec
    made = ChunkBuffers.make(spec, rows, context=context, device=torch.device("meta"))
    assert chunk_bytes(spec, rows, context=context) == made.n_bytes()


def test_scale_block__the_kernels_own() -> None:
    assert SCALE_BLOCK == dense.SCALE_BLOCK


def test_import__without_torch() -> None:
    code = "import moet_desk.engine.model_shape, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
