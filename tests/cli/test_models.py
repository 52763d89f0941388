"""pack, verify, ls, show and rm on the shipped model, which packs in seconds."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moet_desk.errors import ExitCode
from moet_desk.store.library import Library, PackState, embedded_source
from moet_desk.store.pack_format import BASE_FILE, DENSE_FILE, PACK_JSON
from tests.cli.conftest import Command, environment


@pytest.fixture
def packed(demo_pack: Path, data_dir: Path) -> Path:
    """A data folder with the demo model packed."""
    folder = data_dir / "models" / "demo"
    shutil.copytree(demo_pack, folder)
    return folder


def start_pack(data_dir: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moet_desk", "pack", "demo", "--format", "ndjson", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment(data_dir), **pipes)


def test_pack__stopped_by_sigterm__resumes(data_dir: Path, moet: Command, demo_pack: Path) -> None:
    with start_pack(data_dir, "--memory-budget", "16MiB") as child:
        assert child.stdout is not None
        for line in child.stdout:
            event = json.loads(line)
            if event["event"] == "pack" and event["done"] > 0:
                child.send_signal(signal.SIGTERM)
                break
        events = [json.loads(line) for line in child.stdout]
        assert child.wait(20) == ExitCode.TERMINATED
    assert events[-1]["error"]["code"] == "MD-PACK-06"
    (model,) = moet("ls", "--json").document["models"]
    assert (model["state"], model["rows"]) == ("incomplete", 288)
    assert 0 < model["rows_done"] < 288
    assert f"incomplete {model['rows_done']}/288" in moet("ls").out
    assert moet("show", "demo", "--json").document["error"]["code"] == "MD-PACK-06"

    with start_pack(data_dir) as child:
        out, _ = child.communicate(timeout=60)
    *steps, packed = [json.loads(line) for line in out.splitlines()]
    rows = [event for event in steps if event["event"] == "pack"]
    assert rows[0]["done"] == rows[0]["kept"] == model["rows_done"]
    assert rows[-1]["done"] == rows[-1]["total"] == 288
    assert rows[-1]["bytes"] == rows[-1]["total_bytes"]
    assert (packed["event"], packed["state"]) == ("packed", "ready")
    made = data_dir / "models" / "demo"
    assert (made / BASE_FILE).read_bytes() == (demo_pack / BASE_FILE).read_bytes()


@pytest.mark.slow
def test_pack__reader_of_events_leaves__goes_on(data_dir: Path) -> None:
    with start_pack(data_dir) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(60) == 0
        assert child.stderr.read() == ""
    assert Library(data_dir / "models").find("demo").state is PackState.READY


@pytest.mark.parametrize(
    ("source", "code", "exit_code"),
    [
        ("nowhere", "MD-SRC-01", ExitCode.NOT_FOUND),
        ("empty", "MD-SRC-01", ExitCode.NOT_FOUND),
        ("broken", "MD-SRC-07", ExitCode.UNFIT),
        ("list", "MD-SRC-07", ExitCode.UNFIT),
    ],
)
def test_pack__no_model_there__catalogue_error(
    moet: Command, tmp_path: Path, source: str, code: str, exit_code: ExitCode
) -> None:
    for name, text in (("empty", None), ("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
    result = moet("pack", str(tmp_path / source), "--json")
    assert (result.code, result.error_code) == (exit_code, code)


def test_pack__name_that_leaves_the_folder__refused(moet: Command) -> None:
    for name in ("../x", "a/b", ".hidden", ""):
        assert moet("pack", "demo", "--name", name, "--json").error_code == "MD-CFG-03"


def test_verify__flipped_bit__named_then_mended(moet: Command, packed: Path) -> None:
    rows = packed / BASE_FILE
    good = rows.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    rows.write_bytes(bad)
    found = moet("verify", "--json")
    assert (found.code, found.error_code) == (ExitCode.DAMAGED, "MD-PACK-04")
    assert "expert" in found.err
    mended = moet("verify", "--repair", "--json")
    assert (mended.code, mended.document["repaired"]) == (0, 1)
    assert rows.read_bytes() == good
    assert moet("verify", "--format", "ndjson").events[-1]["event"] == "verified"


def test_verify__repair_without_source__says_what_to_name(moet: Command, packed: Path) -> None:
    other = packed.with_name("other")
    packed.rename(other)
    assert moet("verify", "other", "--repair").code == 0  # nothing has to be mended
    (other / "tokenizer.json").unlink()
    refused = moet("verify", "other", "--repair", "--json")
    assert (refused.code, refused.error_code) == (ExitCode.DAMAGED, "MD-PACK-11")
    assert "verify other --repair --source" in refused.document["error"]["do"]


def test_show__what_it_is(moet: Command, packed: Path) -> None:
    document = moet("show", "--json").document
    assert (document["state"], document["family"]) == ("ready", "deepseek_v3")
    assert (document["moe_layers"], document["experts_per_layer"]) == (9, 32)
    assert document["model_context"] == 2048
    assert len(document["template_sha256"]) == 64
    shown = moet("show", "demo").out
    assert "MB" in shown
    assert document["identity"] in shown
    (event,) = moet("show", "--format", "ndjson").events
    assert event == {"event": "model", **document}


def test_ls__no_models__says_what_comes_with_the_program(moet: Command) -> None:
    result = moet("ls")
    assert (result.code, result.out) == (0, "")
    assert "demo" in result.err
    assert moet("ls", "--json").document["models"] == []


def test_ls__every_state(moet: Command, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    models = packed.parent
    for name in ("cut", "newer", "torn"):
        shutil.copytree(packed, models / name)
    (models / "cut" / DENSE_FILE).write_bytes(b"short")
    (models / "torn" / PACK_JSON).unlink()
    record = json.loads((models / "newer" / PACK_JSON).read_bytes())
    (models / "newer" / PACK_JSON).write_text(json.dumps(record | {"format": 99}))
    (models / "not-ours").mkdir()
    (models / "not-ours" / "photo.jpg").touch()
    states = {row["name"]: row["state"] for row in moet("ls", "--json").document["models"]}
    assert states == {
        "cut": "damaged",
        "demo": "ready",
        "newer": "other format",
        "torn": "incomplete",
    }
    assert [event["name"] for event in moet("ls", "--format", "ndjson").events] == sorted(states)
    codes = {"cut": "MD-PACK-07", "newer": "MD-PACK-03", "torn": "MD-PACK-06", "no": "MD-LIB-01"}
    for name, code in codes.items():
        refused = moet("run", name, "hi", "--json")
        assert refused.error_code == code
        assert refused.code in (ExitCode.DAMAGED, ExitCode.NOT_FOUND)


def test_rm__asks_or_wants_yes_and_leaves_foreign_files(moet: Command, packed: Path) -> None:
    assert moet("rm", "demo").code == ExitCode.USAGE
    assert packed.is_dir()
    (packed / "notes.txt").write_text("mine")
    removed = moet("rm", "demo", "--yes", "--json")
    assert removed.document["freed_bytes"] > 50_000_000
    assert [path.name for path in packed.iterdir()] == ["notes.txt"]
    assert moet("rm", "demo", "--yes").code == ExitCode.NOT_FOUND
    assert moet("rm", "../data", "--yes").code == ExitCode.NOT_FOUND


def test_rm__whole_folder_goes(moet: Command, packed: Path) -> None:
    (event,) = moet("rm", "demo", "--yes", "--format", "ndjson").events
    assert (event["event"], event["model"]) == ("removed", "demo")
    assert list(packed.parent.iterdir()) == []


def test_embedded_source__is_the_shipped_model(demo_source: Path) -> None:
    assert embedded_source() == demo_source


def test_library__interrupted_removal__is_finished_by_the_next(packed: Path) -> None:
    library = Library(packed.parent)
    packed.rename(packed.with_name(".removing-demo"))
    assert library.packs() == []
    shutil.copytree(packed.with_name(".removing-demo"), packed)
    library.remove("demo")
    assert list(packed.parent.iterdir()) == []


def test_library__another_format__made_again_only_when_the_source_is_here(packed: Path) -> None:
    library = Library(packed.parent)
    assert not library.needs_packing("demo")
    record = json.loads((packed / PACK_JSON).read_bytes())
    (packed / PACK_JSON).write_text(json.dumps(record | {"format": 99}))
    assert library.needs_packing("demo")
    library.drop_other_format("demo")
    assert library.needs_packing("demo")
    assert not packed.exists()
