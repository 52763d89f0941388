"""Tiny random sources in every layout the packer reads, and plans for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import PackPlan

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Tiny:
    """Sizes of a tiny model; layer 0 is dense."""

    hidden: int = 64
    inter: int = 32
    n_experts: int = 4
    layers: tuple[int, ...] = (1, 2)

    def expert(self, layer: int, expert: int, part: str) -> str:
        return f"model.layers.{layer}.mlp.experts.{expert}.{part}"

    def shape(self, part: str) -> tuple[int, int]:
        wide = (self.inter, self.hidden)
        return wide[::-1] if part == "down_proj" else wide

    def names(self) -> list[tuple[str, tuple[int, int]]]:
        return [
            (self.expert(layer, expert, part), self.shape(part))
            for layer in self.layers
            for expert in range(self.n_experts)
            for part in PARTS
        ]


def write_source(
    folder: Path,
    tiny: Tiny,
    kind: str = "mxfp4",
    *,
    seed: int = 0,
    shards: int = 1,
    by_layer: bool = False,
) -> dict[str, torch.Tensor]:
    """Write a source whose experts are stored as `kind`; returns the stored tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(_dense(tiny, generator))
    for name, shape in tiny.names():
        tensors |= store(name, shape, kind, generator)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, tensors, shards=shards, by_layer=by_layer)
    config: dict[str, Any] = {"model_type": "tiny", "kind": kind}
    if kind in SCALED_KINDS:
        config["quantization_config"] = quantization_config(kind)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return tensors


def expert_shapes(plan: PackPlan) -> dict[str, tuple[int, int]]:
    """Of all matrices of experts, by logical name, in the order of layers and experts."""
    wide, narrow = (plan.inter, plan.hidden), (plan.hidden, plan.inter)
    return {
        part.format(layer=layer, expert=expert): shape
        for layer in plan.moe_layers
        for expert in range(plan.n_experts)
        for part, shape in ((plan.gate, wide), (plan.up, wide), (plan.down, narrow))
    }


def write_weights(
    folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1, by_layer: bool = False
) -> None:
    """Write tensors dealt out over shards, or cut one after the other as released models are."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    place = (lambda i: i * shards // len(names)) if by_layer else (lambda i: i % shards)
    shard_of = {name: f"model-{place(i) + 1:05d}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(shard_of.values())):
        part = {name: tensors[name] for name in names if shard_of[name] == shard}
        save_file(part, folder / shard)
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _dense(tiny: Tiny, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden = tiny.hidden
    dense = {
        "model.embed_tokens.weight": torch.randn(16, hidden, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(tiny.n_experts),
        "lm_head.weight": torch.randn(16, hidden, generator=generator).half(),
    }
    return dense | store("model.layers.0.mlp.up_proj", (96, hidden), "fp8", generator)


def store(
    name: str, shape: tuple[int, int], kind: str, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Random weights of one matrix in one layout, as they lie in a file."""
    rows, columns = shape
    if kind in ("bf16", "f16", "f32", "f64"):
        dtype = {"bf16": torch.bfloat16, "f16": torch.half, "f32": torch.float}.get(kind)
        values = torch.randn(shape, generator=generator) * 0.05
        return {f"{name}.weight": values.to(dtype or torch.float64)}
    if kind in ("fp8", "fp8-e8m0", "fp8-scale"):
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        blocks = (-(-rows // 128), -(-columns // 128))
        if kind == "fp8-e8m0":
            bytes_ = torch.randint(115, 125, blocks, generator=generator, dtype=torch.uint8)
            return {f"{name}.weight": weight, f"{name}.scale": e8m0(bytes_)}
        scale = torch.rand(blocks, generator=generator) * 0.1
        suffix = "weight_scale" if kind == "fp8-scale" else "weight_scale_inv"
        return {f"{name}.weight": weight, f"{name}.{suffix}": scale}
    if kind in SCALED_KINDS:
        return _store_scaled(name, shape, kind, generator)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale_shape = (rows, columns // 32)
    scales = torch.randint(110, 130, scale_shape, generator=generator, dtype=torch.uint8)
    if kind == "mxfp4":
        return {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales}
    if kind == "mxfp4-v4":
        return {f"{name}.weight": codes.view(torch.int8), f"{name}.scale": e8m0(scales)}
    raise ValueError(kind)


SCALED_KINDS = (
    "fp8-rows", "fp8-rows-flat", "fp8-tensor", "nvfp4", "nvfp4-ct", "int4-32", "int4-128",
    "int4-rows", "int8-32", "int8-rows", "int8-plain",
)  # fmt: skip
"""Codes with a grid of scales, beside blocks of FP8."""


def _store_scaled(
    name: str, shape: tuple[int, int], kind: str, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    rows, columns = shape

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator) * 0.1 + 0.01

    def whole(low: int, high: int, dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.int64).to(dtype)

    if kind.startswith("fp8"):
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        sizes = {"fp8-rows": (rows, 1), "fp8-rows-flat": (rows,), "fp8-tensor": (1,)}
        parts = {"weight": weight, "weight_scale": scales(*sizes[kind])}
        parts["input_scale"] = torch.tensor(3.0)  # of activations, left out
    elif kind.startswith("nvfp4"):
        parts = {
            "weight_packed": whole(0, 256, torch.uint8, rows, columns // 2),
            "weight_scale": (scales(rows, columns // 16) * 100).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([75.0]),
            "input_global_scale": torch.tensor([3.0]),
        }
        if kind == "nvfp4":
            names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
            parts = dict(zip(names, parts.values(), strict=True))
            parts["weight_scale_2"] = torch.tensor(0.0123)
            parts["input_scale"] = torch.tensor(3.0)
    elif kind == "int8-plain":
        parts = {"weight": whole(-128, 128, torch.int8, *shape), "weight_scale": scales(rows, 1)}
    else:
        bits, size = int(kind[3]), kind.partition("-")[2]
        groups = 1 if size == "rows" else columns // int(size)
        parts = {
            "weight_packed": whole(-(1 << 31), 1 << 31, torch.int32, rows, columns * bits // 32),
            "weight_scale": scales(rows, groups).bfloat16(),
            "weight_shape": torch.tensor(shape),
        }
    return {f"{name}.{part}": value for part, value in parts.items()}


def scaled_values(tensors: dict[str, torch.Tensor], name: str, kind: str) -> np.ndarray:
    """What `_store_scaled` stands for by the formats' definitions, one weight at a time."""
    parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items()}
    weight = parts["weight_packed" if "weight_packed" in parts else "weight"]
    raw = weight.contiguous().view(torch.uint8).numpy()  # little-endian bytes
    scale = parts["weight_scale"].double().numpy()
    scale = scale.reshape(scale.shape[0], -1)
    bits = {"fp8": 8, "nvf": 4}.get(kind[:3]) or int(kind[3])
    columns = raw.shape[1] * 8 // bits
    out = np.zeros((raw.shape[0], columns))
    for o, k in np.ndindex(*out.shape):
        code = int(raw[o, k * bits // 8]) >> (k * bits % 8) & ((1 << bits) - 1)
        if kind.startswith("fp8"):
            value = e4m3(code)
        elif kind.startswith("nvfp4"):
            value = E2M1[code]
        elif kind == "int8-plain":
            value = code - 256 * (code > 127)
        else:
            value = code - (1 << (bits - 1))
        of_row = scale[o if len(scale) > 1 else 0]
        out[o, k] = value * of_row[k * len(of_row) // columns]
    if kind == "nvfp4":
        out *= float(parts["weight_scale_2"])
    elif kind == "nvfp4-ct":
        out /= float(parts["weight_global_scale"])
    return out


def e4m3(byte: int) -> float:
    """One e4m3fn number from its bits."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    small = exponent == 0
    value = (mantissa / 8 + (not small)) * 2.0 ** ((1 if small else exponent) - 7)
    return -value if sign else value


def quantization_config(kind: str) -> dict[str, Any]:
    """What config.json says of weights stored as `kind`."""
    if kind == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    if kind == "nvfp4-ct":
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    elif kind.startswith("int"):
        size = kind.partition("-")[2]
        weights |= {"num_bits": int(kind[3]), "type": "int", "strategy": "channel"}
        if size.isdecimal():
            weights |= {"strategy": "group", "group_size": int(size)}
    else:
        weights["strategy"] = "tensor" if kind == "fp8-tensor" else "channel"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }  # fmt: skip


def e8m0(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float8_e8m0fnu)


def plan_of(tiny: Tiny, folder: Path) -> PackPlan:
    """A plan that takes every tensor that is no expert as dense, with the shape it has."""
    index = ModelSource.open(folder).index
    dense = {name: index.info(name).shape for name in index.names() if ".experts." not in name}
    expert = "model.layers.{layer}.mlp.experts.{expert}."
    gate, up, down = (expert + part for part in PARTS)
    return PackPlan(
        model_type="tiny",
        hidden=tiny.hidden,
        inter=tiny.inter,
        n_experts=tiny.n_experts,
        moe_layers=tiny.layers,
        gate=gate,
        up=up,
        down=down,
        dense=dense,
    )


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """MXFP4 by its definition, one weight at a time, in float64."""
    rows, half = codes.shape
    out = np.zeros((rows, 2 * half))
    for o in range(rows):
        for k in range(2 * half):
            nibble = (int(codes[o, k // 2]) >> (4 * (k % 2))) & 15
            out[o, k] = E2M1[nibble] * 2.0 ** (int(scales[o, k // 32]) - 127)
    return out


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
