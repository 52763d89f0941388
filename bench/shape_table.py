"""Records of `moet-desk bench --shape` as a Markdown table.

Run as `python -m bench.shape_table RECORD...` from the repository's root.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HEADS = (
    "model", "experts in slots", "hits", "tokens/s", "step ms", "prompt tokens/s", "peak VRAM GiB",
    "of roofline",
)  # fmt: skip


def cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table; "–" for what was not measured."""
    note = " (stand-in)" if record["note"] else ""
    return (
        record["shape"] + note,
        f"{record['base_slots']} of {record['rows']}",
        f"{100 * record['hit_rate']:.1f} %",
        _shown(record["decode_tok_per_s"]),
        _shown(record["step_ms"]["median"]),
        _shown(record["prefill_tok_per_s"]),
        _shown(record["peak_vram_gib"]),
        _shown(record["roofline_ratio"]),
    )


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """All records by falling speed, under a line that says where they were measured."""
    ordered = sorted(records, key=lambda record: -record["decode_tok_per_s"])
    places = {
        f"{record['gpu']}, {record['vram_limit_gib']} GiB of VRAM, context {record['context']},"
        f" {record['quality']}, made-up weights, commit {record['commit']}"
        for record in ordered
    }
    rows = [HEADS, ("---", *["---:"] * (len(HEADS) - 1)), *map(cells, ordered)]
    return "\n".join([*sorted(places), "", *(f"| {' | '.join(row)} |" for row in rows)])


def _shown(value: float | None) -> str:
    return "–" if value is None else str(value)


def main(paths: list[str]) -> int:
    sys.stdout.write(table(json.loads(Path(path).read_text()) for path in paths) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
