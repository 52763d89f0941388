"""handoff vllm: only options that vLLM documents, and an estimate that follows from the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk.catalogue import CatalogueEntry, load_catalogue
from moet_desk.cli.handoff import size_up, vllm_config
from moet_desk.errors import ExitCode
from moet_desk.units import GB, GIB
from tests.cli.conftest import Command

# docs.vllm.ai: "Server Arguments" and "Parallelism and Scaling", read 2026-11-30
DOCUMENTED = {
    "model", "served-model-name", "max-model-len", "tensor-parallel-size",
    "pipeline-parallel-size", "distributed-executor-backend",
}  # fmt: skip


def entry_of(name: str) -> CatalogueEntry:
    return next(entry for entry in load_catalogue() if entry.name == name)


def options_in(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("entry", load_catalogue(), ids=lambda entry: entry.name)
def test_every_known_model__documented_options_and_gpus_that_hold_it(entry: CatalogueEntry) -> None:
    sizing = size_up(entry, gpu_bytes=80 * GIB, context=entry.context, gpus=None, nodes=None)
    options = options_in(vllm_config(entry, sizing, gpu_bytes=80 * GIB, context=entry.context))
    assert set(options) <= DOCUMENTED
    assert options["model"] == entry.repo
    gpus, nodes = int(options["tensor-parallel-size"]), int(options["pipeline-parallel-size"])
    assert entry.heads % gpus == 0
    assert gpus * nodes * 68 * GIB >= sizing.weights  # 0.9 x 80 GiB without 4 GiB
    assert (options.get("distributed-executor-backend") == "ray") is (nodes > 1)
    if gpus > 1 or nodes > 1:  # fewer do not
        fewer = (gpus // 2, 1) if nodes == 1 else (gpus, nodes - 1)
        small = size_up(
            entry, gpu_bytes=80 * GIB, context=entry.context, gpus=fewer[0], nodes=fewer[1]
        )
        assert not small.fits


def test_size_up__figures_of_one_model_by_hand() -> None:
    entry = entry_of("gpt-oss-120b")  # 65 GB published; 8 key heads
    sizing = size_up(entry, gpu_bytes=80 * GIB, context=1024, gpus=4, nodes=2)
    kv = 1024 * entry.kv_bytes["bf16"]
    assert (sizing.weights, sizing.is_published, sizing.kv) == (65 * GB, True, kv)
    assert sizing.need_per_gpu == pytest.approx(65 * GB / 8 + kv / 8, abs=2)
    assert sizing.room_per_gpu == 68 * GIB
    latent = entry_of("deepseek-v3.1")
    one = size_up(latent, gpu_bytes=80 * GIB, context=1024, gpus=8, nodes=2)
    kv = 1024 * latent.kv_bytes["bf16"]
    assert one.need_per_gpu == pytest.approx(latent.weight_bytes / 16 + kv / 2, abs=2)


def test_weight_bytes__near_what_is_published() -> None:
    for entry in load_catalogue():
        if entry.download_bytes is not None:  # downloads may hold an MTP head too
            assert 0.92 < entry.weight_bytes / entry.download_bytes < 1.01, entry.name


def test_vllm__prints_and_writes_a_new_file(moet: Command, tmp_path: Path) -> None:
    out = tmp_path / "v3.yaml"
    shown = moet("handoff", "vllm", "deepseek-v3.1", "--context", "8192", "--out", str(out))
    assert shown.code == 0
    assert shown.out == out.read_text()
    assert "ray start --head --port=6379" in shown.out
    assert "Estimate, not tried" in shown.out
    assert options_in(shown.out)["max-model-len"] == "8192"
    again = moet("handoff", "vllm", "deepseek-v3.1", "--out", str(out))
    assert (again.code, "MD-DISK-03" in again.err) == (ExitCode.USAGE, True)


def test_vllm__too_few_gpus__says_so(moet: Command) -> None:
    shown = moet("handoff", "vllm", "deepseek-v3.1", "--gpus", "4", "--nodes", "1", "--json")
    assert (shown.document["fits"], shown.document["is_estimate"]) == (False, True)
    assert "does NOT fit" in shown.document["config"]
    assert "does not fit" in shown.err


def test_vllm__refused(moet: Command) -> None:
    assert "MD-CAT-02" in moet("handoff", "vllm", "nothing").err
    assert moet("handoff", "vllm", "gpt-oss-20b", "--gpus", "3").code == ExitCode.USAGE
