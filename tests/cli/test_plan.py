"""`plan`, `doctor` and `ls --available`: what they print, and their exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moet_desk import catalogue, hardware
from moet_desk.engine.cuda import bandwidth
from moet_desk.engine.handle import EngineOptions
from moet_desk.errors import ExitCode
from moet_desk.machine import Memory, Rates, from_json
from moet_desk.probing import gpus, rates
from moet_desk.units import GIB, MIB
from tests.cli.conftest import Command

MACHINES = Path(__file__).resolve().parents[1] / "data" / "machines"
DESK = str(MACHINES / "5090-96gb.json")


@pytest.fixture(autouse=True)
def _any_device(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These commands choose the device of the record, not of this computer."""
    monkeypatch.delenv("MOET_DESK_ENGINE_DEVICE", raising=False)


# -- plan ------------------------------------------------------------------------------------


def test_plan__a_model_that_runs_and_fits__table_and_0(moet: Command, data_dir: Path) -> None:
    ran = moet("plan", "deepseek-v3.1", "--machine", DESK)
    assert ran.code == ExitCode.OK
    for words in ("2-bit pool", "hot FP4 set", "RTX 5090", "8,192 tokens", "Forecast, not a"):
        assert words in ran.out
    assert ran.err == ""


def test_plan__json__bytes_add_up(moet: Command, data_dir: Path) -> None:
    ran = moet("plan", "deepseek-ai/DeepSeek-V3.1", "--machine", DESK, "--json")
    document = ran.document
    assert (document["schema"], document["model"], document["fits"]) == (1, "deepseek-v3.1", True)
    parts = document["parts"]
    on_card = sum(parts[name] for name in parts if name.endswith("_bytes"))
    assert document["gpu"]["used_bytes"] == on_card <= document["gpu"]["budget_bytes"]
    ram = document["ram"]
    rows = ram["base_rows_bytes"] + ram["fine_rows_bytes"]
    assert rows + ram["prefix_bytes"] == ram["used_bytes"]
    assert ram["prefix_bytes"] > 10**9  # 1/32 of what may be taken
    assert ram["used_bytes"] <= ram["budget_bytes"]
    low, high = document["forecast"]["decode_tok_per_s"]
    assert 0 < low < high
    assert document["forecast"]["kind"] == "forecast"
    assert set(document["forecast"]["basis"]) == {"VRAM", "PCIe", "drive"}


def test_plan__wishes__are_limits(moet: Command, data_dir: Path) -> None:
    asked = ["--context", "4096", "--ram", "32GiB", "--vram", "26GiB", "--kv-format", "nvfp4"]
    document = moet("plan", "deepseek-v3.1", "--machine", DESK, "--json", *asked).document
    assert (document["context_tokens"], document["kv_format"]) == (4096, "nvfp4")
    assert document["ram"]["budget_bytes"] == 32 * GIB
    assert document["gpu"]["budget_bytes"] == 26 * GIB


def test_plan__too_little_vram__refused_with_figures_and_5(moet: Command, data_dir: Path) -> None:
    ran = moet("plan", "deepseek-v3.1", "--machine", DESK, "--vram", "16GiB")
    assert ran.code == ExitCode.NO_ROOM
    assert "may use 16.0 GiB" in ran.out
    assert "17.8 GiB" in ran.out  # the dense stack
    assert "MD-GPU-05" in ran.err
    again = moet("plan", "deepseek-v3.1", "--machine", DESK, "--vram", "16GiB", "--json")
    assert again.code == ExitCode.NO_ROOM
    assert again.document["error"]["code"] == "MD-GPU-05"
    # the nearest plan gives up the limit that was set
    assert again.document["nearest"]["changes"] == ["without --ram and --vram"]


def test_plan__context_too_long__the_nearest_command_works(moet: Command, data_dir: Path) -> None:
    ran = moet("plan", "deepseek-v3.1", "--machine", DESK, "--context", "163840")
    assert ran.code == ExitCode.NO_ROOM
    line = next(row for row in ran.out.splitlines() if row.startswith("The nearest plan"))
    command = line.partition("moet-desk ")[2].split()
    assert moet(*command, "--machine", DESK).code == ExitCode.OK


@pytest.fixture
def _v4_not_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a model of the list did not run here yet."""
    entries = tuple(
        replace(entry, not_yet="its layers are not written")
        if entry.name == "deepseek-v4-flash"
        else entry
        for entry in catalogue.load_catalogue()
    )
    monkeypatch.setattr(catalogue, "load_catalogue", lambda: entries)


@pytest.mark.usefixtures("_v4_not_yet")
def test_plan__a_family_that_is_not_written__shows_it_and_4(moet: Command, data_dir: Path) -> None:
    ran = moet("plan", "deepseek-v4-flash", "--machine", DESK)
    assert ran.code == ExitCode.UNFIT
    assert "Does not run yet" in ran.out
    assert "its layers are not written" in ran.err
    assert "2-bit rows" in ran.out
    assert "MD-PLAN-04" in ran.err
    document = moet("plan", "deepseek-v4-flash", "--machine", DESK, "--json").document
    assert (document["fits"], document["runs"]) == (True, False)


def test_plan__a_card_that_cannot_be_used_yet__says_what_is_in_the_way(
    moet: Command, data_dir: Path
) -> None:
    ran = moet("plan", "gpt-oss-20b", "--machine", str(MACHINES / "laptop-8gb.json"))
    assert "Before the card can be used: The driver is too old for torch." in ran.out
    assert "Before the card can be used: Kernels cannot be compiled." in ran.out
    document = moet("plan", "deepseek-v3.1", "--machine", DESK, "--json").document
    assert document["obstacles"] == []


def test_plan__no_such_model__3(moet: Command, data_dir: Path) -> None:
    assert moet("plan", "no-such", "--machine", DESK).code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("content", ["{}", "no json", '{"memory": 5}', None])
def test_plan__a_file_that_is_no_record__2(
    moet: Command, data_dir: Path, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    ran = moet("plan", "deepseek-v3.1", "--machine", str(path), "--json")
    assert ran.code == ExitCode.USAGE
    assert ran.error_code == "MD-PLAN-05"


def test_plan__an_installed_pack__the_plan_that_the_engine_loads(
    moet: Command, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = from_json((MACHINES / "cpu-only.json").read_bytes())
    document = moet("plan", "demo", "--machine", str(MACHINES / "cpu-only.json"), "--json").document
    assert document["fits"]
    assert document["disk"]["installed"]

    from moet_desk.engine.loader import load

    available = Memory(total=record.memory.total, available=record.memory.available)
    monkeypatch.setattr(hardware, "read_memory", lambda: available)
    core = load(data_dir / "models" / "demo", EngineOptions(save_heat=False, prefix_bytes=None))
    try:
        plan, parts, ram = core.plan, document["parts"], document["ram"]
        assert (parts["base_slots"], parts["fine_slots"]) == (plan.base_slots, plan.fine_slots)
        assert ram["base_rows"], ram["fine_rows"] == (plan.arena_base_rows, plan.arena_fine_rows)
        assert ram["prefix_bytes"] == core.prefix_bytes > 10**8
        assert ram["used_bytes"] == plan.bytes_total + core.prefix_bytes
        assert document["context_tokens"] == plan.context
    finally:
        core.close()


# -- ls --available --------------------------------------------------------------------------


@pytest.mark.usefixtures("_v4_not_yet")
def test_available__models_that_run_first_in_the_fit_table(moet: Command, data_dir: Path) -> None:
    ran = moet("ls", "--available", "--fit", "--machine", DESK)
    assert ran.code == ExitCode.OK
    lines = ran.out.splitlines()
    runs = [line.split()[1] for line in lines[1:-1]]
    n_running = runs.count("yes")
    assert 2 <= n_running < len(runs)
    assert set(runs[:n_running]) == {"yes"}
    models = moet("ls", "--available", "--json").document["models"]
    assert len(models) == len(lines) - 2
    running = {model["name"] for model in models if model["runs"]}
    assert running == {line.split()[0] for line in lines[1 : 1 + n_running]}
    assert all(model["not_yet"] for model in models if not model["runs"])


def test_available__fit_as_events__one_per_model(moet: Command, data_dir: Path) -> None:
    events = moet("ls", "--available", "--machine", DESK, "--format", "ndjson").events
    fits = {event["name"]: event["fits"] for event in events}
    assert fits["deepseek-v3.1"]
    assert fits["longcat-flash"]


def test_plan__dense_weights_that_do_not_fit__rounded_and_said_so(
    moet: Command, data_dir: Path
) -> None:
    ran = moet("plan", "glm-5.2", "--machine", DESK)
    assert ran.code == ExitCode.OK
    assert "rounded to 8 bits (34.7 GiB as stored)" in ran.out
    parts = moet("plan", "glm-5.2", "--machine", DESK, "--json").document["parts"]
    assert parts["dense_format"] == "int8"
    stored = moet("plan", "glm-5.2", "--machine", DESK, "--dense-format", "stored")
    assert stored.code != ExitCode.OK


def test_ls__fit_without_available__2(moet: Command, data_dir: Path) -> None:
    assert moet("ls", "--fit").code == ExitCode.USAGE


# -- doctor ----------------------------------------------------------------------------------


def test_doctor__recorded_computers__exit_codes(moet: Command, data_dir: Path) -> None:
    assert moet("doctor", "--machine", DESK, "--strict").code == ExitCode.OK
    laptop = str(MACHINES / "laptop-8gb.json")
    assert moet("doctor", "--machine", laptop).code == ExitCode.OK
    ran = moet("doctor", "--machine", laptop, "--strict")
    assert ran.code == ExitCode.STRICT
    for words in ("too old for torch", "a C compiler", "Do: ", "2.0 GiB of programs"):
        assert words in ran.out


def test_doctor__json__findings_and_facts(moet: Command, data_dir: Path) -> None:
    document = moet("doctor", "--machine", str(MACHINES / "wsl-5090.json"), "--json").document
    assert not document["ok"]
    checks = [finding["check"] for finding in document["findings"]]
    assert checks == ["wsl", "display"]
    assert set(document["findings"][0]) == {"check", "severity", "title", "cause", "do"}
    assert document["machine"]["is_wsl"]


def test_doctor__record__without_names_and_can_be_planned_for(
    moet: Command, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "mine.json"
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert moet("doctor", "--record", str(record)).code == ExitCode.OK
    assert str(tmp_path) not in record.read_text()
    found = from_json(record.read_bytes())
    assert found.drives[0].folder == "~/data/models"
    assert found.memory.total > 0
    assert moet("ls", "--available", "--machine", str(record)).code == ExitCode.OK


def test_doctor__bench__rates_are_kept_and_used(
    moet: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "_READ_FILE", 16 * MIB)
    monkeypatch.setattr(rates, "_READ_S", 0.1)
    monkeypatch.setattr(rates, "_RAM_S", 0.05)
    assert moet("doctor", "--bench").code == ExitCode.OK
    kept = json.loads((data_dir / rates.RATES_FILE).read_text())
    document = moet("doctor", "--json").document
    assert document["machine"]["rates"]["ram_copy"] == kept["ram_copy"] > 0
    assert "measured" in document["passed"]


def test_doctor__bench_with_a_card__its_rates_too(
    moet: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = from_json((MACHINES / "5090-96gb.json").read_bytes())
    card = hardware.Accelerator("card", (12, 0), has_triton=True, can_compile=True)
    monkeypatch.setattr(gpus, "look_for_gpus", lambda: gpus.FoundGpus(gpus=record.gpus))
    monkeypatch.setattr(hardware, "probe_accelerator", lambda: card)
    monkeypatch.setattr(hardware, "take_card", lambda: None)
    monkeypatch.setattr(
        bandwidth, "measure_card", lambda: bandwidth.Bandwidth(vram=1.5e12, pcie=5.1e10)
    )
    monkeypatch.setattr(rates, "measure", lambda *_: Rates(measured="2026-11-29T00:00:00Z"))
    assert moet("doctor", "--bench").code == ExitCode.OK
    kept = rates.read_rates(data_dir)
    assert kept is not None
    assert (kept.pcie, kept.vram) == (5.1e10, 1.5e12)


def test_doctor__fix__said_then_the_findings(
    moet: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Path] = []

    def measure(folder: Path, say: Any) -> Rates:
        measured.append(folder)
        return Rates(measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), ram_copy=1e9)

    monkeypatch.setattr(rates, "measure", measure)
    document = moet("doctor", "--fix", "--json").document
    assert f"made the folder {data_dir}" in document["fixed"]
    assert document["not_fixed"] == []
    assert "measured" in document["passed"]
    assert len(measured) == 1
    (data_dir / "app.json").write_text("{}")
    (data_dir / "app.json").chmod(0o644)
    ran = moet("doctor", "--fix")
    assert f"Made {data_dir / 'app.json'} readable by you alone." in ran.out
    assert len(measured) == 1  # it is new enough
    assert "nothing to put in order" in moet("doctor", "--fix").out
    rates.save_rates(data_dir, Rates(measured="2020-01-01T00:00:00Z"))
    events = moet("doctor", "--fix", "--format", "ndjson").events
    assert len(measured) == 2
    assert events[-1]["event"] == "doctor"
    assert moet("doctor", "--fix", "--machine", DESK).code == ExitCode.USAGE


def test_doctor__a_damaged_pack__named(moet: Command, data_dir: Path) -> None:
    folder = data_dir / "models" / "broken"
    folder.mkdir(parents=True)
    (folder / "pack.json").write_text("{}")
    findings = moet("doctor", "--json").document["findings"]
    assert any(row["check"] == "packs" and "broken" in row["cause"] for row in findings)
