"""Recordings on disk: what was written comes back, limits hold, and damage is named."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bench import record_trace
from moet_desk.engine.cuda import residency as device
from moet_desk.engine.cuda.expert_stream import StreamCounters
from moet_desk.engine.cuda.residency import CudaResidency
from moet_desk.engine.handle import ModelInfo
from moet_desk.engine.ledger import Ledger
from moet_desk.engine.trace_file import (
    UNKNOWN,
    Asked,
    Changes,
    Closing,
    Ended,
    Frame,
    Header,
    Said,
    TraceWriter,
    read_trace,
    unpack,
)
from moet_desk.errors import MoetError
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import GpuTables
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import (
    CacheView,
    EngineSnapshot,
    EngineState,
    FinishReason,
    Tier,
    TierCounters,
    Usage,
)

LAYERS, N_EXPERTS = (1, 2), 8
MODEL = ModelInfo(
    name="m", family="f", context=64, model_context=64, vocab=9, n_layers=3, n_moe_layers=2,
    n_experts=8, top_k=2, identity="i",
)  # fmt: skip


def header(*, exact: bool = True) -> Header:
    return Header(
        program="1.2", date="2026-11-30T09:00:00+00:00", machine={"gpu": None, "cores": 2},
        model=MODEL, layers=LAYERS, n_experts=N_EXPERTS, exact=exact,
    )  # fmt: skip


def snapshot(tiers: list[int], heat: list[int], ledger: Ledger, t_s: float) -> EngineSnapshot:
    rows = [slice(0, 8), slice(8, 16)]
    view = CacheView(
        layers=LAYERS, n_experts=8, tiers=tuple(bytes(tiers[row]) for row in rows),
        heat=tuple(bytes(heat[row]) for row in rows), generations=(0, 0), hit_share=(None, 0.9345),
        stories=ledger.stories(t_s),
    )  # fmt: skip
    return EngineSnapshot(
        state=EngineState.WRITING, model="m", counters=TierCounters(lookups=5), cache=view
    )


def note(ledger: Ledger, row: int, uses: float, fetches: int = 0) -> None:
    used, fetched = np.zeros(16, np.float32), np.zeros(16, np.uint32)
    used[row], fetched[row] = uses, fetches
    ledger.note(1.0, uses=used, fetches=fetched, evictions=fetched, before=None)


def write(path: Path, *, exact: bool = True) -> None:
    ledger, tiers, heat = Ledger(16, exact=exact), [int(Tier.RAM)] * 16, [0] * 16
    writer = TraceWriter(path, header(exact=exact))
    writer.add(0.0, snapshot(tiers, heat, ledger, 0.0))
    writer.say(Asked(0.1, "Why?", "fast"))
    tiers[9], heat[9] = int(Tier.FINE), 7
    note(ledger, 9, 1.4, fetches=2)
    writer.add(0.5, snapshot(tiers, heat, ledger, 0.5))
    note(ledger, 9, 0.4)
    note(ledger, 15, 300)
    writer.add(1.0, snapshot(tiers, heat, ledger, 1.0))
    writer.say(Said(1.1, "So.", 2))
    writer.say(Ended(1.2, FinishReason.STOP, Usage(3, 2)))
    writer.add(2.0, snapshot(tiers, heat, ledger, 2.0))
    writer.close()


def values_of(changes: Changes) -> dict[int, int]:
    rows, values = unpack(changes, 16)
    return dict(zip(rows.tolist(), values.tolist(), strict=True))


def test_trace__written_and_read__the_same_pictures_and_words(tmp_path: Path) -> None:
    path = tmp_path / "a.mdtrace"
    write(path)
    trace = read_trace(path)
    assert trace.header == header()
    assert (trace.length_s, trace.n_rows) == (2.0, 16)
    first, second, third, fourth = trace.frames
    assert set(values_of(first.cells).values()) == {int(Tier.RAM)}
    assert values_of(second.cells) == {9: Tier.FINE | 7 << 2}
    assert values_of(third.cells) == {}
    assert np.frombuffer(second.hits, "<u2").tolist() == [UNKNOWN, 934]
    assert second.snapshot == replace(
        snapshot([0] * 16, [0] * 16, Ledger(16, exact=True), 0), cache=None
    )
    assert [type(word) for word in trace.words] == [Asked, Said, Ended]
    assert values_of(second.uses) == {}  # less than a second after those of the first
    assert values_of(third.uses) == {9: 2, 15: 255}  # 1.8 of them; 255 is the most
    assert values_of(fourth.uses) == {15: 45}
    assert values_of(second.fetches) == values_of(second.evictions) == {9: 2}
    assert [each.name for each in tmp_path.iterdir()] == ["a.mdtrace"]


def test_trace__not_counted__no_fetches_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.mdtrace", exact=False)
    frames = read_trace(tmp_path / "a.mdtrace").frames
    assert [(frame.fetches, frame.evictions) for frame in frames] == [(Changes(), Changes())] * 4


def test_writer__full__ends_in_order_and_says_so(tmp_path: Path) -> None:
    path, rng, ledger = tmp_path / "a.mdtrace", np.random.default_rng(0), Ledger(16, exact=True)
    writer = TraceWriter(path, header(), most_bytes=20_000)
    n_frames = 0
    while not writer.full:
        cells = rng.integers(0, 4, 16).tolist()
        noisy = replace(snapshot(cells, cells, ledger, 0.0), model=rng.bytes(2000).hex())
        writer.add(n_frames / 4, noisy)
        n_frames += 1
        assert n_frames < 100
    writer.add(99.0, noisy)
    writer.say(Asked(99.0, "late", "fast"))
    writer.close()
    assert path.stat().st_size < 60_000
    trace = read_trace(path)
    assert (len(trace.frames), list(trace.words)) == (n_frames, [])


def test_writer__thrown_away__nothing_left(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a.mdtrace", header())
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_writer__no_such_folder__catalogue_error(tmp_path: Path) -> None:
    with pytest.raises(MoetError) as caught:
        TraceWriter(tmp_path / "none" / "a.mdtrace", header())
    assert caught.value.code == "MD-TRACE-05"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe"])
def test_writer__something_else_of_that_name__refused_at_once_and_it_stays(
    tmp_path: Path, kind: str
) -> None:
    """Renaming a finished recording over /dev/stdout or a pipe would delete that."""
    path = other = tmp_path / "a"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    if kind == "link to a pipe":
        other = tmp_path / "b"
        other.symlink_to(path)
    with pytest.raises(MoetError) as caught:
        TraceWriter(other, header())
    assert caught.value.code == "MD-TRACE-05"
    assert not path.is_file()
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, other.name}


def test_writer__name_is_a_link__stays_one(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "a.mdtrace"
    link.symlink_to(real)
    TraceWriter(link, header()).close()
    assert link.is_symlink()
    assert real.stat().st_size > 0


def repacked(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    data, messages = gzip.decompress(path.read_bytes()), []
    while data:
        size = int.from_bytes(data[:4], "little")
        messages.append(data[4 : 4 + size])
        data = data[4 + size :]
    joined = b"".join(len(m).to_bytes(4, "little") + m for m in change(messages))
    path.write_bytes(gzip.compress(joined))


def with_header(**fields: Any) -> Callable[[list[bytes]], list[bytes]]:
    def change(messages: list[bytes]) -> list[bytes]:
        first = msgspec.msgpack.decode(messages[0]) | fields
        return [msgspec.msgpack.encode(first), *messages[1:]]

    return change


def with_frame(frame: Frame) -> Callable[[list[bytes]], list[bytes]]:
    packed = [msgspec.msgpack.encode(frame), msgspec.msgpack.encode(Closing(0.0))]
    return lambda messages: [messages[0], *packed]


@pytest.mark.parametrize(
    ("damage", "code", "word"),
    [
        (lambda path: path.write_bytes(b""), "MD-TRACE-02", "empty"),
        (lambda path: path.write_bytes(b"not a trace"), "MD-TRACE-02", "not a recording"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "MD-TRACE-02", "cut off"),
        (lambda path: path.unlink(), "MD-TRACE-01", "No such file"),
        (lambda path: repacked(path, lambda m: m[:-1]), "MD-TRACE-02", "end is missing"),
        (lambda path: repacked(path, lambda m: [m[0], m[-1]]), "MD-TRACE-02", "no picture"),
        (lambda path: repacked(path, lambda m: [m[0], m[3], m[1], m[-1]]), "MD-TRACE-02", "order"),
        (lambda path: repacked(path, lambda m: [m[0], b"\xc1"]), "MD-TRACE-02", "MessagePack"),
        (lambda path: repacked(path, with_header(format="x")), "MD-TRACE-02", "not a recording"),
        (lambda path: repacked(path, with_header(layers=[1])), "MD-TRACE-02", "layers"),
        (lambda path: repacked(path, with_header(n_experts=4)), "MD-TRACE-02", "experts"),
        (lambda path: repacked(path, with_header(version=7)), "MD-TRACE-03", "version 7"),
        (
            lambda path: repacked(
                path, with_frame(Frame(0.0, EngineSnapshot(), bytes(4), Changes(b"\0\0", b"")))
            ),
            "MD-TRACE-02",
            "experts",
        ),
    ],
)  # fmt: skip
def test_read__damaged__catalogue_error(
    tmp_path: Path, damage: Callable[[Path], None], code: str, word: str
) -> None:
    path = tmp_path / "a.mdtrace"
    write(path)
    damage(path)
    with pytest.raises(MoetError) as caught:
        read_trace(path, names=("demo",))
    assert caught.value.code == code
    assert word in caught.value.cause


def test_read__any_byte_changed__never_anything_but_a_catalogue_error(tmp_path: Path) -> None:
    path = tmp_path / "a.mdtrace"
    write(path)
    intact = path.read_bytes()
    for at in range(0, len(intact), 7):
        damaged = bytearray(intact)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        try:
            read_trace(path)
        except MoetError as error:
            assert error.code in ("MD-TRACE-02", "MD-TRACE-03")  # noqa: PT017


# -- the recorder of made-up models (bench/record_trace.py) ----------------------------------


class Steps:
    """Stands for `ShapeBench`: tables as the device's look-up leaves them, without kernels."""

    def __init__(self, tables: GpuTables) -> None:
        self.tables, self.topics = tables, list[float]()
        self.loader = SimpleNamespace(change_topic=lambda share, _: self.topics.append(share))

    def step(self, experts: list[int], missed: list[int]) -> None:
        tables = self.tables
        for row in experts:
            at, old = float(tables.clock) / 16, float(tables.warmth[row])
            tables.warmth[row] = float(np.logaddexp2(at, old))
            tables.counters[row // 8] += torch.tensor([1, row not in missed, row in missed, 0])
            tables.slot_of[row] = 0
        tables.clock.add_(1)


def test_record_trace__steps_of_a_made_up_model__pictures_with_waiting_and_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(record_trace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(device, "STORIES_EVERY_S", 0.0)
    tables = GpuTables.empty(2, 8, 16, device="cpu")
    pool = SimpleNamespace(tables=tables, arena=SimpleNamespace(stride=4096), n_slots=16)
    residency = CudaResidency(
        {Plane.BASE: pool},  # type: ignore[dict-item]
        record_trace.AllInRam(16),  # type: ignore[arg-type]
        ExpertLayout(32, 32), moe_layers=LAYERS, server=None, streamed=StreamCounters(),
    )  # fmt: skip
    shape = SimpleNamespace(name="made-up", spec=SimpleNamespace(model_type="f"))
    setup = SimpleNamespace(shape=shape, device=torch.device("cpu"), context=64, rows=1)
    bench, path = Steps(tables), tmp_path / "a.mdtrace"
    recorder = record_trace.Recorder(
        bench, setup, TraceWriter(path, header(exact=False)),  # type: ignore[arg-type]
        record_trace.Wishes(seconds=4.0, period_s=0.5), row_s=0.01, popularity=0.1,
        residency=residency, began=0.0,
    )  # fmt: skip
    going, n_steps = True, 0
    while going:
        missed = [n_steps % 8] if n_steps < 8 else []
        bench.step([n_steps % 8, 8], missed)
        now[0], n_steps = now[0] + 0.1, n_steps + 1
        going = recorder.go_on(0.1)
    recorder.writer.close()
    frames = read_trace(path).frames
    assert len(frames) == 9
    assert bench.topics == [0.3]
    last = frames[-1].snapshot
    assert (last.steps, last.tokens, last.counters.from_ram) == (n_steps, n_steps, 8)
    assert last.counters.wait_s == pytest.approx(0.08)
    assert last.wait_share == pytest.approx(0.08 / (0.1 * n_steps))
    assert last.decode_tok_per_s == pytest.approx(10.0)
    assert last.sizes.fine_slots == 0
    told = np.zeros(16)
    for frame in frames:
        rows, values = unpack(frame.uses, 16)
        told[rows] += values
    assert told[8] == pytest.approx(n_steps, abs=6)  # steps before the first picture are not known
    assert told[:8].sum() == pytest.approx(n_steps, abs=6)
    assert told[9:].sum() == 0


def test_device_stories__two_views_at_once__the_second_costs_nothing() -> None:
    tables = GpuTables.empty(2, 8, 16, device="cpu")
    pool = SimpleNamespace(tables=tables, arena=SimpleNamespace(stride=4096))
    residency = CudaResidency(
        {Plane.BASE: pool},  # type: ignore[dict-item]
        record_trace.AllInRam(16),  # type: ignore[arg-type]
        ExpertLayout(32, 32), moe_layers=LAYERS, server=None, streamed=StreamCounters(),
    )  # fmt: skip
    first = residency.view()
    tables.slot_of[3] = 0
    second = residency.view()
    assert second.tiers[0][3] == Tier.BASE
    assert second.stories is first.stories
