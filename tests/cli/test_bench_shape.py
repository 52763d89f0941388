"""`bench --shape`: refusals, the record and the text, with a measurement that is made up too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import shape_table
from moet_desk.cli import bench_shape
from moet_desk.engine.cuda import measure as measuring
from moet_desk.engine.cuda.bandwidth import Bandwidth
from moet_desk.engine.cuda.kernel_groups import KernelTime
from moet_desk.engine.cuda.measured import DraftFigures, DriveFigures, Figures, Setup, Steps
from moet_desk.engine.cuda.shapes import KNOWN, SHAPES
from moet_desk.errors import ExitCode
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import ReadTimes
from moet_desk.units import GIB
from tests.cli.conftest import Command

FIELDS = """
gpu driver cpu ram_gib os commit date command shape weights vram_limit_gib ram_limit_gib hit_rate
tokens_per_step acceptance context decode_tok_per_s prefill_tok_per_s step_ms bytes_per_step
measured_bw roofline_ratio peak_vram_gib peak_rss_gib repeats
""".split()

FIGURES = Figures(
    steps=Steps(tuple(8 + i / 100 for i in range(301)), 0.9612, 10.01, 258.0),
    n_slots=3386,
    n_fine_slots=0,
    attempts=4,
    vram_bytes=10_000_000_000,
    pcie_bytes=70_850_000,
    by_group={
        "attention": 2.0, "dense": 3.5, "router_lookup": 0.5, "fetch": 1.5, "experts": 1.0,
        "sampling": 0.25, "norms_other": 0.25, "gaps_host": 0.5,
    },
    bandwidth=Bandwidth(vram=4e12, pcie=50e9),
    prefill_tok_per_s=None,
    peak_vram_bytes=31 * GIB,
    by_kernel={
        "_gemv_kernel": KernelTime(259.0, 3.50049, 3.0, 0.25),
        "_fetch_kernel": KernelTime(43.0, 1.5, 1.25, 0.0),
    },
)  # fmt: skip


class FakeCard:
    """Stands for a card: notes what is to be measured and answers at once."""

    def __init__(self) -> None:
        self.figures = FIGURES
        self.setups: list[Setup] = []
        self.hit_rates: list[float] = []

    def measure(self, setup: Setup, *, hit_rate: float, progress: Any) -> Figures:
        self.setups.append(setup)
        self.hit_rates.append(hit_rate)
        progress("Pinning rows")
        return self.figures


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    fake = FakeCard()
    monkeypatch.setattr(bench_shape, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench_shape, "_gpu", lambda _: {"gpu": "NVIDIA X", "driver": "580.1"})
    monkeypatch.setattr(bench_shape, "_vram_bytes", lambda _, limit: limit or 24 * GIB)
    monkeypatch.setattr(measuring, "measure", fake.measure)
    return fake


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_shape__no_gpu__says_so_and_what_to_do(moet: Command) -> None:
    result = moet("bench", "--shape", "gpt-oss-120b", "--json")
    assert result.code == ExitCode.UNFIT
    assert result.error_code == "MD-GPU-01"
    assert "nvidia-smi" in result.err


def test_bench_shape__ram_limit_below_a_step__refused_with_both_sizes(
    moet: Command, card: FakeCard
) -> None:
    result = moet("bench", "--shape", "deepseek-v4-flash", "--ram-limit", "64MiB", "--json")
    assert result.code == ExitCode.NO_ROOM
    assert result.error_code == "MD-RAM-05"
    assert "81.0 MiB" in result.err
    assert "64.0 MiB" in result.err
    assert card.setups == []


def test_bench_shape__rows_over_the_ram_limit__read_from_the_drive_of_the_models(
    moet: Command, card: FakeCard, data_dir: Path
) -> None:
    drive = DriveFigures(3e9, ReadTimes(2.0, 3.0, 4.0, direct=True), direct=True)
    steps = replace(FIGURES.steps, drive_rows=2.5, drive_bytes=17_694_720.0)
    card.figures = replace(FIGURES, steps=steps, drive=drive)
    arguments = ("bench", "--shape", "deepseek-v4-flash", "--ram-limit", "64GiB")
    record = moet(*arguments, "--json").document
    (setup,) = card.setups
    assert (setup.uses_drive, setup.folder) == (True, data_dir / "models")
    assert record["bytes_per_step"]["nvme"] == 17_694_720
    assert record["drive"] == {
        "rows_per_step": 2.5, "rows_in_ram": {"base": 9709}, "bytes_per_s": 3_000_000_000,
        "read_ms": {"p50_ms": 2.0, "p95_ms": 3.0, "p99_ms": 4.0, "direct": True}, "direct": True,
    }  # fmt: skip
    assert "17.7 MB per step (2.5 rows), reads reach 3.0 GB/s" in moet(*arguments).out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "gpt-5"], "'gpt-5' is not one of 'qwen3-30b-a3"),
        (["--shape", "glm-5.2", "--vram-limit", "lots"], "lots"),
        (["--shape", "glm-5.2", "--hit-rate", "96"], "--hit-rate"),
        (["--shape", "glm-5.2", "--pool-slots", "9"], "--pool-slots cannot be used with --shape"),
        (["demo", "--fine-slots", "9"], "--fine-slots needs --shape"),
        (["demo", "--shape", "glm-5.2"], "MODEL cannot be used with --shape"),
        (["--shape", "qwen3-next-80b", "--rows", "7"], "6 rows at most"),
        (["--prefill", "100"], "--prefill needs --shape"),
        (["--acceptance", "0.8"], "--acceptance needs --shape"),
        (["--shape", "glm-5.2", "--acceptance", "0.8"], "together or neither"),
        (["--shape", "glm-5.2", "--draft-depth", "1"], "together or neither"),
        (["--shape", "glm-5.2", "--drafts", "mtp"], "--drafts cannot be used with --shape"),
        (
            ["--shape", "qwen3-next-80b", "--draft-depth", "6", "--acceptance", "1"],
            "checks 5 guesses at most",
        ),
        (
            ["--shape", "glm-5.2", "--draft-depth", "1", "--acceptance", "1", "--rows", "2"],
            "--rows cannot be used with --draft-depth",
        ),
        (["demo", "--vram-limit", "8GiB"], "--vram-limit needs --shape"),
    ],
)
def test_bench_shape__wrong_usage__exit_2_and_words(
    moet: Command, arguments: list[str], words: str
) -> None:
    result = moet("bench", *arguments)
    assert result.code == ExitCode.USAGE
    assert words in result.err


def test_bench_shape__options__reach_the_measurement(moet: Command, card: FakeCard) -> None:
    result = moet(
        "bench", "--shape", "deepseek-v4-flash", "--vram-limit", "32GiB", "--ram-limit", "96 GiB",
        "--hit-rate", "0.9", "--context", "4096", "--rows", "2", "--prefill", "10000", "--json",
    )  # fmt: skip
    assert result.code == 0
    (setup,) = card.setups
    assert (setup.vram_bytes, setup.context, setup.rows) == (32 * GIB, 4096, 2)
    assert (setup.prefill, setup.shape.spec.context) == (10000, 10000)
    assert (setup.entries, setup.chunk) == (4096, 8192)
    assert card.hit_rates == [0.9]
    assert "Pinning rows" in result.err
    record = result.document
    assert (record["vram_limit_gib"], record["ram_limit_gib"]) == (32, 96)
    assert record["decode_tok_per_s"] == pytest.approx(2000 / 9.5, abs=0.1)


def test_bench_shape__exact__both_planes_in_memory_and_record(
    moet: Command, card: FakeCard
) -> None:
    card.figures = replace(FIGURES, n_fine_slots=6, steps=replace(FIGURES.steps, fine_misses=258.0))
    shape = ("bench", "--shape", "deepseek-v4-flash", "--exact")
    record = moet(*shape, "--json").document
    (setup,) = card.setups
    assert setup.planes == (Plane.BASE, Plane.FINE)
    assert setup.n_fine_slots() == 6
    assert (record["quality"], record["fine_slots"]) == ("exact", 6)
    assert record["fine_misses_per_step"] == 258
    assert "258.0 per step from RAM; 6 slots" in moet(*shape).out
    assert moet(*shape, "--ram-limit", "96GiB", "--json").code == 0
    some = card.setups[-1].in_ram()  # enough for the 2-bit rows, fine ones with what is left
    assert some[Plane.BASE] == setup.n_rows > some[Plane.FINE] > 12


def test_setup__fine_slots__take_from_the_base_pool() -> None:
    shape = SHAPES["deepseek-v4-flash"](8192)
    fast = Setup(shape, torch.device("cpu"), 32 * GIB, context=8192)
    exact = replace(fast, plane=Plane.FINE, fine_slots=500)
    assert (fast.n_fine_slots(), exact.n_fine_slots()) == (0, 500)
    less = fast.n_slots() - exact.n_slots()
    assert less == pytest.approx(500 * exact.layout.fine_stride / exact.layout.base_stride, abs=1)


def test_bench_shape__record__schema_of_the_bench_records(moet: Command, card: FakeCard) -> None:
    card.figures = replace(FIGURES, prefill_tok_per_s=812.345)
    record = moet("bench", "--shape", "deepseek-v4-flash", "--json").document
    assert set(FIELDS) <= set(record)
    assert (record["gpu"], record["weights"]) == ("NVIDIA X", "synthetic")
    assert (record["vram_limit_gib"], record["ram_limit_gib"]) == (None, None)
    assert (record["tokens_per_step"], record["acceptance"]) == (1, None)
    assert record["step_ms"]["median"] == 9.5
    assert record["step_ms"]["p05"] < 8.2
    assert record["step_ms"]["p95"] > 10.8
    assert sum(record["step_ms"]["by_group"].values()) == pytest.approx(9.5)
    assert record["step_ms"]["by_kernel"] == {
        "_gemv_kernel": {"launches": 259, "ms": 3.5, "share_ms": 3, "before_ms": 0.25},
        "_fetch_kernel": {"launches": 43, "ms": 1.5, "share_ms": 1.25, "before_ms": 0},
    }  # fmt: skip
    assert record["bytes_per_step"] == {"vram": 10**10, "pcie": 70_850_000, "nvme": None}
    assert record["measured_bw"] == {"vram_bytes_per_s": 4 * 10**12, "pcie_bytes_per_s": 5 * 10**10}
    assert record["achieved_bw"]["pcie_bytes_per_s"] == pytest.approx(70_850_000 / 9.5e-3, rel=1e-6)
    assert record["roofline_ratio"] == pytest.approx(2.5 / 9.5, abs=0.001)
    assert (record["hit_rate"], record["hit_rate_wanted"]) == (0.9612, 0.96)
    assert (record["decode_tok_per_s"], record["prefill_tok_per_s"]) == (105.3, 812.3)
    assert (record["peak_vram_gib"], record["repeats"]) == (31, 301)
    assert record["note"] is None
    assert record["ahead"] == {"rows_per_step": 0, "needed_per_step": 0}
    assert card.setups[0].looks_ahead


def test_bench_shape__without_lookahead__says_nothing_of_it(moet: Command, card: FakeCard) -> None:
    arguments = ("bench", "--shape", "deepseek-v4-flash", "--no-lookahead")
    assert moet(*arguments, "--json").document["ahead"] is None
    assert not card.setups[0].looks_ahead
    assert "ahead  " not in moet(*arguments).out


def test_expected_tokens() -> None:
    assert bench_shape.expected_tokens(1, 0.8) == pytest.approx(1.8)
    assert bench_shape.expected_tokens(3, 0.5) == pytest.approx(1.875)
    assert bench_shape.expected_tokens(2, 1.0) == 3
    assert bench_shape.expected_tokens(2, 0.0) == 1


def test_bench_shape__guesses__times_measured_and_speed_computed(
    moet: Command, card: FakeCard
) -> None:
    checks = Steps((11.0, 12.0, 13.0), 0.95, 14.5, 400.0)
    card.figures = replace(FIGURES, drafts=DraftFigures(checks, 0.5))
    arguments = ("bench", "--shape", "deepseek-v4-flash", "--draft-depth", "2")
    arguments += ("--acceptance", "0.8")
    record = moet(*arguments, "--json").document
    (setup,) = card.setups
    assert (setup.drafts, setup.rows, setup.most_rows) == (2, 1, 3)
    assert len(setup.shape.spec.moe_layers) == 44
    assert record["drafts"] == {
        "depth": 2, "acceptance_stated": 0.8, "check_ms_measured": 12.0,
        "check_misses_measured": 14.5, "guess_ms_measured": 0.5,
        "tokens_per_step_computed": 2.44, "decode_tok_per_s_computed": 187.7,
        "gain_computed": 1.783,
    }  # fmt: skip
    assert (record["acceptance"], record["decode_tok_per_s"]) == (None, 105.3)  # the measured one
    out = moet(*arguments).out
    assert "12.00 ms to check 2, 0.50 ms to make one (measured)" in out
    assert "computed: 187.7 tokens/s (x1.78, 2.44 per step) if 80% are right" in out


def test_bench_shape__nothing_traced__null_and_never_0(moet: Command, card: FakeCard) -> None:
    card.figures = replace(
        FIGURES, by_group=None, by_kernel=None, bandwidth=None, peak_vram_bytes=None
    )
    arguments = ("bench", "--shape", "deepseek-v4-flash")
    record = moet(*arguments, "--json").document
    absent = ("measured_bw", "roofline_ratio", "peak_vram_gib", "prefill_tok_per_s")
    assert [record[name] for name in absent] == [None] * 4
    assert record["step_ms"]["by_group"] is record["step_ms"]["by_kernel"] is None
    text = moet(*arguments).out
    assert "by kernel    not measured" in text
    assert "None" not in text


def test_bench_shape__for_people__one_line_per_figure(moet: Command, card: FakeCard) -> None:
    steps = replace(FIGURES.steps, ahead=8.97, needed=7.75)
    card.figures = replace(FIGURES, prefill_tok_per_s=812.345, steps=steps)
    lines = moet(
        "bench", "--shape", "deepseek-v4-flash", "--vram-limit", "32GiB", "--prefill", "512"
    ).out.splitlines()
    assert lines[0] == "deepseek-v4-flash, fast, made-up weights, on NVIDIA X in 32.0 GiB of VRAM"
    assert lines[1:] == [
        "  decode         105.3 tokens/s, 1 per step, context of 8192",
        "  step           9.50 ms  (p05 8.14, p95 10.86)",
        "    attention          2.000 ms   21%",
        "    dense products     3.500 ms   37%",
        "    router, look-up    0.500 ms    5%",
        "    fetch              1.500 ms   16%",
        "    experts            1.000 ms   11%",
        "    sampling           0.250 ms    3%",
        "    norms, other       0.250 ms    3%",
        "    gaps, host         0.500 ms    5%",
        "  hits           96.1%, 96.0% wanted; 3386 slots of 11008 experts",
        "  ahead          9.0 rows per step, 7.8 of them needed",
        "  VRAM           10.0 GB per step, 1.1 TB/s of 4.0 TB/s",
        "  PCIe           70.8 MB per step, 7.5 GB/s of 50.0 GB/s",
        "  roofline       0.263 of the step is what its bytes take at the speed of copies",
        "  prefill        812.3 tokens/s, prompt of 512",
        lines[-1],
    ]
    assert lines[-1].startswith("  memory         31.0 GiB of VRAM, ")


def test_shapes__every_name__can_be_asked_for(moet: Command, card: FakeCard) -> None:
    for name in SHAPES:
        assert moet("bench", "--shape", name, "--json").document["shape"] == name


def test_table__records__fastest_first_and_every_model_that_runs_is_measured(
    moet: Command, card: FakeCard
) -> None:
    named = ("gpt-oss-20b", "glm-5.2")
    records = [moet("bench", "--shape", name, "--vram-limit", "32GiB", "--json").document
               for name in named]  # fmt: skip
    records[1]["decode_tok_per_s"] = 10.0 + records[0]["decode_tok_per_s"]
    place, _, head, _, first, second = shape_table.table(records).splitlines()
    assert "NVIDIA X, 32" in place
    assert head.count("|") == first.count("|") == len(shape_table.HEADS) + 1
    assert first.startswith("| glm-5.2 (stand-in) | 3386 of ")
    assert second.startswith("| gpt-oss-20b | 3386 of 768 | 96.1 % | ")
    assert second.split(" | ")[5] == "–"
    script = Path(shape_table.__file__).with_name("shapes.sh").read_text()
    assert [name for name in KNOWN if name not in script] == ["deepseek-r1"]
