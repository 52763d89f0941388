"""LongCat-Flash in the released layout: pulled from a hub on localhost, packed, and asked."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from moet_desk.store.pack_reader import PackReader
from tests.cli.conftest import Command, HubOf
from tests.store.longcat import LITE, write_longcat


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


def test_pull__lite__tables_are_packed_and_their_rows_read(
    moet: Command,
    hub_of: HubOf,
    data_dir: Path,
    demo_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "source"
    write_longcat(source, tokenizer=demo_source / "tokenizer.json", config=LITE)
    hub_of("maker/lite", source)
    pulled = moet("pull", "maker/lite", "--yes", "--reclaim", "--format", "ndjson")
    assert pulled.code == 0, pulled.err
    assert (pulled.events[0]["family"], pulled.events[0]["experts"]) == ("longcat_flash_ngram", 16)
    with PackReader.open(data_dir / "models" / "lite") as reader:
        tables = [name for name in reader.dense.names() if ".embedders." in name]
        assert len(tables) == 8
        assert not any("mtp" in name for name in reader.dense.names())
        n_bytes, size = (
            sum(reader.dense.info(name).bytes for name in tables),
            reader.meta.dense_bytes,
        )
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    answer = moet("run", "lite", "Hello there", "--max-tokens", "8", "--temperature", "0")
    assert answer.code == 0, answer.err
    assert answer.out
    shown = moet("plan", "lite", "--json").document
    assert shown["disk"]["table_bytes"] == n_bytes
    assert shown["parts"]["dense_bytes"] == 4 * (size - n_bytes)  # float32, without the tables
    assert "of n-grams: 8 rows are read for a token" in moet("plan", "lite").out
