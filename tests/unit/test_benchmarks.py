"""The pages of figures: made from the records, and nothing beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

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
