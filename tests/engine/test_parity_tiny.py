"""Tiny random DeepSeek-V3 models against transformers: full, chunked, token by token, rewound.

Init 0.02 shows a wrong epsilon, 0.25 shows wrong rope, groups or bias use. The packer makes FP4
rows of the experts; transformers then runs on the values of those rows, so only arithmetic can
differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moet_desk.engine.families import plan_for
from moet_desk.kernels.reference import expand_fine
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "max_position_embeddings": 512,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
}  # fmt: skip
KIMI_YARN = {
    **YARN, "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "v3_groups_yarn": {**TINY, "rope_parameters": YARN},
    "v3_no_query_latent": {**TINY, "rope_parameters": YARN, "q_lora_rank": None, "topk_group": 1},
    "kimi_k2": {
        **TINY, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "rope_parameters": KIMI_YARN,
    },
    "plain_rope": {
        **TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "norm_topk_prob": False, "n_shared_experts": 2,
    },
}  # fmt: skip
LENGTH = 40


def use_packed_experts(model: Any, pack: Path) -> None:
    """Give the transformers model the expert weights that the pack holds."""
    reader = PackReader.open(pack)
    meta, layout = reader.meta, reader.layout
    base, fine = bytearray(meta.base_stride), bytearray(meta.fine_stride)
    slot = torch.empty(layout.slot_floats)
    split = layout.gate_up.n * layout.gate_up.k
    state = model.state_dict()
    for row in range(meta.n_rows):
        reader.read_row(Plane.BASE, row, memoryview(base))
        reader.read_row(Plane.FINE, row, memoryview(fine))
        buffers = [torch.frombuffer(part, dtype=torch.uint8) for part in (base, fine)]
        expand_fine(*buffers, layout, slot)
        layer, expert = divmod(row, meta.n_experts)
        experts = f"model.layers.{meta.moe_layers[layer]}.mlp.experts."
        gate_up, down = state[experts + "gate_up_proj"], state[experts + "down_proj"]
        # a slot holds both matrices transposed
        gate_up[expert].copy_(slot[:split].view(gate_up[expert].T.shape).T)
        down[expert].copy_(slot[split:].view(down[expert].T.shape).T)
    reader.close()


def random_model(kwargs: dict[str, Any], init: float) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(**kwargs, initializer_range=init)
    model = DeepseekV3ForCausalLM(config).eval().float()
    spread = torch.Generator().manual_seed(1)
    with torch.no_grad():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        for name, value in tensors:
            if "norm" in name or "bias" in name:  # constants would hide a norm that is left out
                value.add_(torch.randn(value.shape, generator=spread) * 0.1)
    return model


def save_source(model: Any, folder: Path) -> None:
    """The model under released names: one tensor per expert and projection."""
    folder.mkdir(parents=True)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                state[f"{prefix}{expert}.gate_proj.weight"] = gate.contiguous()
                state[f"{prefix}{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, matrix in enumerate(value):
                state[f"{prefix}{expert}.down_proj.weight"] = matrix.contiguous()
        else:
            state[name] = value.contiguous()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


@pytest.fixture(scope="module", params=[0.02, 0.25], ids=["cold", "hot"])
def init(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(
    request: pytest.FixtureRequest, init: float, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], Tensor]:
    """A packed model, token ids, and transformers' logits for them."""
    model = random_model(CONFIGS[request.param], init)
    folder = tmp_path_factory.mktemp("tiny")
    save_source(model, folder / "source")
    ids = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
    pack = pack_source(folder / "source", folder / "pack")
    with torch.no_grad():
        use_packed_experts(model, pack)
        want = model(ids[None]).logits[0]
    return pack, ids.tolist(), want


SPLITS = {
    "full": [LENGTH],
    "odd chunks": [7, 13, 1, 11, 8],
    "prefill then decode": [33] + [1] * 7,
    "token by token": [1] * LENGTH,
}


@pytest.mark.parametrize("split", list(SPLITS))
def test_logits__float_path__equal_transformers(
    case: tuple[Path, list[int], Tensor], split: str
) -> None:
    pack, ids, want = case
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids, plane=Plane.FINE, sizes=SPLITS[split])
    assert (got - want).abs().max() < 1e-4 * want.std()


def test_rewind__after_undone_tokens__logits_as_if_they_never_were(
    case: tuple[Path, list[int], Tensor],
) -> None:
    pack, ids, want = case
    with loaded(pack, activations="float", kv_format="f32") as core, torch.inference_mode():
        sequence = core.kv.reserve(LENGTH + 8)
        assert sequence is not None
        experts = core.prefiller._experts[Plane.FINE]
        core.model.forward(torch.tensor(ids[:20]), core.kv, sequence, experts)
        core.model.forward(torch.tensor([9, 8, 7, 6, 5]), core.kv, sequence, experts)
        core.kv.rewind(sequence, 20)
        hidden = core.model.forward(torch.tensor(ids[20:]), core.kv, sequence, experts)
        got = core.model.logits(hidden)
    assert (got - want[20:]).abs().max() < 1e-4 * want.std()


def test_logits__two_bit_plane__differ_from_fp4(case: tuple[Path, list[int], Tensor]) -> None:
    """The planes are really two: otherwise the comparison above could pass for the wrong one."""
    pack, ids, want = case
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids, plane=Plane.BASE)
    assert (got - want).abs().max() > 1e-2 * want.std()


def test_plan__names_of_saved_model__all_known(case: tuple[Path, list[int], Tensor]) -> None:
    pack, _, _ = case
    config = json.loads((pack / "config.json").read_text())
    plan = plan_for(config, path="config.json", names=[])
    assert plan.moe_layers == (1, 2)
    assert plan.n_rows == 32
