"""Tiles from the table: which row stands for a shape, what falls back, the tool that measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compiling, kernels_moe, tune
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton import tile_table
from moet_desk.kernels.triton.experts import Tile, tiles_for
from moet_desk.kernels.triton.grouped import grouped_tile
from moet_desk.kernels.triton.tile_table import GroupedTile, capability_of, parse

CPU = torch.device("cpu")


def decode(hidden: int, inter: int, **changes: Any) -> dict[str, Any]:
    row = {"fine": False, "tokens": 1, "gate_up": [32, 8], "down": [8, 1]}
    return {"hidden": hidden, "inter": inter, **row, **changes}


def document(*rows: dict[str, Any], grouped: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    card = {"card": "X", "date": "2026-11-30", "decode": [*rows], "grouped": [*grouped]}
    return {"format": 1, "cards": {"9.0": card}}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], None]]:
    def put(table: dict[str, Any]) -> None:
        made = parse(table)
        monkeypatch.setattr(tile_table, "load", lambda: made)
        tile_table.decode_row.cache_clear()
        tile_table.grouped_row.cache_clear()

    yield put
    tile_table.decode_row.cache_clear()
    tile_table.grouped_row.cache_clear()


def gate_up(hidden: int, inter: int, **asked: Any) -> Tile:
    asked = {"fine": False, "capability": "9.0", **asked}
    return tiles_for(ExpertLayout(hidden, inter), **asked).gate_up


def test_tiles_for__measured_shape__its_row_for_its_card_plane_and_tokens(
    use: Callable[[dict[str, Any]], None],
) -> None:
    use(document(
        decode(4096, 2048), decode(4096, 2048, tokens=3, gate_up=[16, 8]),
        decode(4096, 2048, fine=True, gate_up=[4, 2]),
    ))  # fmt: skip
    assert gate_up(4096, 2048) == gate_up(4096, 2048, tokens=2) == Tile(32, 8)
    assert gate_up(4096, 2048, tokens=3) == gate_up(4096, 2048, tokens=8) == Tile(16, 8)
    assert gate_up(4096, 2048, fine=True) == Tile(4, 2)
    rule = tiles_for(ExpertLayout(4096, 2048), fine=False)
    assert rule.gate_up not in (Tile(32, 8), Tile(16, 8))
    for unknown in ("", "12.0", "8.6"):
        assert gate_up(4096, 2048, capability=unknown) == rule.gate_up
    assert gate_up(4096, 2048, fine=True, tokens=3) == tiles_for(
        ExpertLayout(4096, 2048), fine=True
    ).gate_up  # fmt: skip
    assert capability_of(CPU) == ""


def test_tiles_for__another_shape__nearest_larger_one_whose_tiles_divide_it(
    use: Callable[[dict[str, Any]], None],
) -> None:
    use(document(decode(4096, 2048), decode(4096, 1536, gate_up=[16, 4]), decode(2880, 2880)))
    assert gate_up(4096, 1408) == Tile(16, 4)  # both fit, the second is nearer
    assert gate_up(4096, 1792) == Tile(32, 8)
    assert gate_up(2880, 2880) == Tile(32, 8)
    far = [(2048, 768), (7168, 2048), (4096, 2560), (4096, 736)]
    for hidden, inter in far:  # too far, or more than the tile was measured with
        assert gate_up(hidden, inter) == tiles_for(ExpertLayout(hidden, inter), fine=False).gate_up


def test_grouped_tile__full_tiles__as_measured_others_by_the_rule(
    use: Callable[[dict[str, Any]], None],
) -> None:
    row = {"hidden": 4096, "inter": 2048, "wide": False}
    use(document(grouped=({**row, "gate_up": [64, 8, 4], "down": [32, 4, 2]},)))
    layout = ExpertLayout(4096, 2048)
    asked: dict[str, Any] = {"wide": False, "capability": "9.0"}
    assert grouped_tile(layout, pairs=128, has_gate=True, **asked) == GroupedTile(64, 8, 4)
    assert grouped_tile(layout, pairs=128, has_gate=False, **asked) == GroupedTile(32, 4, 2)
    assert grouped_tile(layout, pairs=64, has_gate=True, **asked) == GroupedTile(64, 4, 3)
    assert grouped_tile(layout, pairs=128, has_gate=True, wide=True) == GroupedTile(32, 4, 3)


@pytest.mark.parametrize(
    "row",
    [
        decode(4096, 2048, gate_up=[24, 8]),
        decode(4096, 2048, down=[8, 3]),
        decode(4096, 1408, gate_up=[256, 8]),
        decode(4096, 2048, tokens=2),
    ],
)
def test_parse__tiles_that_no_launch_could_use__refused(row: dict[str, Any]) -> None:
    parse(document(decode(4096, 2048)))
    with pytest.raises(ValueError, match="no launch could use"):
        parse(document(row))


def test_parse__another_format__refused() -> None:
    with pytest.raises(ValueError, match="format 2"):
        parse({**document(), "format": 2})


def test_table__as_committed__legal_for_its_shapes_and_says_what_it_gained() -> None:
    table = json.loads(tile_table.FILE.read_text())
    cards = tile_table.load()
    assert set(cards) == set(table["cards"])
    for card in table["cards"].values():
        for row in (*card["decode"], *card["grouped"]):
            assert all(mine <= rule for mine, rule in zip(row["us"], row["rule_us"], strict=True))


def test_shapes_of_catalogue__all_of_issue__every_rule_and_candidate_divides() -> None:
    shapes = tune.shapes_of_catalogue()
    assert {(2048, 512, 10), (2880, 2880, 4), (7168, 2048, 8)} <= set(shapes)
    for hidden, inter, _ in shapes:
        layout = ExpertLayout(hidden, inter)
        for fine in (False, True):
            rule = tiles_for(layout, fine=fine)
            gate_up = tune.candidates(layout, rule.gate_up, fine=fine, has_gate=True)
            down = tune.candidates(layout, rule.down, fine=fine, has_gate=False)
            for found, height in ((gate_up, inter), (down, hidden)):
                assert all(height % tile.rows == 0 for tile in found)
                assert 2 <= len(found) == len(set(found)) <= 8, (layout, fine, found)


def test_candidates__shape_that_was_measured__has_the_best_and_none_that_spills() -> None:
    layout, rule = ExpertLayout(4096, 2048), Tile(64, 16)
    coarse = tune.candidates(layout, rule, fine=False, has_gate=True)
    assert coarse[0] == rule
    assert {Tile(8, 2), Tile(8, 4), Tile(32, 8)} <= set(coarse)
    fine = tune.candidates(layout, rule, fine=True, has_gate=True)
    assert Tile(4, 2) in fine
    assert not {Tile(4, 1), Tile(8, 2), Tile(32, 8)} & set(fine)
    down = tune.candidates(layout, rule, fine=False, has_gate=False)
    assert {Tile(16, 2), Tile(16, 4)} <= set(down)
    assert Tile(16, 8) in tune.candidates(layout, rule, fine=True, has_gate=False)


def test_jobs_of__much_used_shapes_first_and_decode_before_prompts() -> None:
    jobs = tune.jobs_of(tune.shapes_of_catalogue())
    assert [job.shape[:2] for job in jobs[:8]] == [(4096, 2048)] * 4 + [(7168, 2048)] * 4
    decode = tune.jobs_of(tune.shapes_of_catalogue(), only="decode")
    assert jobs == decode + tune.jobs_of(tune.shapes_of_catalogue(), only="prompt")
    assert {job.tokens for job in decode} == {1, 3}
    assert len(set(jobs)) == len(jobs) == 6 * len(tune.shapes_of_catalogue())


def test_lacking__rows_of_this_card__are_not_measured_again() -> None:
    jobs = tune.jobs_of([(4096, 2048, 6)])
    assert tune.lacking(jobs, document(), "9.0") == jobs
    table = document(
        decode(4096, 2048), decode(2048, 2048, tokens=3),
        grouped=({"hidden": 4096, "inter": 2048, "wide": True},),
    )  # fmt: skip
    left = tune.lacking(jobs, table, "9.0")
    assert {*jobs} - {*left} == {jobs[0], tune.Job((4096, 2048, 6), True, 0)}
    assert tune.lacking(jobs, table, "12.0") == jobs


class Said:
    """A process's answer, there after so many questions; an error is raised."""

    def __init__(self, answer: bool | Exception, after: float = 0) -> None:
        self.answer, self.after = answer, after

    def ready(self) -> bool:
        self.after -= 1
        return self.after < 0

    def get(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_compiled__jobs_come_when_whole__late_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10))
    monkeypatch.setattr(compiling.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(compiling.time, "sleep", lambda _: None)
    late, first, last = (tune.Job((64, 32, 1), False, tokens) for tokens in (0, 1, 3))
    waiting: dict[tune.Job, compiling.Answers] = {
        late: [("gate_up", "a", Said(True)), ("down", "b", Said(True, after=float("inf")))],
        last: [("gate_up", "a", Said(True)), ("down", "b", Said(True, after=2))],
        first: [
            ("gate_up", "a", Said(True)), ("gate_up", "b", Said(False)),
            ("gate_up", "c", Said(OSError())), ("down", "d", Said(True)),
        ],
    }  # fmt: skip
    assert list(compiling.compiled(waiting, until=9.0)) == [
        (first, {"gate_up": ["a"], "down": ["d"]}), (last, {"gate_up": ["a"], "down": ["b"]}),
    ]  # fmt: skip
    assert next(now, None) is None or next(now) > 8


def test_measure__a_run_that_breaks_off__keeps_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tile = tmp_path / "tiles.json", Tile(4, 1)
    file.write_text(json.dumps(document(decode(2048, 1024))))
    trials = [tune.Trial(name, None, [tile], lambda _: [], ()) for name in ("gate_up", "down")]
    monkeypatch.setattr(tune.Job, "trials", lambda *_: trials)
    choices = iter([tune.Choice(tile, 1.0, 2.0)] * 2)

    def measured(*_: Any) -> tune.Choice:
        try:
            return next(choices)
        except StopIteration:
            raise ValueError("other bits") from None

    monkeypatch.setattr(tune, "measured", measured)
    jobs = tune.jobs_of([(4096, 2048, 6)])
    ready = [(job, {"gate_up": [tile], "down": [tile]}) for job in jobs]
    with pytest.raises(ValueError, match="other bits"):
        tune.measure(ready, file, capability="9.0", card="X")
    rows = json.loads(file.read_text())["cards"]["9.0"]["decode"]
    assert [(row["hidden"], row["gate_up"]) for row in rows] == [(2048, [32, 8]), (4096, [4, 1])]


ALONE = """
from bench import tune
from bench.compiling import only_compile
only_compile(90, ("bench.kernels_moe", "bench.tune"))
decode, prompt = (tune.Job((64, 32, 1), False, tokens) for tokens in (3, 0))
print(tune.passes(decode, "down", tune.Tile(8, 1), 1 << 18))
print(tune.passes(decode, "down", tune.Tile(8, 2), -1))
print(tune.passes(prompt, "down", tune.GROUPED[0], 1 << 18))
"""


@pytest.mark.slow
def test_passes__in_a_process_of_its_own__compiles_without_a_card() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tokens", "fine"), [(1, False), pytest.param(1, True, marks=SLOW), (0, False), (0, True)]
)
def test_trials__every_candidate__the_rules_bits(
    tokens: int, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernels_moe, tune):
        monkeypatch.setattr(module, "DEVICE", CPU)
    monkeypatch.setattr(tune, "_EXPERTS", 2)
    monkeypatch.setattr(tune, "_TOP_K", 1)
    torch.manual_seed(0)
    job = tune.Job((64, 32, 1), fine, tokens)
    trials = tune.grouped_trials(job, tokens=6) if tokens == 0 else job.trials(1)
    times = iter(range(100, 0, -5))
    found = {}
    for trial in trials:
        passed = trial.tiles[:3]
        found[trial.name] = tune.measured(trial, passed, lambda *_, **__: float(next(times)))
        assert all(tensor.abs().sum() > 0 for tensor in trial.written)
        assert found[trial.name].tile == passed[-1]
    row = tune.row_of(job, found)
    made = tune.merged({"cards": {"12.0": document()["cards"]["9.0"]}}, "9.0", "X", [row])
    assert json.loads(tune.written(made)) == made
    assert len(tune.written(made).splitlines()) < 24


def test_merged__a_run_over_some_shapes__others_and_other_cards_stay() -> None:
    first = [
        decode(4096, 2048, us=[1.0, 1.0]), decode(2048, 1024, us=[1.0, 1.0]),
        {"hidden": 4096, "inter": 2048, "wide": True, "gate_up": [64, 4, 3], "down": [64, 4, 3]},
    ]  # fmt: skip
    table = tune.merged({"cards": {"12.0": document()["cards"]["9.0"]}}, "9.0", "X", first)
    newer = decode(4096, 2048, us=[0.5, 0.5], gate_up=[16, 8])
    table = tune.merged(table, "9.0", "X", [newer])
    assert set(table["cards"]) == {"9.0", "12.0"}
    assert table["cards"]["9.0"]["decode"] == [newer, first[1]]
    assert table["cards"]["9.0"]["grouped"] == [first[2]]


def test_measured__another_result__ends_the_run() -> None:
    out = torch.zeros(2)

    def fill(tile: Tile) -> list[Callable[[], None]]:
        def call() -> None:
            out.fill_(tile.warps)

        return [call]

    trial = tune.Trial("down", None, [Tile(8, 1), Tile(8, 2)], fill, (out,))
    with pytest.raises(ValueError, match="other bits"):
        tune.measured(trial, trial.tiles, lambda *_, **__: 1.0)


def test_choose__small_gain__the_rule_stays() -> None:
    a, b = Tile(8, 1), Tile(8, 2)
    assert tune.choose({a: 100.0, b: 99.0}, a).tile == a
    assert tune.choose({a: 100.0, b: 90.0}, a) == tune.Choice(b, 90.0, 100.0)
