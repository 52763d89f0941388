"""GLM-5.2 in its published layouts, scaled down: pulled from a hub on localhost, packed and run."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.quant_formats import decode
from tests.cli.conftest import Command, HubOf
from tests.engine.oracle import loaded, logits_of
from tests.engine.test_mtp_parity import use_packed_experts_of_model
from tests.store.hub_server import HubServer
from tests.store.sparse_glm import CONFIG, EXPERTS, LAYERS, OWN, VOCAB, write_glm

NAME = "maker/tiny-glm"


@pytest.fixture(scope="module", params=["fp8", "nvfp4"])
def source(
    request: pytest.FixtureRequest, demo_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tiny-glm"
    write_glm(folder, request.param)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_source / name, folder)
    return folder


@pytest.fixture
def hub(source: Path, hub_of: HubOf) -> HubServer:
    return hub_of(NAME, source)


def transformers_on(source: Path, pack: Path) -> Any:
    """transformers' model with the source's dense values and the pack's experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**CONFIG, "dtype": "float32"})
    model = AutoModelForCausalLM.from_config(config).eval().float()
    index, state = ModelSource.open(source).index, model.state_dict()
    with torch.no_grad():
        for key, value in state.items():
            if ".mlp.experts." not in key:
                value.copy_(decode(index, key.removesuffix(".weight")))
        for name, module in model.named_modules():
            if name.endswith("a_layernorm"):  # released kernels take the config's epsilon here too
                module.variance_epsilon = CONFIG["rms_norm_eps"]
        use_packed_experts_of_model(model, pack)
    return model


def test_pull__published_layout__packed_verified_and_runs_as_transformers(
    hub: HubServer, moet: Command, data_dir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    result = moet("pull", NAME, "--yes", "--format", "ndjson")
    assert result.code == 0, result.err
    assert result.events[0]["family"] == "glm_moe_dsa"
    assert result.events[0]["experts"] == LAYERS * EXPERTS  # of two layers and the head
    assert moet("verify", "tiny-glm").code == 0
    pack = data_dir / "models" / "tiny-glm"
    reader = PackReader.open(pack)
    assert reader.meta.moe_layers == [1, 2, LAYERS]
    kept = set(reader.dense.names())
    reader.close()
    assert {f"model.layers.{i}.self_attn.indexer.wk" for i in (*OWN, LAYERS)} <= kept
    assert "model.layers.1.self_attn.indexer.wk" not in kept
    assert not any("shared_head.head" in name for name in kept)

    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = transformers_on(source, pack)(ids[None]).logits[0]
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids.tolist(), plane=Plane.FINE, sizes=[17, 1, 5, *[1] * 17])
    assert (got - want).abs().max() < 1e-4 * want.std()

    ask = ("run", "tiny-glm", "Tell a story.", "--max-tokens", "12", "--temperature", "0", "--json")
    alone, guessed = moet(*ask), moet(*ask, "--drafts", "mtp")
    assert alone.code == guessed.code == 0, alone.err + guessed.err
    assert alone.document["text"] == guessed.document["text"] != ""
