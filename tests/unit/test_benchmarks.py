"""The pages of figures: made from the records, and nothing beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moet_desk.catalogue import load_catalogue
from tools import generate_benchmarks as made


def test_pages__are_what_the_records_say() -> None:
    assert made.main(["--check"]) == 0


def test_check__notices_another_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made.main(["--out", str(tmp_path)])
    assert made.main(["--check", "--out", str(tmp_path)]) == 0
    path = tmp_path / "benchmarks.md"
    path.write_text(path.read_text().replace("54.2", "94.2"))
    assert made.main(["--check", "--out", str(tmp_path)]) == 1
    assert "benchmarks.md: old" in capsys.readouterr().err


def test_benchmarks__every_record_once_with_its_figures() -> None:
    page = made.pages()["benchmarks.md"]
    for path in made.RECORDS.glob("*.json"):
        assert page.count(f"bench/records/{path.name})") == 1, path.name
    record = json.loads((made.RECORDS / "2026-11-29-cpu-demo-exact.json").read_text())
    line = next(line for line in page.splitlines() if "2026-11-29-cpu-demo-exact" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == ["exact", "2 cores of a CPU", "2026-11-29, 865d660"]
    assert cells[4] == f"{record['decode_tok_per_s']['median']:.1f}"


def test_shapes__every_model_of_the_catalogue__measured_itself_or_as_one_of_the_same_sizes() -> (
    None
):
    own = {
        r.body["shape"]
        for r in made.load_records(made.RECORDS)
        if r.body.get("weights") == "synthetic"
    }
    others = made.measured_as(own)
    assert {entry.name for entry in load_catalogue()} <= own | set(others)
    assert others["deepseek-r1"] == "deepseek-v3.1"
    assert "deepseek-r1 was measured as deepseek-v3.1" in made.pages()["benchmarks.md"]
    assert "deepseek-v3.1" not in made.measured_as(own - {"deepseek-v3.1", "deepseek-r1"})


def test_made_up_weights__never_stand_under_real_ones() -> None:
    real, _, rest = made.pages()["benchmarks.md"].partition("## Shapes of large models")
    assert "-shape-" not in real
    assert "cpu-demo-fast.json" not in rest


def test_comparison__every_row_says_who_measured_and_where() -> None:
    page = made.pages()["comparison.md"]
    tables = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [line.strip("|").split("|") for line in tables if not line.startswith("| Engine")]
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 7
        assert all(cell.strip() for cell in row)
        ours = "**moet-desk**" in row[0]
        assert ("us, 20" in row[3]) is ours
        assert ("[record]" in row[4]) is ours
        assert re.search(r"\d", row[5])


def test_comparison__a_source_must_be_named() -> None:
    words = ("engine", "format", "on", "by", "place", "decode")
    peer = {**dict.fromkeys(words, "1"), "source": "x"}
    model = {"title": "m", "shapes": [], "peer": [peer]}
    peers = {"read": "today", "source": {}, "model": [model]}
    with pytest.raises(LookupError, match="no source x"):
        made.comparison_page([], peers)


def test_step_time__bytes_and_launches_of_the_newest_record() -> None:
    seen = {
        "_gemv_kernel": {"launches": 100.0, "ms": 3.0, "share_ms": 2.5},
        "_a": {"launches": 2.0, "ms": 0.01, "share_ms": 0.005},
        "_fetch_kernel": {"launches": 43.0, "ms": 0.5},
    }
    body = {
        "shape": made.STEP_SHAPE, "quality": "fast", "tokens_per_step": 1, "ram_limit_gib": None,
        "date": "2026-11-30T14:00", "hit_rate": 0.75,
        "step_ms": {"by_kernel": seen}, "bytes_per_step": {"pcie": 20_000_000},
        "measured_bw": {"vram_bytes_per_s": 4e12, "pcie_bytes_per_s": 50e9},
    }  # fmt: skip
    older = {**body, "date": "2026-11-30T09:00"}
    without = {**body, "date": "2026-12-01", "step_ms": {"by_kernel": None}}
    others = {
        "d": {**body, "quality": "exact"}, "e": {**body, "tokens_per_step": 2},
        "f": {**body, "ram_limit_gib": 64.0}, "g": {**body, "drafts": {"depth": 1}},
    }  # fmt: skip
    newest = {name: {**other, "date": "2026-12-02"} for name, other in others.items()}
    assert made.newest_step({"b": older, "a": body, "c": without, **newest}) == ("a", body)
    rows = made.kernel_rows(body, {"_gemv_kernel": 8_000_000_000})
    assert rows == [
        ("`_gemv_kernel`", "100", "3.000", "2.500", "8,000", "2.000", "30.0", "10.0"),
        ("`_fetch_kernel`", "43", "0.500", "-", "20", "0.400", "11.6", "2.3"),
        ("smaller ones", "2", "0.010", "0.005", "-", "0.002", "5.0", "4.0"),
    ]
    seen["_routed_fetch_kernel"] = {"launches": 40.0, "ms": 0.5}
    rows = made.kernel_rows(body, {})
    assert rows[1][:6] == ("`_fetch_kernel`", "43", "0.500", "-", "-", "0.043")
    assert rows[2][:6] == ("`_routed_fetch_kernel`", "40", "0.500", "-", "20", "0.400")
    parts = made.kernel_bytes(body, {})
    assert parts["_gate_up_kernel"] + parts["_down_kernel"] == 80_000_000
    ahead = {"rows_per_step": 6.0, "needed_per_step": 4.0}
    parts = made.kernel_bytes({**body, "misses_per_step": 10.0, "ahead": ahead}, {})
    assert parts["_routed_fetch_kernel"] == pytest.approx(8_000_000)
    assert parts["_fetch_kernel"] == pytest.approx(12_000_000)
    experts = parts["_gate_up_kernel"] + parts["_down_kernel"]
    assert experts == pytest.approx(64_000_000)  # two of ten rows were nobody's


def test_step_time__every_dense_weight_of_the_shape_is_read_by_a_kernel() -> None:
    page = made.pages()["step-time.md"]
    (gemv,) = (line for line in page.splitlines() if line.startswith("| `_gemv_kernel`"))
    dense = made.dense_bytes()
    assert f" {dense['_gemv_kernel'] / 1e6:,.0f} " in gemv
    assert 7.6e9 < sum(dense.values()) < 7.9e9
