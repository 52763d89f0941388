"""The MTP head of tiny random DeepSeek-V3 and GLM models against transformers' `MtpModel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet_desk.kernels.reference import expand_fine
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import pack_source
from tests.engine.oracle import HEAD_OPTIONS, head_logits, loaded
from tests.engine.tiny_models import (
    CONFIGS,
    GQA_CONFIGS,
    random_model,
    randomize,
    save_source,
    use_packed_experts,
)

LENGTH = 24
LAYER = 3  # the head's, behind the model's last one


def with_head(model: Any) -> Any:
    """transformers' head on a model, all its weights random."""
    from transformers.modeling_layers import MtpModel

    head = MtpModel(model, 1).eval().float()
    randomize(head.layers[0], model.config.initializer_range)
    return head


def save_head(head: Any, folder: Path) -> None:
    """Add the head to a saved source under released names."""
    state = load_file(folder / "model.safetensors")
    for name, value in head.layers[0].state_dict().items():
        short = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        prefix = f"model.layers.{LAYER}."
        if short.endswith("experts.gate_up_proj"):
            for i, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                state[f"{prefix}mlp.experts.{i}.gate_proj.weight"] = gate.contiguous()
                state[f"{prefix}mlp.experts.{i}.up_proj.weight"] = up.contiguous()
        elif short.endswith("experts.down_proj"):
            for i, matrix in enumerate(value):
                state[f"{prefix}mlp.experts.{i}.down_proj.weight"] = matrix.contiguous()
        else:
            state[prefix + short] = value.contiguous()
    save_file(state, folder / "model.safetensors")


def use_packed_head(head: Any, pack: Path) -> None:
    """Give transformers' head the expert weights that the pack holds for it."""
    reader = PackReader.open(pack)
    meta, layout = reader.meta, reader.layout
    assert meta.moe_layers[-1] == LAYER
    experts = head.layers[0].mtp_block.mlp.experts
    slot = torch.empty(layout.slot_floats)
    split = layout.gate_up.n * layout.gate_up.k
    for i in range(meta.n_experts):
        base, fine = bytearray(meta.base_stride), bytearray(meta.fine_stride)
        row = (len(meta.moe_layers) - 1) * meta.n_experts + i
        reader.read_row(Plane.BASE, row, memoryview(base))
        reader.read_row(Plane.FINE, row, memoryview(fine))
        buffers = [torch.frombuffer(part, dtype=torch.uint8) for part in (base, fine)]
        expand_fine(*buffers, layout, slot)
        gate_up, down = experts.gate_up_proj.data[i], experts.down_proj.data[i]
        gate_up.copy_(slot[:split].view(gate_up.T.shape).T)
        down.copy_(slot[split:].view(down.T.shape).T)
    reader.close()


MODELS = {**CONFIGS, **GQA_CONFIGS}


def packed_with_head(
    init: float, folder: Path, name: str = "v3_groups_yarn"
) -> tuple[Any, Any, Path]:
    """transformers' model and head, and the pack of both."""
    model = random_model({**MODELS[name], "num_mtp_layers": 1}, init)
    head = with_head(model)
    save_source(model, folder / "source")
    save_head(head, folder / "source")
    return model, head, pack_source(folder / "source", folder / "pack")


@pytest.fixture(
    scope="module",
    params=[(init, name) for name in ("v3_groups_yarn", "glm") for init in (0.02, 0.25)],
    ids=lambda param: f"{param[1]}-{param[0]}",
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor, Tensor]:
    """A pack with a head, token ids, and the head's logits for them but the first."""
    model, head, pack = packed_with_head(
        request.param[0], tmp_path_factory.mktemp("mtp"), request.param[1]
    )
    ids = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        use_packed_experts_of_model(model, pack)
        use_packed_head(head, pack)
        hidden = model.model(ids[None], use_cache=False).last_hidden_state[:, :-1]
        positions = torch.arange(1, LENGTH)[None]
        states = head.forward_layer(0, hidden, positions, None, input_ids=ids[None, 1:])
        want = model.lm_head(states)[0]
    return pack, ids, want


def use_packed_experts_of_model(model: Any, pack: Path) -> None:
    """As `use_packed_experts`, which knows no head: its rows come last and are left out."""
    state = model.state_dict()
    name = f"model.layers.{LAYER}.mlp.experts."
    extra = {
        name + part: torch.empty_like(state[f"model.layers.{LAYER - 1}.mlp.experts.{part}"])
        for part in ("gate_up_proj", "down_proj")
    }

    class View:
        @staticmethod
        def state_dict() -> dict[str, Tensor]:
            return {**state, **extra}

    use_packed_experts(View(), pack)


@pytest.mark.parametrize("sizes", [[LENGTH - 1], [9, 1, 13], [1] * (LENGTH - 1)])
def test_head__chunks_and_single_tokens__equal_transformers(
    case: tuple[Path, Tensor, Tensor], sizes: list[int]
) -> None:
    pack, ids, want = case
    with loaded(pack, **HEAD_OPTIONS) as core:
        got = head_logits(core, ids, sizes)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-4 * want.std()
