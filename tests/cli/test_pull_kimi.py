"""Kimi-K2.5 in the released layout: pulled from a hub on localhost, packed, and asked."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from moet_desk.store.pack_reader import PackReader
from tests.cli.conftest import Command, HubOf
from tests.store.kimi import write_kimi


def test_pull__released_layout__text_part_packed_and_answers(
    moet: Command, hub_of: HubOf, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write_kimi(source)
    looked = moet("pull", str(source), "--dry-run")
    assert looked.code == 0, looked.err
    named = "Left out, tensors that begin with: vision_tower (2), mm_projector (1)."
    assert named in looked.err + looked.out
    hub_of("maker/kimi", source)
    pulled = moet("pull", "maker/kimi", "--yes", "--format", "ndjson")
    assert pulled.code == 0, pulled.err
    plan = pulled.events[0]
    assert (plan["family"], plan["experts"], plan["has_tokenizer"]) == ("kimi_k25", 8, True)
    assert plan["left_out"] == {"vision_tower.": 2, "mm_projector.": 1}
    reader = PackReader.open(data_dir / "models" / "kimi")
    names = set(reader.dense.names())
    reader.close()
    assert "model.layers.1.self_attn.kv_b_proj" in names
    assert not any(name.startswith(("vision", "mm_", "language_model")) for name in names)
    assert moet("verify", "kimi").code == 0
    shown = moet("show", "kimi", "--json")
    assert '"model_context": 512' in shown.out
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    first = moet("run", "kimi", "Hello there", "--max-tokens", "8", "--temperature", "0")
    assert first.code == 0, first.err
    assert first.out
