"""LongCat-Flash in the released layout: pulled from a hub on localhost, packed, and asked."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from moet_desk.store.pack_reader import PackReader
from tests.cli.conftest import Command, HubOf
from tests.store.longcat import write_longcat


def test_pull__released_layout__packed_and_answers(
    moet: Command,
    hub_of: HubOf,
    data_dir: Path,
    demo_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "source"
    write_longcat(source, tokenizer=demo_source / "tokenizer.json")
    hub_of("maker/longcat", source)
    pulled = moet("pull", "maker/longcat", "--yes", "--format", "ndjson")
    assert pulled.code == 0, pulled.err
    plan = pulled.events[0]
    assert (plan["family"], plan["experts"]) == ("longcat_flash", 16)
    reader = PackReader.open(data_dir / "models" / "longcat")
    names = set(reader.dense.names())
    reader.close()
    assert "model.layers.1.self_attn.1.kv_b_proj" in names
    head = {"enorm", "hnorm", "eh_proj", "mlp.down_proj", "shared_head.norm"}
    assert {f"model.layers.2.{part}" for part in head} <= names  # packed as the layer behind
    assert not any(name.startswith("model.mtp.") for name in names)
    assert moet("verify", "longcat").code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    first = moet("run", "longcat", "Hello there", "--max-tokens", "8", "--temperature", "0")
    assert first.code == 0, first.err
    assert first.out
    again = moet(
        "run", "longcat", "Hello there", "--max-tokens", "8", "--temperature", "0",
        "--drafts", "mtp",
    )  # fmt: skip
    assert again.out == first.out
    shown = moet("plan", "longcat", "--json")
    assert shown.code == 0, shown.err
