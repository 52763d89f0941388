"""Write docs/benchmarks.md from bench/records, and docs/comparison.md with bench/peers.toml beside.

    python tools/generate_benchmarks.py           write the pages
    python tools/generate_benchmarks.py --check   compare only; exit 1 if they are old

Every figure of ours stands in a record with its computer and commit; nothing is computed here but
units. The same records give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records"
PEERS = ROOT / "bench" / "peers.toml"
PAGES = ROOT / "docs"
_NOTE = "<!-- Made by tools/generate_benchmarks.py from {source}; do not edit by hand. -->"
_SPEED = "decode_tok_per_s"

_MEASURED = """\
Everything that was measured and kept, newest first. A record names its computer, its commit and its
command; a commit that ends in -dirty had changes that were not committed yet. How to measure:
`moet-desk bench`, and the scripts in [bench](../bench). Beside other engines:
[comparison.md](comparison.md)."""
_MADE_UP = """\
These say how fast a step of that size is, and nothing about text: weights are random, and the
router is told which share of look-ups to answer from slots. The card is an H200, whose memory is
faster than a consumer card's; only its size is limited. **They are no figures of a consumer
card.**"""
_BESIDE = """\
One answer at a time. Who measured a figure stands beside it; we measured only our own, and ran none
of the others. **Rows are not like for like**: cards, memory, weights, prompts and versions differ,
and ours are made-up weights of that shape on a card whose memory is about 2.7 times as fast as an
RTX 5090's. Others' figures were read on DATE in stored copies of the pages named; they may have
changed. What is not known is a dash."""


@dataclass(frozen=True, slots=True)
class Record:
    """One file of bench/records."""

    name: str
    body: Mapping[str, Any]

    @property
    def date(self) -> str:
        return str(self.body.get("date") or self.name)[:10]

    @property
    def where(self) -> str:
        """What computed."""
        gpu = self.body.get("gpu")
        if gpu is None:
            cores = self.body.get("cores")
            return f"{cores} cores of a CPU" if cores else "CPU"
        limit = self.body.get("vram_limit_gib")
        return f"{gpu}, {limit:g} GiB of it" if limit else str(gpu)

    @property
    def link(self) -> str:
        return f"[record](../bench/records/{self.name})"

    @property
    def commit(self) -> str:
        return str(self.body.get("commit") or "-")


def load_records(folder: Path) -> list[Record]:
    """All records, the newest first, then by name."""
    found = [
        Record(path.name, json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")
    ]
    found.sort(key=lambda record: record.name)
    return sorted(found, key=lambda record: record.date, reverse=True)


def number(value: object, digits: int = 1) -> str:
    """A figure, or the median of several; "-" where there is none."""
    if isinstance(value, Mapping):
        value = value.get("median")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return f"{value:,.{digits}f}"


def share(value: object) -> str:
    """A part of one as a percentage."""
    return f"{value:.1%}".replace("%", " %") if isinstance(value, int | float) else "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, figures: int) -> Iterator[str]:
    """A table whose last but `figures` columns are words."""
    yield "| " + " | ".join(head) + " |"
    n_words = len(head) - figures
    yield "| " + " | ".join(["---"] * n_words + ["--:"] * figures) + " |"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


def speed_rows(records: Sequence[Record], weights: str) -> list[list[str]]:
    """Rows of what `moet-desk bench` measured with such weights."""
    rows = []
    for record in records:
        body = record.body
        if _SPEED not in body or body.get("weights") != weights:
            continue
        rows.append(
            [
                f"{body.get('shape', '-')}{_stand_in(body)} ({record.link})",
                str(body.get("quality") or "fast"),
                record.where,
                f"{record.date}, {record.commit[:7]}",
                number(body[_SPEED]),
                number(body.get("prefill_tok_per_s"), 0),
                number(body.get("step_ms"), 2),
                share(body.get("hit_rate")),
                share(body.get("roofline_ratio")),
            ]
        )
    return rows


_HEAD = (
    "Model", "Quality", "On", "Date, commit", "tokens/s", "prompt tokens/s", "ms per step",
    "look-ups in slots", "of the memory's rate",
)  # fmt: skip


def benchmarks_page(records: Sequence[Record]) -> str:
    """The page of all records."""
    return _page("Benchmarks", "bench/records", _benchmarks(records))


def _benchmarks(records: Sequence[Record]) -> Iterator[str]:
    yield from _MEASURED.splitlines()
    yield ""
    yield "## Real weights"
    yield ""
    yield "Only the demo model has been run with its own weights so far."
    yield ""
    yield from table(_HEAD, speed_rows(records, "real"), figures=5)
    yield "## Shapes of large models, made-up weights"
    yield ""
    yield from _MADE_UP.splitlines()
    yield ""
    yield from table(_HEAD, speed_rows(records, "synthetic"), figures=5)
    notes = {str(record.body["note"]): None for record in records if record.body.get("note")}
    if notes:
        yield "Notes in these records:"
        yield ""
        yield from (f"- {' '.join(note.split())}" for note in notes)
        yield ""
    yield "## Other records"
    yield ""
    rows = [
        [record.date, record.where, _what(record), record.link]
        for record in records
        if _SPEED not in record.body
    ]
    yield from table(("Date", "On", "What was measured", "Figures"), rows, figures=0)


def _what(record: Record) -> str:
    body = record.body
    kind = body.get("kind")
    words = body.get("what") or body.get("method") or (f"packing, {kind}" if kind else None)
    return " ".join(str(words or body.get("command") or record.name).split())


# -- beside other engines --------------------------------------------------------------------


def comparison_page(records: Sequence[Record], peers: Mapping[str, Any]) -> str:
    """Our figures and those of others, model by model."""
    return _page("Comparison", "bench/records and bench/peers.toml", _comparison(records, peers))


def _comparison(records: Sequence[Record], peers: Mapping[str, Any]) -> Iterator[str]:
    yield from _BESIDE.replace("DATE", peers["read"]).splitlines()
    yield ""
    for model in peers["model"]:
        yield f"## {model['title']}"
        yield ""
        rows = [_our_row(record) for record in records if _is_of(record, model["shapes"])]
        rows += [_peer_row(peer, peers["source"]) for peer in model.get("peer", ())]
        head = ("Engine", "Format", "On", "Measured by", "Source", "tokens/s", "prompt tokens/s")
        yield from table(head, rows, figures=2)
        if not any(_is_of(record, model["shapes"]) for record in records):
            yield "Ours: not measured."
            yield ""
    yield "## Sources"
    yield ""
    for name, source in peers["source"].items():
        yield f"- **{name}**: {source}"


def _is_of(record: Record, shapes: Sequence[str]) -> bool:
    return _SPEED in record.body and record.body.get("shape") in shapes


def _stand_in(body: Mapping[str, Any]) -> str:
    """That another attention stands in for the model's, as notes of older records say."""
    return ", stand-in attention" if "stands in for" in str(body.get("note")) else ""


def _our_row(record: Record) -> list[str]:
    body = record.body
    quality = str(body.get("quality") or "fast")
    bits = {"fast": "2.25 bit", "exact": "FP4", "balanced": "2.25 bit and FP4"}[quality]
    more = f", {share(body.get('hit_rate'))} of look-ups in slots"
    return [
        f"**moet-desk** {record.commit[:7]}, {quality}{more}",
        f"{bits}, {'made-up' if body.get('weights') == 'synthetic' else 'real'} weights"
        f"{_stand_in(body)}",
        record.where,
        f"us, {record.date}",
        record.link,
        number(body[_SPEED]),
        number(body.get("prefill_tok_per_s"), 0),
    ]


def _peer_row(peer: Mapping[str, str], sources: Mapping[str, str]) -> list[str]:
    if peer["source"] not in sources:
        raise LookupError(f"no source {peer['source']}")
    return [
        peer["engine"], peer["format"], peer["on"], peer["by"],
        f"{peer['source']}, {peer['place']}", peer["decode"], peer.get("prefill", "-"),
    ]  # fmt: skip


# -- writing and comparing -------------------------------------------------------------------


def _page(title: str, source: str, lines: Iterator[str]) -> str:
    text = "\n".join([f"# {title}", "", _NOTE.format(source=source), "", *lines])
    return text.rstrip() + "\n"


def pages() -> dict[str, str]:
    """Both pages, by file name."""
    records = load_records(RECORDS)
    peers = tomllib.loads(PEERS.read_text("utf-8"))
    return {
        "benchmarks.md": benchmarks_page(records),
        "comparison.md": comparison_page(records, peers),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/benchmarks.md and docs/comparison.md.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if they differ")
    parser.add_argument("--out", type=Path, default=PAGES, help="folder of the pages")
    given = parser.parse_args(arguments)
    old = []
    for name, text in pages().items():
        path = given.out / name
        if not given.check:
            path.write_text(text, "utf-8")
        elif not path.is_file() or path.read_text("utf-8") != text:
            old.append(name)
    if old:
        words = " and ".join(old)
        sys.stderr.write(f"{words}: old. Run: python tools/generate_benchmarks.py\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
