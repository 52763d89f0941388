"""Ways to run the engine's parts without its thread, and transformers beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moet_desk.engine.blocks.expert_math import ExpertMath, load_form
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.draft import CpuHead, MtpDrafter
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.loader import Core, load, model_of
from moet_desk.engine.model_shape import index_layers
from moet_desk.engine.prefill import PrefillExperts
from moet_desk.engine.spec import Gdn, Spec
from moet_desk.kernels.kinds import KvFormat
from moet_desk.store.pack_format import Plane
from moet_desk.store.quant_formats import decode
from moet_desk.store.sources import TensorIndex


@contextmanager
def loaded(pack: Path, **options: Any) -> Iterator[Core]:
    core = load(pack, EngineOptions(save_heat=False, **options))
    try:
        yield core
    finally:
        core.close()


@torch.inference_mode()
def logits_of(
    core: Core, ids: list[int], *, plane: Plane, sizes: list[int] | None = None
) -> Tensor:
    """Logits after every token, [T, V]. `sizes` are the tokens per forward; 1 is a decode row."""
    sequence = core.kv.reserve(len(ids))
    assert isinstance(sequence, KvSequence)
    sizes = sizes or [len(ids)]
    assert sum(sizes) == len(ids)
    outputs = []
    for size in sizes:
        part = torch.tensor(ids[sequence.length : sequence.length + size])
        runner = core.decoder if size == 1 else core.prefiller
        hidden = core.model.forward(part, core.kv, sequence, runner._experts[plane])
        outputs.append(core.model.logits(hidden))
    core.kv.release(sequence)
    return torch.cat(outputs)


Change = Callable[[str, Tensor], Tensor]


@torch.inference_mode()
def logits_with(
    core: Core, spec: Spec, ids: list[int], *, change: Change = lambda name, value: value
) -> Tensor:
    """Logits of the core's experts and dense weights under another spec, with some of the weights
    changed as they are read.
    """

    def load(name: str) -> Tensor:
        return change(name, core.reader.dense_tensor(name))

    model = model_of(spec, Weights(load), context=64)
    kv = KvCache(
        spec.attention, n_layers=spec.n_kv_layers, n_pages=1, page_tokens=64, form=KvFormat.F32,
        recurrent=spec.recurrent, index_layers=index_layers(spec, with_head=False),
    )  # fmt: skip
    sequence = kv.reserve(len(ids))
    assert sequence is not None
    math = ExpertMath(core.reader.layout, None, load_form(spec, load))
    chunk = PrefillExperts(core.residency, math, Plane.FINE)
    return model.logits(model.forward(torch.tensor(ids), kv, sequence, chunk))


def plus_one(name: str, value: Tensor) -> Tensor:
    """Norms as if they were stored without the 1 they are added to."""
    return value + 1.0 if "norm" in name else value


HEAD_OPTIONS: dict[str, Any] = {"activations": "float", "kv_format": "f32", "drafts": "mtp"}


@torch.inference_mode()
def head_logits(core: Core, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of the MTP head behind each token but the last, [T - 1, V]; `sizes` are the tokens
    that it reads together.
    """
    drafter = core.decoder.drafting.mtp
    assert isinstance(drafter, MtpDrafter)
    assert isinstance(drafter.head, CpuHead)
    sequence, own = core.kv.reserve(len(ids)), core.kv.reserve(len(ids))
    assert sequence is not None
    assert own is not None
    many = core.prefiller._experts[Plane.FINE]
    hidden = core.model.forward(ids, core.kv, sequence, many)
    found, at = [], 0
    for size in sizes:
        experts = drafter.head._one[Plane.FINE] if size == 1 else many
        here = slice(at, at + size)
        states = drafter.head.head.forward(ids[1:][here], hidden[:-1][here], core.kv, own, experts)
        assert own.choice is None  # nothing of a read stays behind
        found.append(core.model.logits(states))
        at += size
    return torch.cat(found)


def allowed(core: Core, want: Tensor) -> float:
    """Most difference of logits from transformers'. Of DeltaNet its own ways of computing differ by
    3e-4 of the spread.
    """
    has_delta = any(isinstance(mixer, Gdn) for mixer in core.spec.recurrent)
    return (1e-3 if has_delta else 1e-4) * float(want.std())


def transformers_model(source: Path, *, two_bit: bool = False) -> Any:
    """DeepseekV3ForCausalLM on the source's dequantised weights, float32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**config, "torch_dtype": "float32"}))
    index = TensorIndex.open(source)
    state = model.state_dict()
    values: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name in index.names():
        value = decode(index, name)
        if ".mlp.experts." in name:
            layer, rest = name.split(".mlp.experts.")
            expert, role = rest.split(".")
            experts.setdefault(f"{layer}.mlp.experts|{role}", {})[int(expert)] = value
        else:
            values[name] = value
    for key, by_expert in experts.items():
        values[key] = torch.stack([by_expert[i] for i in range(len(by_expert))])
    for key in state:
        state[key] = _value_for(key, values)
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


def _value_for(key: str, values: dict[str, Tensor]) -> Tensor:
    plain = key.removesuffix(".weight")
    if plain == "lm_head" and plain not in values:
        plain = "model.embed_tokens"
    if plain in values:
        return values[plain]
    prefix = key.removesuffix(".gate_up_proj").removesuffix(".down_proj")
    if key.endswith("experts.gate_up_proj"):
        return torch.cat([values[f"{prefix}|gate_proj"], values[f"{prefix}|up_proj"]], 1)
    return values[f"{prefix}|down_proj"]
