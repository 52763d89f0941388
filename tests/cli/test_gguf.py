"""GGUF files given to commands and to the app, wherever a folder can be given."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from moet_desk.cli.context import Invocation
from moet_desk.cli.desk import AppDesk
from moet_desk.errors import ExitCode, MoetError
from moet_desk.settings import Settings
from tests.cli.conftest import Command
from tests.store.deepseek import CONFIG
from tests.store.gguf_files import random_tensors, write_gguf

DESK = str(Path(__file__).resolve().parents[1] / "data" / "machines" / "5090-96gb.json")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny-Q8_0.gguf"
    config = {**CONFIG, "first_k_dense_replace": 3}
    write_gguf(path, random_tensors(config), config, experts="Q8_0")
    return path


@pytest.mark.parametrize("command", [("pack",), ("pull", "--yes")])
def test_pack__gguf_file__named_after_it(
    command: tuple[str, ...], moet: Command, file: Path, data_dir: Path
) -> None:
    made = moet(*command, str(file), "--json")
    assert made.code == ExitCode.OK, made.err
    assert (made.document["model"], made.document["state"]) == ("Tiny-Q8_0", "ready")
    shown = moet("show", "Tiny-Q8_0", "--json").document
    assert (shown["source_format"], shown["fine_is_lossless"]) == ("q8_0", False)
    assert "Tiny-Q8_0.gguf" in shown["source_files"]
    rows = data_dir / "models" / "Tiny-Q8_0" / "experts.base"
    data = bytearray(rows.read_bytes())
    data[9] ^= 1
    rows.write_bytes(data)
    mended = moet("verify", "Tiny-Q8_0", "--repair", "--source", str(file), "--json")
    assert mended.document["repaired"] == 1


def test_pull__dry_run_of_files_here__figures_and_nothing_made(
    moet: Command, file: Path, data_dir: Path
) -> None:
    document = moet("pull", str(file), "--dry-run", "--json").document
    assert (document["model"], document["source_format"]) == ("Tiny-Q8_0", "q8_0")
    assert (document["experts"], document["source_bytes"]) == (8, file.stat().st_size)
    assert document["has_tokenizer"] is True
    assert 0 < document["pack_bytes"] < document["free_bytes"]
    folder = moet("pull", str(file.parent), "--dry-run", "--name", "x").err
    assert "1 files" in folder
    assert "of q8_0" in folder
    demo = moet("pull", "demo", "--dry-run", "--format", "ndjson").events
    assert (demo[0]["event"], demo[0]["model"], demo[0]["experts"]) == ("plan", "demo", 288)
    assert not (data_dir / "models").exists()
    assert moet("pull", str(file), "--reclaim").code == ExitCode.USAGE


def test_plan__gguf_file_or_folder__as_a_model_that_is_not_packed(
    moet: Command, file: Path
) -> None:
    for path in (file, file.parent):
        document = moet("plan", str(path), "--machine", DESK, "--json").document
        assert document["fits"] is True
        assert document["parts"]["dense_bytes"] > 0
    assert moet("plan", "no-such-model", "--json").error_code == "MD-LIB-01"


def test_pack__dense_model__says_what_this_program_is_for(moet: Command, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "llama-1b.gguf", "llama")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for command in ("pack", "pull", "plan"):
        found = moet(command, str(tmp_path / "llama-1b.gguf"), "--json")
        assert (found.code, found.error_code) == (ExitCode.UNFIT, "MD-GGUF-02")
        assert "llama model without experts" in found.err + found.out


def test_look_up__gguf_file__an_offer_that_a_job_packs(file: Path, data_dir: Path) -> None:
    invocation = Invocation()
    invocation.data_dir = data_dir
    desk = AppDesk(invocation, Settings(), lambda name, wishes: None)
    offer = desk.look_up(str(file))
    assert (offer.title, offer.download_bytes) == ("Tiny-Q8_0", 0)
    assert "deepseek_v3, 1 MoE layers x 8 experts, q8_0" in offer.about[0]
    with pytest.raises(MoetError, match="MD-SRC-01"):
        desk.look_up(str(file.with_name("other.gguf")))
