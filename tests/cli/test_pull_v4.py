"""DeepSeek-V4 in its released layout, scaled down: pulled from a hub on localhost, packed, run."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch import Tensor

from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.quant_formats import decode
from tests.cli.conftest import Command
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_v4 import use_packed_v4, with_values
from tests.store.hub_server import HubServer, Repo
from tests.store.v4 import CONFIG, EXPERTS, LAYERS, VOCAB, write_v4


def test_pull__released_layout__packed_verified_and_runs_as_transformers(
    moet: Command,
    data_dir: Path,
    demo_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "tiny-v4"
    write_v4(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_source / name, source)
    server = HubServer()
    server.repos["maker/tiny-v4"] = Repo(source)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    try:
        pulled = moet("pull", "maker/tiny-v4", "--yes", "--format", "ndjson")
    finally:
        server.close()
    assert pulled.code == 0, pulled.err
    assert pulled.events[0]["family"] == "deepseek_v4"
    assert pulled.events[0]["experts"] == (LAYERS + 1) * EXPERTS
    assert moet("verify", "tiny-v4").code == 0
    pack = data_dir / "models" / "tiny-v4"
    reader = PackReader.open(pack)
    assert reader.meta.moe_layers == [*range(LAYERS), LAYERS]  # the head's is the last
    assert (reader.meta.source_format, reader.meta.fine_is_lossless) == ("mxfp4", True)
    assert reader.dense_tensor("model.layers.0.ffn.gate.tid2eid").dtype == torch.int64
    assert reader.dense.info("model.layers.1.attn.wq_b").kind == "fp8"
    reader.close()
    assert "Think for long" in (pack / "chat_template.jinja").read_text()

    index = ModelSource.open(source).index

    def value(name: str) -> Tensor:
        short = name.removesuffix(".weight")
        if short.endswith("tid2eid"):
            return index.info(short).weight.tensor()
        return decode(index, short)

    model = with_values(CONFIG, value, tmp_path / "transformers")
    ids = torch.randint(3, VOCAB, (150,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        use_packed_v4(model, pack)
        want = model(ids[None]).logits[0]
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, ids.tolist(), plane=Plane.FINE, sizes=[117, 1, 5, 20, *[1] * 7])
    assert (got - want).abs().max() < 1e-4 * want.std()

    ask = ("run", "tiny-v4", "Tell a story.", "--max-tokens", "12", "--temperature", "0", "--json")
    alone, guessed = moet(*ask), moet(*ask, "--drafts", "mtp")
    assert alone.code == guessed.code == 0, alone.err + guessed.err
    assert alone.document["text"] == guessed.document["text"] != ""
    shown = moet("plan", "tiny-v4", "--json")
    assert shown.code == 0, shown.err
