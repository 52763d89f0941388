"""LongCat-Flash-Lite: the embedding with tables of n-grams, alone and before the model's layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet_desk.engine.families import plan_for, spec_for
from moet_desk.engine.ngram_rows import NgramHash
from moet_desk.engine.planned_model import from_pack
from moet_desk.engine.spec import Mla, Ngrams, Spec
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import DENSE_FILE, Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.row_table import RowTable
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of, logits_with
from tests.engine.test_longcat import RELEASED as FLASH
from tests.engine.tiny_models import use_packed_experts
from tests.engine.tiny_ngrams import END, NGRAMS, numbers, saved_lite, wanted

FLOAT = {"activations": "float", "kv_format": "f32"}
RELEASED: dict[str, Any] = {
    **{key: value for key, value in FLASH.items() if key != "attention_method"},
    "model_type": "longcat_flash_ngram", "architectures": ["LongcatFlashNgramForCausalLM"],
    "hidden_size": 3072, "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 1024, "num_layers": 14,
    "num_hidden_layers": 28, "num_attention_heads": 32, "n_routed_experts": 256, "head_dim": 64,
    "zero_expert_num": 128, "max_position_embeddings": 327680, "rope_theta": 5e6,
    "rope_scaling": {
        "type": "yarn", "factor": 10, "beta_fast": 32, "beta_slow": 1, "mscale": 1,
        "mscale_all_dim": 1, "original_max_position_embeddings": 32768,
    },
    "ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4,
}  # fmt: skip
IDS = [
    9, 250, 31, END, 7, 7, END, END, 4, 199, 83, 61, 5, 12, 0, 77, 140, END, 3, 255, 255, 8, 91, 6,
]  # fmt: skip
Case = tuple[Path, Tensor]


def _spec(config: dict[str, Any]) -> Spec:
    return spec_for(config, path="config.json", has_mtp=False)


# -- rows of the tables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {**NGRAMS, "vocab_size": 256},
        {**NGRAMS, "vocab_size": 97, "emb_neighbor_num": 2, "emb_split_num": 3},
        RELEASED,
    ],
    ids=["tiny", "bigrams", "released"],
)
def test_hash__random_tokens_in_parts__as_defined(config: dict[str, Any]) -> None:
    vocab, longest = config["vocab_size"], config["emb_neighbor_num"]
    ngrams = Ngrams(
        longest, config["emb_split_num"], config["ngram_vocab_size_ratio"] * vocab + 1,
        width=1, end=END,
    )  # fmt: skip
    rows, draw = NgramHash(ngrams, vocab), random.Random(1)
    tokens = [draw.choice([END, 0, vocab - 1, draw.randrange(vocab)]) for _ in range(200)]
    want = numbers(tokens, config)
    assert rows(np.array(tokens), 200).tolist() == want
    for at in range(190):  # what is asked for needs no more than the tokens that it may see
        first = max(0, at - (longest - 1))
        part = np.array(tokens[first : at + 3])
        assert rows(part, 3).tolist() == want[at : at + 3]


# -- before the layers -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0.02, 0.25], ids=["cold", "hot"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A pack, and the logits that its weights must give for `IDS`."""
    folder = tmp_path_factory.mktemp("lite")
    model, state = saved_lite(folder / "source", request.param)
    pack = pack_source(folder / "source", folder / "pack")
    use_packed_experts(model, pack)
    return pack, wanted(model, state, IDS)


@pytest.mark.parametrize(
    "sizes",
    [[24], [1] * 24, [2, 5, 1, 1, 15], [20, 1, 1, 1, 1]],
    ids=["full", "token by token", "odd chunks", "prompt then decode"],
)
def test_logits__any_parts__as_the_reference(case: Case, sizes: list[int]) -> None:
    pack, want = case
    with loaded(pack, **FLOAT) as core:
        got = logits_of(core, IDS, plane=Plane.FINE, sizes=sizes)
    assert (got - want).abs().max() < 1e-4 * want.std()


@pytest.mark.parametrize("length", [0, 1, 3, 9, 19])
def test_rewind__after_undone_tokens__logits_as_if_they_never_were(case: Case, length: int) -> None:
    pack, want = case
    with loaded(pack, **FLOAT) as core, torch.inference_mode():
        sequence = core.kv.reserve(64)
        assert sequence is not None
        experts = core.prefiller._experts[Plane.FINE]
        core.model.forward(torch.tensor(IDS[:20]), core.kv, sequence, experts)
        core.model.forward(torch.tensor([9, END, 7]), core.kv, sequence, experts)
        core.kv.rewind(sequence, length)
        hidden = core.model.forward(torch.tensor(IDS[length:]), core.kv, sequence, experts)
        got = core.model.logits(hidden)
    assert (got - want[length:]).abs().max() < 1e-4 * want.std()


def _with(**changes: Any) -> Callable[[Spec], Spec]:
    def mutate(spec: Spec) -> Spec:
        assert spec.ngrams is not None
        return replace(spec, ngrams=replace(spec.ngrams, **changes))

    return mutate


WRONG: dict[str, Callable[[Spec], Spec]] = {
    "no tables": lambda spec: replace(spec, ngrams=None),
    "over the end": _with(end=1),
    "fewer sizes": _with(longest=4),
    "sizes take turns": _with(longest=3, splits=4),
    "other rows": _with(least_rows=761),
    "no yarn": lambda spec: replace(
        spec,
        layers=tuple(
            replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, yarn=None)))
            for layer in spec.layers
            if isinstance(layer.mixer, Mla)
        ),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_spec__wrong__parity_is_lost(case: Case, what: str) -> None:
    pack, want = case
    with loaded(pack, **FLOAT) as core:
        right = logits_with(core, core.spec, IDS)
        got = logits_with(core, WRONG[what](core.spec), IDS)
    assert (right - want).abs().max() < 1e-4 * want.std()
    assert (got - want).abs().max() > 1e-3 * want.std()


# -- in a pack -------------------------------------------------------------------------------------


def test_pack__tables__stay_on_the_drive_and_in_the_plan(case: Case) -> None:
    pack, _ = case
    model, size = from_pack(pack), (pack / DENSE_FILE).stat().st_size
    n_rows = sum(3 * 256 + 2 * i + 1 for i in range(8))
    assert model.table_bytes == n_rows * 8 * 4
    assert model.dense_bytes == size - model.table_bytes
    with PackReader.open(pack) as reader, loaded(pack, **FLOAT) as core:
        rows = reader.dense_rows("model.ngram_embeddings.embedders.3").read([774, 0, 774])
        whole = reader.dense_tensor("model.ngram_embeddings.embedders.3")
        assert torch.equal(rows, whole[[774, 0, 774]])
        assert core.plan.bytes_total < 4 * size + core.plan.kv_pages * 64 * 10_000 + 2**29


def test_read__file_is_cut__error_with_its_name(case: Case, tmp_path: Path) -> None:
    pack, _ = case
    with PackReader.open(pack) as reader:
        info = reader.dense.info("model.ngram_embeddings.embedders.7")
        short = tmp_path / "short"
        short.write_bytes((pack / DENSE_FILE).read_bytes()[: info.weight.start + 40])
        with short.open("rb") as file, pytest.raises(MoetError) as caught:
            RowTable(info, file.fileno()).read([0, 1])
    assert caught.value.code == "MD-NVME-05"
    assert "row 1 of model.ngram_embeddings.embedders.7" in str(caught.value)


def test_pack__table_with_scales__refused_before_anything_is_packed(tmp_path: Path) -> None:
    _, state = saved_lite(tmp_path / "source", 0.25)
    name = "model.ngram_embeddings.embedders.1.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    state[f"{name}_scale_inv"] = torch.ones(7, 1)
    save_file(state, tmp_path / "source" / "model.safetensors")
    with pytest.raises(MoetError) as caught:
        pack_source(tmp_path / "source", tmp_path / "pack")
    assert caught.value.code == "MD-SRC-05"
    assert "embedders.1" in str(caught.value)
    assert not (tmp_path / "pack").exists()


def test_pack__embedding_under_its_other_name_and_a_head__packed(tmp_path: Path) -> None:
    saved_lite(tmp_path / "source", 0.25)
    state = load_file(tmp_path / "source" / "model.safetensors")
    embedding = state.pop("model.embed_tokens.weight")
    state["model.ngram_embeddings.word_embeddings.weight"] = embedding
    state["model.mtp.norm.weight"] = torch.ones(64)
    save_file(state, tmp_path / "source" / "model.safetensors")
    with PackReader.open(pack_source(tmp_path / "source", tmp_path / "pack")) as reader:
        assert torch.equal(reader.dense_tensor("model.embed_tokens"), embedding)
        assert not any("mtp" in name for name in reader.dense.names())


# -- configs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [(), ("model_type",)], ids=["whole", "no model_type"])
def test_spec__released_config__as_published(drop: tuple[str, ...]) -> None:
    config = {key: value for key, value in RELEASED.items() if key not in drop}
    spec = _spec({**config, "disable_quant_module": []})
    assert spec.model_type == "longcat_flash_ngram"
    assert (len(spec.layers), spec.n_kv_layers, spec.context) == (14, 28, 327680)
    assert spec.ngrams == Ngrams(4, 4, 10_223_617, width=256, end=2)
    router, mixer = spec.moe_ffn.router, spec.layers[0].mixer
    assert (router.n_experts, router.n_choices, router.top_k) == (256, 384, 12)
    assert isinstance(mixer, Mla)
    assert (mixer.q_gain, mixer.kv_gain) == (2**0.5, 6**0.5)
    plan = plan_for(config, path="config.json", names=["model.mtp.norm"])
    tables = {name: shape for name, shape in plan.dense.items() if "embedders" in name}
    assert len(tables) == 12
    assert tables["model.ngram_embeddings.embedders.11"] == (10_223_639, 256)
    assert sum(rows * width for rows, width in tables.values()) == pytest.approx(31.4e9, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"emb_neighbor_num": 1}, "emb_neighbor_num is 1"),
        ({"emb_split_num": None}, "emb_split_num is missing"),
        ({"ngram_vocab_size_ratio": 78.5}, "ngram_vocab_size_ratio is 78.5"),
        ({"emb_split_num": 5}, "15 tables of n-grams cannot share 3072 numbers"),
        ({"eos_token_id": [2, 3]}, "eos_token_id is [2, 3]"),
        ({"oe_ignored_token_ids": [1]}, "oe_ignored_token_ids"),
        ({"use_longcat_dsa": True}, "use_longcat_dsa"),
    ],
)
def test_spec__wrong_or_unknown_key__refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MoetError) as caught:
        _spec({**RELEASED, **change})
    assert caught.value.code == "MD-SRC-07"
    assert words in str(caught.value)
