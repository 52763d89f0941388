"""gpt-oss as it is published: MXFP4 blocks of all experts in one tensor, and its way to chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet_desk.engine import model_shape
from moet_desk.engine.families.gpt_oss import plan
from moet_desk.engine.parsers.answers import AnswerFormat, CallFormat
from moet_desk.engine.template import ChatTemplate
from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from moet_desk.kernels.layouts import unpack_nibbles
from moet_desk.store.pack_format import BASE_FILE, FINE_FILE, Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import DEMO, pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.random_promise import alone, check, check_kept, packed_with_text
from tests.engine.test_gguf import mxfp4_blocks
from tests.engine.test_gguf_families import fields_of
from tests.engine.tiny_models import GQA_CONFIGS, LENGTH, TINY_OSS, random_model, save_source
from tests.store.gguf_files import write_fields
from tests.store.tiny import E2M1

TWO_PARTS = ("gate_up_proj", "down_proj")


def blocks(n_experts: int, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Random MXFP4 of all experts: "blocks" uint8 [E, N, K/32, 16], "scales" [E, N, K/32]."""
    made = torch.Generator().manual_seed(seed)
    shape = (n_experts, rows, columns // 32)
    codes = torch.randint(0, 256, (*shape, 16), generator=made, dtype=torch.uint8)
    return {
        "blocks": codes,
        "scales": torch.randint(117, 123, shape, generator=made, dtype=torch.uint8),
    }


def nibbles(codes: Tensor) -> Tensor:
    """[.., K/32, 16] -> [.., K], the low half of a byte first."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-3)


def values(part: dict[str, Tensor]) -> Tensor:
    """By the definition of the format, float32 [E, N, K]."""
    levels = torch.tensor(E2M1)[nibbles(part["blocks"]).long()]
    return levels * torch.exp2(part["scales"].float() - 127).repeat_interleave(32, -1)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """A pack of a tiny checkpoint in the released layout, transformers' model, and the blocks."""
    folder = tmp_path_factory.mktemp("oss")
    model = random_model({**GQA_CONFIGS["gpt_oss"], "swiglu_limit": 0.5}, 0.25)
    tensors: dict[str, Tensor] = {}
    stored: dict[str, Any] = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not name.endswith(TWO_PARTS):
                value.copy_(value.bfloat16())
                tensors[name] = value.bfloat16().clone()
                continue
            n_experts, width, rows = value.shape  # of this file; the release has rows first
            part = blocks(n_experts, rows, width, seed=len(stored))
            stored[name] = part
            tensors |= {f"{name}_{kind}": data for kind, data in part.items()}
            value.copy_(values(part).transpose(1, 2))
    source = folder / "source"
    model.config.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors")
    return pack_source(source, folder / "pack"), model, stored


def test_pack__blocks__every_bit_of_every_expert_is_kept(
    published: tuple[Path, Any, dict[str, Any]],
) -> None:
    pack, _, stored = published
    reader = PackReader.open(pack)
    meta, layout = reader.meta, reader.layout
    assert (meta.source_format, meta.fine_is_lossless) == ("mxfp4", True)
    base, fine = bytearray(meta.base_stride), bytearray(meta.fine_stride)
    for row in range(meta.n_rows):
        reader.read_row(Plane.BASE, row, memoryview(base))
        reader.read_row(Plane.FINE, row, memoryview(fine))
        planes = [torch.frombuffer(part, dtype=torch.uint8) for part in (base, fine)]
        layer, expert = divmod(row, meta.n_experts)
        for part, matrix in zip(TWO_PARTS, (layout.gate_up, layout.down), strict=True):
            want = stored[f"model.layers.{layer}.mlp.experts.{part}"]
            codes, scales = nibbles(want["blocks"][expert]), want["scales"][expert]
            if part == "gate_up_proj":  # stored gate, up, gate, up, ...
                codes = torch.cat([codes[0::2], codes[1::2]])
                scales = torch.cat([scales[0::2], scales[1::2]])
            got = unpack_nibbles(*planes, matrix)
            assert torch.equal(got[0], codes)
            assert torch.equal(got[1], scales)
            planes = [planes[0][matrix.base_bytes :], planes[1][matrix.fine_bytes :]]
    reader.close()


def test_logits__of_the_published_layout__those_of_transformers_on_its_values(
    published: tuple[Path, Any, dict[str, Any]],
) -> None:
    pack, model, _ = published
    ids = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids.tolist(), plane=Plane.FINE, sizes=[30] + [1] * 10)
    assert (got - want).abs().max() < 1e-4 * want.std()
    with loaded(pack, kv_format="f32") as core:  # 15-bit activations and the published weights
        got = logits_of(core, ids.tolist(), plane=Plane.FINE)
    assert (got - want).abs().median() < 5e-3 * want.std()


def as_gguf(source: Path, stored: dict[str, Any], path: Path) -> None:
    """The same checkpoint as converters write it: gate and up apart, halves of blocks in a byte."""
    config = json.loads((source / "config.json").read_text())
    rope = config["rope_parameters"]
    fields = fields_of(config) | {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }  # fmt: skip
    tensors, stacks = dict[str, Any](), dict[str, Any]()
    for name, values in load_file(source / "model.safetensors").items():
        if name.endswith(("_blocks", "_scales")):
            continue
        floats, base = values.float().numpy(), name.removesuffix("_bias")
        if name.endswith("gate_up_proj_bias"):
            for part, at in (("gate_proj", 0), ("up_proj", 1)):
                tensors[base.replace("gate_up_proj", part) + ".bias"] = floats[:, at::2]
        else:
            down = name.endswith("down_proj_bias")
            tensors[f"{base}.bias" if down else name.removesuffix(".weight")] = floats
    for name, part in stored.items():
        codes, scales = nibbles(part["blocks"]).numpy(), part["scales"].numpy()
        if name.endswith("down_proj"):
            stacks[name] = mxfp4_blocks(codes, scales)
            continue
        for own, at in (("gate_proj", 0), ("up_proj", 1)):
            blocks = mxfp4_blocks(codes[:, at::2], scales[:, at::2])
            stacks[name.replace("gate_up_proj", own)] = blocks
    write_fields(path, "gpt-oss", fields, tensors, mxfp4=stacks)


def test_pack__as_gguf__the_rows_and_logits_of_the_published_files(
    published: tuple[Path, Any, dict[str, Any]], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(published[0].parent / "source", source)
    config = json.loads((source / "config.json").read_text())
    del config["swiglu_limit"]  # which no field says: all published models have the usual one
    (source / "config.json").write_text(json.dumps(config))
    as_gguf(source, published[2], tmp_path / "m.gguf")
    pack = pack_source(source, tmp_path / "own")
    made = pack_source(tmp_path / "m.gguf", tmp_path / "made")
    for name in (BASE_FILE, FINE_FILE):
        assert (made / name).read_bytes() == (pack / name).read_bytes()
    logits, dense, specs = [], [], []
    for folder in (made, pack):
        with loaded(folder, activations="float", kv_format="f32") as core:
            specs.append(core.spec)
            assert core.reader.meta.source_format == "mxfp4"
            names = sorted(plan(core.spec).dense)
            dense.append({name: core.reader.dense_tensor(name).float() for name in names})
            logits.append(logits_of(core, list(range(3, 27)), plane=Plane.FINE))
    assert specs[0] == specs[1]
    for name, values in dense[1].items():
        assert torch.equal(dense[0][name], values), name
    # products with float32 weights, as this file holds them, add up in another order
    assert (logits[0] - logits[1]).abs().median() < 1e-4 * logits[1].std()


@pytest.mark.slow
def test_tokens__however_it_runs__same_bits(demo_source: Path, tmp_path: Path) -> None:
    """Promise 1, with prompts that are longer than a window and than what its layers keep."""
    pack = packed_with_text(GQA_CONFIGS["gpt_oss"], demo_source, tmp_path)
    wanted = alone(pack)
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    check(pack, wanted, pool_slots=4, fine_slots=4, arena_rows=2)
    check_kept(pack, tmp_path / "prefixes")


@pytest.mark.slow
def test_opportunistic__fp4_slots_for_all__the_answer_of_exact(tmp_path: Path) -> None:
    """Each expert has the bias that is its own in either precision."""
    random_model(GQA_CONFIGS["gpt_oss"], 0.25).save_pretrained(tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = list(range(3, 27))
    with loaded(pack, kv_format="f32", opportunistic=True, fine_slots=16) as core:
        exact = logits_of(core, ids, plane=Plane.FINE, sizes=[1] * len(ids))
        again = logits_of(core, ids, plane=Plane.BASE, sizes=[1] * len(ids))
    with loaded(pack, kv_format="f32") as core:
        fast = logits_of(core, ids, plane=Plane.BASE, sizes=[1] * len(ids))
    assert torch.equal(again, exact)
    assert not torch.equal(fast, exact)


# -- chat --------------------------------------------------------------------------------------

TEMPLATE = """{%- if reasoning_effort is not defined -%}
{%- set reasoning_effort = "medium" -%}
{%- endif -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>
{%- for message in messages -%}
{%- if message.role == "assistant" and message.tool_calls -%}
{%- if message.content and message.thinking %}{{ raise_exception("both") }}{% endif -%}
{%- if message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json
<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
CALL = {"type": "function", "function": {"name": "tide", "arguments": '{"h": 6}'}}
TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def small_text(template: str | None) -> Text:
    spec = json.loads((DEMO / "tokenizer.json").read_text())
    for i, tag in enumerate(TAGS):
        spec["added_tokens"].append({
            "id": 8192 + i, "content": tag, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        })  # fmt: skip
    config = {"model_type": "gpt_oss", "vocab_size": 8198, "eos_token_id": 8196}
    return Text(spec, template=template, special={}, config=config, generation={}, adds_bos=False)


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_text__gpt_oss__harmony_and_a_call_ends_the_answer(template: str | None) -> None:
    text = small_text(template)
    assert text.answers == AnswerFormat(CallFormat.HARMONY)
    ends = {TAGS[token - 8192] for token in text.eos_ids}
    assert ends == {"<|return|>", "<|call|>"}  # the end of a message is none


def test_render__reasoning_before_a_call__under_the_templates_name() -> None:
    text = small_text(TEMPLATE)
    assert text.switches == ("reasoning_effort",)
    assert text.efforts == ("low", "medium", "high")
    turn = {"role": "assistant", "reasoning_content": "look it up", "tool_calls": [CALL]}
    shown = text.render([{"role": "user", "content": "Tide?"}, turn])
    assert "<|channel|>analysis<|message|>look it up<|end|>" in shown
    assert '<|message|>{"h": 6}<|call|>' in shown
    both = text.render([{"role": "user", "content": "Tide?"}, {**turn, "content": "One moment."}])
    assert "look it up" not in both
    direct = ChatTemplate(TEMPLATE, tokens={})
    message = {**turn, "content": "One moment.", "thinking": "look it up"}
    with pytest.raises(MoetError):  # which the template refuses
        direct.render([message], [], add_generation_prompt=True)


def test_encode_chat__effort__written_into_the_prompt() -> None:
    text = small_text(TEMPLATE)
    ask = [{"role": "user", "content": "Hi"}]
    usual = text.encode_chat(ask)
    assert text.encode_chat(ask, switches={"reasoning_effort": "medium"}) == usual
    assert text.encode_chat(ask, switches={"reasoning_effort": "high"}) != usual


def test_rings__far_more_tokens_than_they_hold__same_bits_as_keeping_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(random_model(TINY_OSS, 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = torch.randint(3, 256, (280,), generator=torch.Generator().manual_seed(4)).tolist()
    sizes = [32] * 8 + [1] * 24
    options: dict[str, Any] = {"context": 320, "prefill_chunk": 32, "kv_format": "bf16"}
    found = []
    for rings in (True, False):
        if not rings:
            monkeypatch.setattr(model_shape, "ring_layers", lambda spec: ())
        with loaded(pack, **options) as core:
            assert core.plan.ring_pages == (2 if rings else 0)  # 128 tokens
            found.append(logits_of(core, ids, plane=Plane.BASE, sizes=sizes))
            assert core.kv.n_layers == (1 if rings else 2)
    assert torch.equal(*found)
