"""Write docs/benchmarks.md and docs/step-time.md from bench/records, and docs/comparison.md with
bench/peers.toml beside.

    python tools/generate_benchmarks.py           write the pages
    python tools/generate_benchmarks.py --check   compare only; exit 1 if they are old

Every figure of ours stands in a record with its computer and commit; nothing is computed here but
units, and in step-time.md the least that a kernel could take. The same records give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moet_desk.engine.cuda.shapes import SHAPES, Shape

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records"
PEERS = ROOT / "bench" / "peers.toml"
PAGES = ROOT / "docs"
_NOTE = "<!-- Made by tools/generate_benchmarks.py from {source}; do not edit by hand. -->"
_CONTEXT = 8192  # of records of shapes
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

STEP_SHAPE = "deepseek-v4-flash"
LAUNCH_US = 1.0
"""No kernel of a captured graph takes less on an H200: copying a number per row takes 1.0 us."""

_FEW = 0.02  # ms; kernels below it share a line
_STEP = """\
A step of DeepSeek-V4-Flash's shape on {where}, {commit}, {date}: {step:.2f} ms at {hits} of
look-ups in slots and a context of {context:,} tokens ([record](../bench/records/{name})).
Kernels are the profiler's, per step. They add up to {sum:.2f} ms, more than the step, because
branches of its graph run side by side.{shared}

*At least* is the larger of two times: what the kernel must read of weights, at the rate that plain
copies reach on that card ({vram:.2f} TB/s; over PCIe {pcie:.1f} GB/s), and {launch:g} us per
launch. A dash under MB: it reads less than 1 MB a launch, which is nothing beside that. All *at
least* together are {least:.2f} ms. Why kernels take more:
[gpu.md](design/gpu.md#what-a-steps-time-is-made-of)."""

_SHARED = """ *Of the step* divides each instant among the kernels
that ran in it: {busy:.2f} ms, and {idle:.2f} in which none ran."""


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
        limit, ram = self.body.get("vram_limit_gib"), self.body.get("ram_limit_gib")
        within = f"{gpu}, {limit:g} GiB of it" if limit else str(gpu)
        return f"{within}, {ram:g} GiB of RAM and a drive" if ram else within

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
    measured = {str(r.body.get("shape")) for r in records if r.body.get("weights") == "synthetic"}
    for name, twin in sorted(measured_as(measured).items()):
        yield f"{name} was measured as {twin}: all sizes that a step depends on are the same."
        yield ""
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


def measured_as(measured: Set[str]) -> dict[str, str]:
    """Models that have no record of their own, and a measured one whose shape theirs equals."""
    shapes = {name: make(_CONTEXT) for name, make in SHAPES.items()}
    found = {}
    for name, shape in shapes.items():
        twins = (one for one in sorted(measured & set(shapes)) if _are_alike(shapes[one], shape))
        if name not in measured and (twin := next(twins, None)) is not None:
            found[name] = twin
    return found


def _are_alike(one: Shape, other: Shape) -> bool:
    return replace(one, name="") == replace(other, name="")


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


# -- a step by kernels -----------------------------------------------------------------------


def step_time_page(records: Sequence[Record]) -> str:
    """Kernel by kernel, what a step takes and the least that it could take."""
    name, body = newest_step({record.name: record.body for record in records})
    dense = dense_bytes()
    lines = [*step_text(name, body, dense), *table(_STEP_HEAD, kernel_rows(body, dense), figures=7)]
    return _page("A step's time", "bench/records", iter(lines))


def newest_step(bodies: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Name and body of the newest record of the shape's usual step that has times by kernel: one
    row, 2-bit, all rows in RAM.
    """
    usual = {
        "shape": STEP_SHAPE, "quality": "fast", "tokens_per_step": 1, "ram_limit_gib": None,
        "drafts": None,
    }  # fmt: skip
    found = {
        name: body
        for name, body in bodies.items()
        if all(body.get(key) == value for key, value in usual.items())
        and body["step_ms"].get("by_kernel")
    }
    name = max(found, key=lambda each: (str(found[each]["date"]), each))
    return name, found[name]


def dense_bytes() -> dict[str, int]:
    """Bytes of dense weights that a step of one row reads, by the kernel that reads them."""
    # Here, because torch comes with it, which the other pages do without.
    from moet_desk.engine.cuda.shapes import SHAPES
    from moet_desk.engine.cuda.synthetic import stored_bytes
    from moet_desk.engine.families.tensors import dense_shapes

    found: dict[str, int] = {}
    for name, size in dense_shapes(SHAPES[STEP_SHAPE](8192).spec):
        if len(size) == 2 and (kernel := _reader(name)) is not None:
            found[kernel] = found.get(kernel, 0) + stored_bytes(name, size)
    return found


def _reader(name: str) -> str | None:
    if name.endswith(("embed_tokens", "tid2eid", ".ape")):  # of which a line is read
        return None
    if name.endswith("_fn"):
        return "_advance_kernel"
    if name.endswith(("shared_experts.w1", "shared_experts.w3")):
        return "_swiglu_gemv_kernel"
    return "_gemv_kernel"


_FETCHES = ("_routed_fetch_kernel", "_fetch_kernel")
"""Kernels that read rows over PCIe; beside the first, the other reads what is brought ahead, and
what tables name, a few.
"""


def kernel_bytes(body: Mapping[str, Any], dense: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a step reads, by kernel; from VRAM, or of the fetch over PCIe."""
    moved, ahead = body["bytes_per_step"]["pcie"], body.get("ahead")
    early = lacked = 0.0  # shares of what was moved: brought ahead, and of that not needed
    if ahead is not None:
        early = ahead["rows_per_step"] / body["misses_per_step"]
        lacked = early - ahead["needed_per_step"] / body["misses_per_step"]
    experts = moved * (1 - lacked) / (1 - body["hit_rate"])  # of all look-ups
    fetches = next(name for name in _FETCHES if name in body["step_ms"]["by_kernel"])
    found = {**dense, "_gate_up_kernel": experts * 2 / 3, "_down_kernel": experts / 3}
    found[fetches] = moved * (1 - early)
    if early:
        found["_fetch_kernel"] = found.get("_fetch_kernel", 0.0) + moved * early
    return found


def kernel_rows(body: Mapping[str, Any], dense: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Cells of the table, and of the line for small kernels."""
    n_bytes, rows, few = kernel_bytes(body, dense), [], [0.0] * 4
    for kernel, seen in body["step_ms"]["by_kernel"].items():
        launches, ms, share = seen["launches"], seen["ms"], seen.get("share_ms", 0.0)
        if ms < _FEW:
            least = launches * LAUNCH_US / 1e3
            few = [a + b for a, b in zip(few, (launches, ms, share, least), strict=True)]
            continue
        least, size = least_ms(kernel, launches, body, n_bytes), n_bytes.get(kernel)
        rows.append((f"`{kernel}`", launches, ms, share, size, least))
    rows.append(("smaller ones", few[0], few[1], few[2], None, few[3]))
    return [
        (
            name, f"{launches:.0f}", f"{ms:.3f}", f"{share:.3f}" if share else "-",
            "-" if size is None else f"{size / 1e6:,.0f}",
            f"{least:.3f}", f"{1e3 * ms / launches:.1f}", f"{1e3 * (ms - least) / launches:.1f}",
        )
        for name, launches, ms, share, size, least in rows
    ]  # fmt: skip


def least_ms(
    kernel: str, launches: float, body: Mapping[str, Any], n_bytes: Mapping[str, float]
) -> float:
    """The larger of what bytes and what launches take."""
    link = "pcie" if kernel in _FETCHES else "vram"
    rate: float = body["measured_bw"][f"{link}_bytes_per_s"]
    return max(1e3 * n_bytes.get(kernel, 0) / rate, launches * LAUNCH_US / 1e3)


_STEP_HEAD = (
    "Kernel", "launches", "ms", "of the step", "MB", "at least, ms", "us per launch", "us above",
)  # fmt: skip


def step_text(name: str, body: Mapping[str, Any], dense: Mapping[str, int]) -> Iterator[str]:
    """What stands above the table."""
    kernels, n_bytes = body["step_ms"]["by_kernel"], kernel_bytes(body, dense)
    least = sum(least_ms(k, seen["launches"], body, n_bytes) for k, seen in kernels.items())
    busy = sum(seen.get("share_ms", 0.0) for seen in kernels.values())
    idle = body["step_ms"]["median"] - busy
    yield from _STEP.format(
        where=f"{body['gpu']}, {body['vram_limit_gib']:g} GiB of it",
        commit=body["commit"], date=str(body["date"])[:10], step=body["step_ms"]["median"],
        hits=f"{body['hit_rate']:.1%}".replace("%", " %"), context=body["context"], name=name,
        sum=sum(seen["ms"] for seen in kernels.values()),
        vram=body["measured_bw"]["vram_bytes_per_s"] / 1e12,
        pcie=body["measured_bw"]["pcie_bytes_per_s"] / 1e9, launch=LAUNCH_US, least=least,
        shared=_SHARED.format(busy=busy, idle=idle) if busy else "",
    ).splitlines()  # fmt: skip
    yield ""


# -- writing and comparing -------------------------------------------------------------------


def _page(title: str, source: str, lines: Iterator[str]) -> str:
    text = "\n".join([f"# {title}", "", _NOTE.format(source=source), "", *lines])
    return text.rstrip() + "\n"


def pages() -> dict[str, str]:
    """The pages, by file name."""
    records = load_records(RECORDS)
    peers = tomllib.loads(PEERS.read_text("utf-8"))
    return {
        "benchmarks.md": benchmarks_page(records),
        "comparison.md": comparison_page(records, peers),
        "step-time.md": step_time_page(records),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the pages of figures in docs.")
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
