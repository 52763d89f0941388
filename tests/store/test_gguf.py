"""GGUF files as sources: what a model in them becomes, and that hostile ones end in our errors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moet_desk.engine.families import plan_for
from moet_desk.errors import MoetError
from moet_desk.kernels.reference.quant import balance_zeros, quantize_fp4
from moet_desk.store.gguf.archs import ARCHS
from moet_desk.store.gguf.blocks import BLOCK_SIZES, INTEGERS, PLAIN, type_name
from moet_desk.store.gguf.files import is_gguf, model_files, model_name
from moet_desk.store.gguf.header import parse_gguf
from moet_desk.store.gguf.source import map_file
from moet_desk.store.gguf.tensors import Sizes, logical_tensors
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import BASE_FILE, DENSE_FILE, FINE_FILE, PackMeta, PackPlan
from moet_desk.store.pack_rows import RowMaker
from moet_desk.store.pack_verify import repair_rows, verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.quant_formats import check_finite, decode, fp4_of
from moet_desk.store.sources import TensorIndex
from tests.store.deepseek import CONFIG
from tests.store.gguf_files import random_tensors, write_gguf
from tests.store.tiny import flip_bit

BLOCK_TYPES = [name for name in BLOCK_SIZES if name not in (*PLAIN, *INTEGERS)]
ROWS = (BASE_FILE, FINE_FILE)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(CONFIG)


@pytest.fixture(scope="module")
def model_file(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32; do not write into it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tensors, CONFIG)
    return path


@pytest.fixture(scope="module")
def plain_pack(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of the same model's safetensors folder; do not write into it."""
    folder = tmp_path_factory.mktemp("plain")
    return packed(write_folder(folder / "source", tensors, CONFIG), folder / "pack")[0]


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(path: Path) -> PackPlan:
    source = ModelSource.open(path)
    return plan_for(source.config, path=source.config_path, names=source.index.names())


def packed(path: Path, dest: Path) -> tuple[Path, PackMeta]:
    return dest, write_pack(path, plan_of(path), dest)


def same_rows(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ROWS)


def dense_differences(a: Path, b: Path) -> list[str]:
    one, other = (TensorIndex.open_file(pack / DENSE_FILE) for pack in (a, b))
    assert one.names() == other.names()
    return [n for n in one.names() if not torch.equal(decode(one, n), decode(other, n))]


# -- a model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_write_pack__plain_gguf__equals_the_pack_of_safetensors(
    kind: str, tensors: dict[str, torch.Tensor], plain_pack: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors, CONFIG, experts=kind, dense=kind)
    pack, meta = packed(tmp_path / "tiny.gguf", tmp_path / "pack")
    assert same_rows(pack, plain_pack)
    assert dense_differences(pack, plain_pack) == []
    assert (meta.source_format, meta.fine_is_lossless) == (kind.lower(), False)
    assert [file.name for file in meta.source if file.name.endswith("gguf")] == ["tiny.gguf"]
    assert verify_pack(pack).ok


YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "query latent, groups, yarn": {
        "q_lora_rank": 32, "n_group": 4, "topk_group": 2, "rope_scaling": YARN,
        "routed_scaling_factor": 2.5, "n_shared_experts": 2, "first_k_dense_replace": 2,
    },
    "mtp": {"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 50000.0},
    "tied": {"tie_word_embeddings": True, "norm_topk_prob": False},
}  # fmt: skip


@pytest.mark.parametrize("split_kv", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_open__deepseek2__has_the_config_and_tensors_of_its_origin(
    variant: str, split_kv: bool, tmp_path: Path
) -> None:
    config = {**CONFIG, **VARIANTS[variant]}
    mtp = config["num_nextn_predict_layers"] > 0
    tensors = random_tensors(config, mtp=mtp)
    write_gguf(tmp_path / "m.gguf", tensors, config, split_kv=split_kv)
    source = ModelSource.open(tmp_path / "m.gguf")
    not_stored = {"architectures", "topk_method", "attention_bias"}  # constants of the family
    for key in config.keys() - not_stored:
        assert source.config.get(key) == config[key], key
    logical = {name.removesuffix(".weight") for name in tensors}
    assert set(source.index.names()) == logical
    for name, want in tensors.items():
        got = decode(source.index, name.removesuffix(".weight"))
        assert torch.equal(got, want.float()), name
    RowMaker(source.index, plan_of(tmp_path / "m.gguf"))


def test_made_tensor__some_rows__are_those_of_the_whole(model_file: Path) -> None:
    index = ModelSource.open(model_file).index
    name = "model.layers.1.self_attn.kv_b_proj"
    whole = decode(index, name)
    for rows in (slice(0, 1), slice(40, 60), slice(47, 49), slice(95, 96), slice(3, 90, 7)):
        assert torch.equal(decode(index, name, rows=rows), whole[rows])
    raw = index.info(name).weight
    assert b"".join(raw.chunks(1000)) == bytes(raw.data()) == whole.numpy().tobytes()


def test_write_pack__quantised_dense__is_bf16_of_its_values(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tensors, CONFIG, experts="Q8_0", dense="Q8_0")
    pack, meta = packed(tmp_path / "m.gguf", tmp_path / "pack")
    assert meta.source_format == "q8_0"
    stored = load_file(pack / DENSE_FILE)
    name = "model.layers.0.mlp.down_proj.weight"
    q8 = gguf.quants.quantize(tensors[name].float().numpy(), Kind.Q8_0)
    want = torch.from_numpy(gguf.quants.dequantize(q8, Kind.Q8_0))
    assert torch.equal(stored[name], want.bfloat16())
    assert stored["model.norm.weight"].dtype == torch.float32
    assert stored["model.layers.1.self_attn.kv_b_proj.weight"].dtype == torch.bfloat16


def test_write_pack__fused_gate_and_up__equals_separate_ones(
    tensors: dict[str, torch.Tensor], plain_pack: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "apart.gguf", tensors, CONFIG)
    _, raws = map_file(tmp_path / "apart.gguf")
    writer = gguf.GGUFWriter(tmp_path / "fused.gguf", "deepseek2")
    stacks = {raw.name: raw.tensor().numpy() for raw in raws}
    for name in [name for name in stacks if "ffn_gate_exps" in name]:
        up = stacks.pop(name.replace("gate", "up"))
        fused = np.concatenate((stacks.pop(name), up), axis=1)
        writer.add_tensor(name.replace("gate", "gate_up"), fused)
    for name, values in stacks.items():
        writer.add_tensor(name, values)
    copy_fields(tmp_path / "apart.gguf", writer)
    pack, _ = packed(tmp_path / "fused.gguf", tmp_path / "pack")
    assert same_rows(pack, plain_pack)


def copy_fields(path: Path, writer: gguf.GGUFWriter) -> None:
    for field in gguf.GGUFReader(path).fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_open__both_forms_of_kv_b__takes_the_whole_one(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for name, split_kv in (("halves", True), ("whole", False)):
        write_gguf(tmp_path / f"{name}.gguf", tensors, CONFIG, split_kv=split_kv)
    writer = gguf.GGUFWriter(tmp_path / "both.gguf", "deepseek2")
    for name in ("halves", "whole"):
        for raw in map_file(tmp_path / f"{name}.gguf")[1]:
            if name == "whole" or raw.name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
                writer.add_tensor(raw.name, raw.tensor().numpy())
    copy_fields(tmp_path / "whole.gguf", writer)
    name = "model.layers.2.self_attn.kv_b_proj"
    index = ModelSource.open(tmp_path / "both.gguf").index
    assert torch.equal(decode(index, name), tensors[f"{name}.weight"].float())
    assert set(index.names()) == {n.removesuffix(".weight") for n in tensors}


def test_open__half_of_kv_b__is_refused(model_file: Path, tmp_path: Path) -> None:
    data = model_file.read_bytes().replace(b"blk.2.attn_v_b.weight", b"blk.2.attn_x_b.weight")
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(MoetError, match=r"attn_k_b.* is there without its other half"):
        ModelSource.open(tmp_path / "m.gguf")


def test_dense__vector_in_blocks__is_bf16_of_its_values(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    data = gguf.quants.quantize(values, Kind.Q8_0)
    header_file(tmp_path / "m.gguf", {"arch": "deepseek2"}, {"output_norm.weight": data}, "Q8_0")
    _, raws = map_file(tmp_path / "m.gguf")
    index = TensorIndex.of(logical_tensors(raws, ARCHS["deepseek2"], Sizes(1, 1, 0)), [])
    want = torch.from_numpy(gguf.quants.dequantize(data, Kind.Q8_0)).bfloat16().float()
    assert index.info("model.norm").shape == (64,)
    assert torch.equal(decode(index, "model.norm"), want)
    assert torch.equal(decode(index, "model.norm", rows=slice(3, 9)), want[3:9])


def test_unpermuted__rows_of_each_head__are_halves_again(tmp_path: Path) -> None:
    """The converter of arch llama: (head, half, i) to (head, i, half)."""
    arch = gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", gguf.MODEL_ARCH_NAMES[arch])
    rng = np.random.default_rng(0)
    origin = {"q": (4, rng.normal(size=(64, 32))), "k": (2, rng.normal(size=(32, 32)))}
    for part, (heads, values) in origin.items():
        n_rows, width = values.shape
        turned = values.reshape(heads, 2, n_rows // heads // 2, width).swapaxes(1, 2)
        data = np.ascontiguousarray(turned.reshape(n_rows, width), dtype=np.float32)
        writer.add_tensor(f"blk.0.attn_{part}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, raws = map_file(tmp_path / "q.gguf")
    index = TensorIndex.of(logical_tensors(raws, ARCHS["llama"], Sizes(4, 2, 0)), [])
    for part, (_, values) in origin.items():
        got = decode(index, f"model.layers.0.self_attn.{part}_proj").numpy()
        assert np.array_equal(got, values.astype(np.float32))


# -- block formats -----------------------------------------------------------------------------


def stack_file(path: Path, kind: str, *, seed: int = 0) -> tuple[TensorIndex, np.ndarray]:
    """Three experts of 4 x 512 in random blocks, and the file's bytes of them."""
    per_block, n_bytes = BLOCK_SIZES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (3, 4, 512 // per_block * n_bytes), dtype=np.uint8)
    data &= 0xBF  # no exponent of a half can be the one of infinity
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_tensor("blk.1.ffn_up_exps.weight", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, raws = map_file(path)
    return TensorIndex.of(logical_tensors(raws, ARCHS["deepseek2"], Sizes(1, 1, 3)), []), data


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_decode__block_type__is_what_the_package_says(kind: str, tmp_path: Path) -> None:
    index, data = stack_file(tmp_path / "x.gguf", kind)
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.quants.dequantize(data, Kind[kind]))
    assert torch.isfinite(want).all()
    for expert in range(3):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj"
        assert index.info(name).kind == kind.lower()
        assert torch.equal(decode(index, name), want[expert])
        assert torch.equal(decode(index, name, rows=slice(1, 4, 2)), want[expert][1::2])
        nibbles, scales = fp4_of(index, name)
        if kind == "MXFP4":
            continue
        expected = quantize_fp4(want[expert])
        assert torch.equal(nibbles, balance_zeros(expected[0]))
        assert torch.equal(scales, expected[1])


def test_fp4_of__mxfp4__keeps_every_bit(tmp_path: Path) -> None:
    index, data = stack_file(tmp_path / "x.gguf", "MXFP4")
    for expert in range(3):
        nibbles, scales = fp4_of(index, f"model.layers.1.mlp.experts.{expert}.up_proj")
        blocks = data[expert].reshape(4, 16, 17)
        assert np.array_equal(scales.numpy(), blocks[..., 0])
        for row, block, j in np.ndindex(4, 16, 16):
            code = int(blocks[row, block, 1 + j])
            assert int(nibbles[row, 32 * block + j]) == code & 15
            assert int(nibbles[row, 32 * block + 16 + j]) == code >> 4


def test_block_sizes_and_names__are_those_of_the_package() -> None:
    for kind in Kind:
        assert type_name(kind.value) == kind.name
        if kind.name in BLOCK_SIZES:
            assert BLOCK_SIZES[kind.name] == gguf.GGML_QUANT_SIZES[kind]
    assert {k.name for k in Kind} - set(BLOCK_SIZES) == {"Q8_1", "Q8_K", "Q1_0"} & {
        k.name for k in Kind
    }


def test_decode__scale_that_is_not_finite__is_named(tmp_path: Path) -> None:
    stack_file(tmp_path / "x.gguf", "Q8_0")
    header, raws = map_file(tmp_path / "x.gguf")
    (entry,) = header.tensors
    with (tmp_path / "x.gguf").open("r+b") as file:
        file.seek(entry.begin)
        file.write(b"\x00\x7c")  # infinity
    index = TensorIndex.of(logical_tensors(raws, ARCHS["deepseek2"], Sizes(1, 1, 3)), [])
    for use in (decode, fp4_of, check_finite):
        with pytest.raises(MoetError, match="MD-SRC-06"):
            use(index, "model.layers.1.mlp.experts.0.up_proj")
    decode(index, "model.layers.1.mlp.experts.1.up_proj")


# -- files -------------------------------------------------------------------------------------


def test_model_files__split__any_part_or_the_folder_names_all(
    tensors: dict[str, torch.Tensor], plain_pack: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(folder / "Tiny.Q8.gguf", tensors, CONFIG, parts=3)
    parts = sorted(folder.iterdir())
    assert [p.name for p in parts] == [f"Tiny.Q8-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    (folder / "mmproj-Tiny.gguf").write_bytes(b"a picture's side")
    assert all(model_files(path) == parts for path in (*parts, folder))
    assert model_name(parts[1]) == "Tiny.Q8"
    pack, meta = packed(parts[2], tmp_path / "pack")
    assert same_rows(pack, plain_pack)
    assert [f.name for f in meta.source if f.name.endswith("gguf")] == [p.name for p in parts]
    assert packed(folder, tmp_path / "pack")[1].identity == meta.identity  # nothing to do
    parts[1].unlink()
    with pytest.raises(MoetError) as caught:
        ModelSource.open(parts[0])
    assert caught.value.code == "MD-GGUF-01"
    assert caught.value.facts == {"n_missing": 1, "n_parts": 3, "first": parts[1].name}


def test_open__parts_that_do_not_belong_together__are_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "a.gguf", tensors, CONFIG, parts=3)
    one, two, three = sorted(tmp_path.iterdir())
    kept = three.read_bytes()
    three.write_bytes(two.read_bytes())
    with pytest.raises(MoetError, match="part 1 of 3"):
        ModelSource.open(one)
    three.write_bytes(kept)
    names = [[raw.name for raw in map_file(path)[1]] for path in (two, three)]
    twice, taken = next((a, b) for a in names[0] for b in names[1] if len(a) == len(b))
    three.write_bytes(kept.replace(taken.encode(), twice.encode(), 1))
    with pytest.raises(MoetError, match=rf"{twice} is in a-00002-of-00003.gguf too"):
        ModelSource.open(one)
    renamed = tmp_path / "b.gguf"
    renamed.write_bytes(two.read_bytes())
    with pytest.raises(MoetError, match="by its name it is 0 of 1"):
        ModelSource.open(renamed)


def test_is_gguf__safetensors_folder_empty_folder_other_file__is_not(
    tmp_path: Path, model_file: Path
) -> None:
    both = tmp_path / "both"
    both.mkdir()
    (both / "model.safetensors").write_bytes(b"")
    (both / "m.gguf").write_bytes(model_file.read_bytes())
    (tmp_path / "empty").mkdir()
    assert is_gguf(model_file)
    assert is_gguf(model_file.parent)
    assert not any(map(is_gguf, (both, tmp_path / "empty", tmp_path / "no.gguf", Path(__file__))))


def test_open__folder_of_two_models__asks_for_one(model_file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(model_file.read_bytes())
    with pytest.raises(MoetError) as caught:
        ModelSource.open(tmp_path)
    assert caught.value.code == "MD-GGUF-06"
    assert "a.gguf, b.gguf" in caught.value.cause


def test_open__small_files_beside_it__count_except_the_config(
    model_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(model_file.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"smollm", b"oddity"))  # not converted
    source = ModelSource.open(tmp_path)
    assert source.small["tokenizer.json"] == b'{"version": "1.0"}'
    assert source.config["model_type"] == "deepseek_v3"
    assert json.loads(source.small["tokenizer_config.json"]) == {"add_bos_token": False}
    with pytest.raises(MoetError, match="MD-GGUF-04"):
        ModelSource.open(tmp_path / "m.gguf")  # a file alone is itself


def test_repair__row_of_a_gguf_pack__is_made_again(model_file: Path, tmp_path: Path) -> None:
    pack, _ = packed(model_file, tmp_path / "pack")
    good = (pack / BASE_FILE).read_bytes()
    flip_bit(pack / BASE_FILE, 100)
    (pack / "tokenizer.json").write_bytes(b"{}")
    found = verify_pack(pack)
    assert repair_rows(pack, model_file, plan_of(model_file), found) == 2
    assert verify_pack(pack).ok
    assert (pack / BASE_FILE).read_bytes() == good


# -- what is refused ---------------------------------------------------------------------------


def header_file(
    path: Path,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    kind: str = "F32",
) -> Path:
    """A file with these fields, and no tensors unless they are given."""
    writer = gguf.GGUFWriter(path, fields.pop("arch"))
    for name, value in fields.items():
        writer.add_uint32(name, value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"arch": "llama"}, "MD-GGUF-02", "holds a llama model without experts"),
        ({"arch": "qwen3", "qwen3.expert_count": 0}, "MD-GGUF-02", "qwen3"),
        ({"arch": "grok", "grok.expert_count": 8}, "MD-GGUF-03", "deepseek2"),
        ({"arch": "clip"}, "MD-GGUF-03", "clip"),
        ({"arch": "deepseek2", "deepseek2.expert_count": 8}, "MD-GGUF-05", "block_count"),
    ],
)
def test_open__not_a_model_that_runs__says_why(
    fields: dict[str, Any], code: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(MoetError) as caught:
        ModelSource.open(header_file(tmp_path / "m.gguf", dict(fields)))
    assert caught.value.code == code
    assert words in caught.value.cause


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("deepseek2.block_count", "more layers than its"),
        ("deepseek2.expert_count", "more experts than the 8"),
    ],
)
def test_open__counts_beyond_the_tensors__are_not_believed(
    field: str, words: str, model_file: Path, tmp_path: Path
) -> None:
    data = bytearray(model_file.read_bytes())
    at = data.index(field.encode()) + len(field) + 4
    data[at : at + 4] = struct.pack("<I", 0xFFFFFFF0)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(MoetError, match=words):
        ModelSource.open(tmp_path / "m.gguf")


def test_plan__softmax_router_of_deepseek_v2__is_refused_by_the_family(
    model_file: Path, tmp_path: Path
) -> None:
    data = model_file.read_bytes()
    field = b"deepseek2.expert_gating_func"
    at = data.index(field) + len(field) + 4
    (tmp_path / "m.gguf").write_bytes(data[:at] + b"\1\0\0\0" + data[at + 4 :])
    with pytest.raises(MoetError, match="softmax"):
        plan_of(tmp_path / "m.gguf")


def test_plan__tensor_that_nobody_knows__is_named(model_file: Path, tmp_path: Path) -> None:
    data = model_file.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight")
    (tmp_path / "m.gguf").write_bytes(data)
    source = ModelSource.open(tmp_path / "m.gguf")
    assert "blk.1.attn_z.weight" in source.index
    with pytest.raises(MoetError, match=r"MD-SRC-03.*model.layers.1.self_attn.q_proj"):
        RowMaker(source.index, plan_of(tmp_path / "m.gguf"))


def raw_header(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    order: str = "<",
    n_tensors: int = 0,
    n_fields: int = 0,
    rest: bytes = b"",
) -> bytes:
    return magic + struct.pack(f"{order}IQQ", version, n_tensors, n_fields) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def one_tensor(
    name: str = "x", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, n: int = 1
) -> bytes:
    dims = struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
    entry = text(name) + dims + struct.pack("<IQ", kind, offset)
    header = raw_header(n_tensors=n, rest=entry * n)
    return header + bytes(-len(header) % 32) + bytes(64)


def field(kind: int, value: bytes, name: str = "f") -> bytes:
    return raw_header(n_fields=1, rest=text(name) + struct.pack("<I", kind) + value)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "three bytes": (b"GGU", "does not begin"),
    "another format": (raw_header(magic=b"ggml"), "does not begin"),
    "cut in the counts": (raw_header()[:20], "needs 8 bytes"),
    "version 1": (raw_header(version=1), "version 1"),
    "version 4": (raw_header(version=4), "version 4"),
    "big-endian": (raw_header(order=">"), "big-endian"),
    "2**64-1 tensors": (raw_header(n_tensors=(1 << 64) - 1), "more than can be"),
    "2**60 fields": (raw_header(n_fields=1 << 60), "more than can be"),
    "name beyond the file": (raw_header(n_fields=1, rest=b"\xff" * 8 + bytes(9)), "needs 1844674"),
    "name is no UTF-8": (
        raw_header(n_fields=1, rest=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9)),
        "not UTF-8",
    ),
    "unknown field type": (field(99, bytes(8)), "unknown type 99"),
    "text beyond the file": (field(8, struct.pack("<Q", 1 << 40)), "needs 1099511627776"),
    "array beyond the file": (field(9, struct.pack("<IQ", 4, 1 << 20)), "an array needs"),
    "array of 2**61": (field(9, struct.pack("<IQ", 4, 1 << 61)), "an array claims"),
    "texts beyond the file": (field(9, struct.pack("<IQ", 8, 1 << 20)), "a number needs"),
    "texts, 2**61 of them": (field(9, struct.pack("<IQ", 8, 1 << 61)), "an array claims"),
    "arrays of many values in all": (
        field(9, struct.pack("<IQ", 9, 3) + (struct.pack("<IQ", 0, 1 << 21) + bytes(1 << 21)) * 3),
        "an array claims 2097152",
    ),
    "arrays in arrays": (field(9, struct.pack("<IQ", 9, 1) * 6 + bytes(99)), "too many deep"),
    "alignment 0": (field(4, struct.pack("<I", 0), "general.alignment"), "alignment is 0"),
    "alignment is a text": (field(8, text("x"), "general.alignment"), "alignment is 'x'"),
    "a field twice": (
        raw_header(n_fields=2, rest=(text("ff") + struct.pack("<IB", 0, 1)) * 2 + bytes(8)),
        "field ff twice",
    ),
    "a tensor twice": (one_tensor(n=2, shape=(0,)), "out of range"),
    "overlap": (one_tensor(n=2), "two tensors called x"),
    "five dimensions": (one_tensor(shape=(1, 1, 1, 1, 1)), "5 dimensions"),
    "empty tensor": (one_tensor(shape=(8, 0)), "out of range"),
    "2**96 weights": (one_tensor(shape=(1 << 32, 1 << 32, 1 << 32)), "out of range"),
    "beyond the file": (one_tensor(shape=(1 << 20,)), "ends at"),
    "offset beyond the file": (one_tensor(offset=1 << 40), "ends at"),
    "offset 2**64-1": (one_tensor(offset=(1 << 64) - 1), "out of range"),
    "offset is odd": (one_tensor(offset=3), "multiple of 32"),
    "half a block": (one_tensor(kind=8, shape=(33,)), "not whole Q8_0 blocks"),
    "no dimensions": (one_tensor(kind=8, shape=()), "rows of 1, not whole Q8_0 blocks"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_open__hostile_header__is_a_damaged_file(case: str, tmp_path: Path) -> None:
    data, words = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(MoetError) as caught:
        ModelSource.open(path)
    assert caught.value.code == "MD-SRC-02"
    assert "m.gguf" in caught.value.cause
    assert words in caught.value.cause


def test_parse_gguf__tensors_that_overlap__are_refused() -> None:
    entries = b"".join(
        text(name) + struct.pack("<IQIQ", 1, 16, 0, offset)
        for name, offset in (("a", 0), ("b", 32))
    )
    header = raw_header(n_tensors=2, rest=entries)
    data = header + bytes(-len(header) % 32) + bytes(96)
    with pytest.raises(MoetError, match="b begins at 128 and overlaps"):
        parse_gguf(memoryview(data), file="f")


@pytest.mark.parametrize(("kind", "name"), [(9, "Q8_1"), (41, "Q1_0"), (137, "137")])
def test_open__type_that_cannot_be_read__is_named(kind: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(one_tensor(kind=kind))
    with pytest.raises(MoetError) as caught:
        ModelSource.open(tmp_path / "m.gguf")
    assert caught.value.code == "MD-SRC-05"
    assert caught.value.facts == {"tensor": "x", "format": f"GGUF type {name}"}


def test_open__empty_file__is_damaged(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(MoetError, match="MD-SRC-02"):
        ModelSource.open(tmp_path / "m.gguf")


def spoiled(draw: Callable[..., Any], good: bytes, start: int, end: int) -> bytes:
    data = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(start, end - 1))
        data[at] = draw(st.sampled_from((0, 1, 0x7F, 0xFF)) | st.integers(0, 255))
    return bytes(data[: draw(st.just(len(data)) | st.integers(0, len(data)))])


@pytest.fixture(scope="module")
def yarn_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**CONFIG, **VARIANTS["query latent, groups, yarn"]}
    path = tmp_path_factory.mktemp("yarn") / "tiny.gguf"
    write_gguf(path, random_tensors(config), config)
    return path


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_open__any_bytes_of_a_good_file_changed__only_catalogue_errors(
    yarn_file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    good = yarn_file.read_bytes()
    fields = good.index(b"tokenizer.ggml.tokens")  # most of the rest of the header is texts
    names = good.index(b"output_norm.weight")
    end = names + 4000
    start, stop = data.draw(st.sampled_from(((0, fields), (names - 200, end), (0, end))))
    path = tmp_path / "m.gguf"
    path.write_bytes(spoiled(data.draw, good, start, stop))
    try:
        source = ModelSource.open(path)
        maker = RowMaker(source.index, plan_of(path))
        maker.make(0)
        for name in maker.plan.dense:
            check_finite(source.index, name)
    except MoetError:
        pass
    else:
        assert maker.plan.n_rows > 0
