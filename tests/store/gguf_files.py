"""Tiny models written as GGUF files, the way converters write them.

Names come from the package gguf, so a wrong name in ours cannot hide here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

from moet_desk.engine.families import plan_for
from tests.store.tiny import expert_shapes

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj)\.weight")


def random_tensors(config: Mapping[str, Any], *, mtp: bool = False) -> dict[str, torch.Tensor]:
    """Random BF16 weights of a model, by the names of its safetensors files."""
    layer = config["num_hidden_layers"]
    names = [f"model.layers.{layer}.enorm"] if mtp else []
    plan = plan_for(config, path="config.json", names=names)
    shapes = {**plan.dense, **expert_shapes(plan)}
    generator = torch.Generator().manual_seed(0)
    return {
        name if name.endswith("bias") else f"{name}.weight": (
            torch.randn(shape, generator=generator) * 0.1
        ).bfloat16()
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    arch: gguf.MODEL_ARCH = gguf.MODEL_ARCH.DEEPSEEK2,
    experts: str = "F32",
    dense: str = "F32",
    split_kv: bool = True,
    parts: int = 1,
    tokenizer: Path | None = None,
    pre: str = "smollm",
    mxfp4: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a model.

    Args:
        path: the file; with several `parts` the writer numbers them.
        tensors: by the names of its safetensors files.
        config: its config.json.
        experts, dense: type of routed experts and of other matrices.
        split_kv: with kv_b_proj in two halves, as newer converters do.
        tokenizer: folder with the tokenizer's files; without, a vocabulary of bytes.
        mxfp4: tensors that are blocks already, uint8, by their names in the file.
    """
    stored = dict(_converted(tensors, config, split_kv=split_kv))
    most = -(-len(stored) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=most)
    _add_config(writer, config, split_kv=split_kv)
    _add_tokenizer(writer, tokenizer, pre)
    # the package lists the head that guesses tokens with other architectures only
    tables = [
        gguf.get_tensor_name_map(which, config["num_hidden_layers"] + 2)
        for which in (arch, gguf.MODEL_ARCH.GLM4_MOE)
    ]
    for name, values in stored.items():
        found = [table.get_name(name, try_suffixes=(".weight", ".bias")) for table in tables]
        mapped = next(new for new in found if new is not None)
        add(writer, mapped, values, kind_of(mapped, values, experts=experts, dense=dense))
    for name, blocks in (mxfp4 or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=Kind.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_fields(
    path: Path,
    arch: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    mxfp4: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a model of another architecture in float32, with a vocabulary of bytes.

    Args:
        path: the file.
        arch: its general.architecture.
        fields: those of the architecture, without its prefix.
        tensors: by the names of its safetensors files without ".weight".
        mxfp4: stacks of experts that are blocks already, uint8, named likewise.
    """
    writer = gguf.GGUFWriter(path, arch)
    put_field = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string,
    }  # fmt: skip
    for key, value in fields.items():
        put_field[type(value)](f"{arch}.{key}", value)
    _add_tokenizer(writer, None, "gpt-2")
    which = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(which, 8)

    def put(name: str, values: np.ndarray, kind: Kind | None = None) -> None:
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("A_log"):  # the one that is stored without an ending
            stored = table.get_name(name)
            assert stored is not None
            writer.add_tensor(stored, np.ascontiguousarray(values), raw_dtype=kind)
            return
        full = name if name.endswith(".bias") else f"{name}.weight"
        stored = table.get_name(full, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(values), raw_dtype=kind)

    for name, values in _merged(arch, fields, tensors).items():
        put(name, values)
    for name, values in (mxfp4 or {}).items():
        put(name, values, Kind.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def delta_converted(
    arch: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, cut: bool = True
) -> dict[str, np.ndarray]:
    """What converters make of a model with gated DeltaNet (arch qwen3next or qwen35moe); older ones
    do not cut the product of qwen3next's input.
    """
    n_k, n_v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    d_k, d_v = config["linear_key_head_dim"], config["linear_value_head_dim"]
    tiled, behind, found = arch == "qwen35moe", 2 * n_k * d_k, dict[str, np.ndarray]()

    def deal(values: np.ndarray, width: int, axis: int = 0) -> np.ndarray:
        """Heads of values, grouped by head of keys, in turns."""
        if not tiled:
            return values
        lead = np.moveaxis(values, axis, 0)
        turned = lead.reshape(n_k, n_v // n_k, width, *lead.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(turned.reshape(lead.shape), 0, axis)

    for name, values in tensors.items():
        part = name.rpartition("linear_attn.")[2]
        if "norm" in name.rpartition(".")[2] and part != "norm":
            found[name] = values + np.float32(1)
        elif part == "A_log":
            found[name] = deal(-np.exp(values), 1)
        elif part == "dt_bias":
            found[name.replace("dt_bias", "dt_proj.bias")] = deal(values, 1)
        elif part in ("conv1d", "in_proj_qkv"):
            flat = values.reshape(len(values), -1)
            found[name] = np.concatenate([flat[:behind], deal(flat[behind:], d_v)])
        elif part in ("in_proj_z", "in_proj_a", "in_proj_b"):
            found[name] = deal(values, d_v if part == "in_proj_z" else 1)
        elif part == "out_proj":
            found[name] = deal(values, d_v, axis=1)
        elif part == "in_proj_qkvz" and cut:
            each = n_v // n_k * d_v
            cuts = np.cumsum([d_k, d_k, each])
            blocks = values.reshape(n_k, 2 * d_k + 2 * each, -1)
            *qkv, z = (cut.reshape(-1, values.shape[1]) for cut in np.split(blocks, cuts, axis=1))
            found[name.replace("in_proj_qkvz", "in_proj_qkv")] = np.concatenate(qkv)
            found[name.replace("in_proj_qkvz", "in_proj_z")] = z
        else:
            found[name] = values
    return found


def _merged(
    arch: str, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Experts stacked; of arch llama, the halves of each head of queries and keys interleaved."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", name)
        if match:
            # the package knows merged experts of Mixtral's kind under an older name
            group = re.sub(r"model\.(.*)block_sparse_moe", r"\1feed_forward", match[1])
            stacks.setdefault(f"{group}.{match[3]}", {})[int(match[2])] = values
        elif arch == "llama" and name.endswith((".q_proj", ".k_proj")):
            heads = fields[
                "attention.head_count" if "q_proj" in name else "attention.head_count_kv"
            ]
            turned = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2)
            found[name] = turned.reshape(values.shape)
        else:
            found[name] = values
    return found | {
        name: np.stack([part[e] for e in sorted(part)]) for name, part in stacks.items()
    }


def kind_of(name: str, values: np.ndarray, *, experts: str, dense: str) -> str:
    """What converters store: norms and routers stay float32, rows of no whole blocks are halves."""
    if values.ndim == 1 or "ffn_gate_inp" in name:
        return "F32"
    kind = experts if "_exps" in name else dense
    is_whole = values.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] == 0
    return kind if is_whole else "F16"


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    data = gguf.quants.quantize(np.ascontiguousarray(values), Kind[kind])
    writer.add_tensor(name, data, raw_dtype=Kind[kind])


def _converted(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, split_kv: bool
) -> dict[str, np.ndarray]:
    """Experts merged, kv_b_proj split and turned, all in float32."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        match = _EXPERT.fullmatch(name)
        if match:
            merged = f"{match.group(1)}.{match.group(3)}.weight"
            experts.setdefault(merged, {})[int(match.group(2))] = values
        elif name.endswith("kv_b_proj.weight") and split_kv:
            heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            cut = config["qk_nope_head_dim"]
            found[name.replace("kv_b_proj", "k_b_proj")] = heads[:, :cut].transpose(0, 2, 1)
            found[name.replace("kv_b_proj", "v_b_proj")] = heads[:, cut:]
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
        else:
            found[name] = values
    stacked = {name: np.stack([part[e] for e in sorted(part)]) for name, part in experts.items()}
    return found | stacked


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], *, split_kv: bool) -> None:
    nope, rope, v_dim = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    n_mtp = config.get("num_nextn_predict_layers", 0)
    writer.add_block_count(config["num_hidden_layers"] + n_mtp)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if n_mtp:
        writer.add_nextn_predict_layers(n_mtp)
    if split_kv:
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + rope)
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(nope + rope)
        writer.add_value_length_mla(v_dim)
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(nope + rope)
        writer.add_value_length(v_dim)
    _add_yarn(writer, _rope(config))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10000.0), **scaling}


def _add_yarn(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    if rope.get("rope_type") != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path | None, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    if folder is None:
        writer.add_token_list([*sorted(ByteLevel.alphabet())[:255], "ab"])
        writer.add_token_merges(["a b"])
        return
    spec = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = {i: token for token, i in spec["model"]["vocab"].items()}
    vocab |= {entry["id"]: entry["content"] for entry in spec["added_tokens"]}
    special = {entry["id"] for entry in spec["added_tokens"]}
    ids = {token: i for i, token in vocab.items()}
    writer.add_token_list([vocab[i] for i in range(len(vocab))])
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[i not in special] for i in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_add_bos_token(settings["add_bos_token"])
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
