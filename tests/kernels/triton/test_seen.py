"""Lists of what rows see, interpreted, against the twins."""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.choose import list_chosen
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.seen import Places, Pooled, find_places, list_seen

WINDOW, RING = 8, 32
SLOTS, POSITIONS = [2, 2, 0, 1], [40, 41, 3, 700]
RUNS = torch.tensor([[slot, 0, 0, 1] for slot in SLOTS], dtype=torch.int32)


def placed(ratio: int) -> Places:
    places = Places.make(8, torch.device("cpu")).of(slice(0, 4))
    find_places(RUNS, torch.tensor(POSITIONS).int(), places, ring=RING, ratio=ratio)
    return places


def near(t: int) -> Tensor:
    return ref.seen_entries(POSITIONS[t], [], first=SLOTS[t] * RING, window=WINDOW, ring=RING)


def lists(pooled: Pooled | None, width: int) -> list[list[int]]:
    listed = torch.full((4, width), -1, dtype=torch.int32)
    lengths = torch.zeros(4, dtype=torch.int32)
    list_seen(placed(1), pooled, listed, lengths, window=WINDOW, ring=RING)
    assert all((line[n:] == -1).all() for line, n in zip(listed, lengths, strict=True))
    return [line[:n].tolist() for line, n in zip(listed, lengths, strict=True)]


def test_find_places__rows_of_several_sequences__by_slot_and_position_alone() -> None:
    places = placed(4)
    assert places.sources.tolist() == [32 + 8, 32 + 9, 3, 16 + 12]
    assert places.targets.tolist() == [32 + 9, 32 + 10, 4, 16 + 13]
    assert places.rings.tolist() == [64, 64, 0, 32]
    assert places.closed.tolist() == [10, 10, 1, 175]
    assert places.positions.tolist() == POSITIONS


def test_list_seen__window_alone__its_entries_in_order() -> None:
    found = lists(None, 300)
    assert found == [near(t).tolist() for t in range(4)]
    assert found[2] == [0, 1, 2, 3]
    assert found[0] == [64 + i % 32 for i in range(33, 41)]


def test_list_seen__all_closed_windows__behind_the_window() -> None:
    """Windows of 8 tokens, two to a page; then of two pages each."""
    table = torch.randperm(400, generator=torch.Generator().manual_seed(1)).view(4, 100).int()
    for page, spread in ((2, 1), (1, 2)):
        pages = torch.zeros(400, page, 4, dtype=torch.uint8)
        pooled = Pooled(KvPages(pages, table, KvFormat.F32), 8, spread, first=96)
        found = lists(pooled, 100)
        for t, position in enumerate(POSITIONS):
            count = min((position + 1) // 8, 50)
            far = [96 + int(table[t, i // page * spread]) * page + i % page for i in range(count)]
            assert found[t][: WINDOW + count] == [*near(t).tolist(), *far]
        assert len(found[2]) == 4  # no window is closed


def test_list_chosen__some_and_all_of_closed_windows__behind_the_window() -> None:
    table = torch.randperm(99, generator=torch.Generator().manual_seed(1))[:48].view(4, 12).int()
    kv = KvPages(torch.zeros(99, 16, 4, dtype=torch.uint8), table, KvFormat.F32)
    scores = torch.randn(4, 180, generator=torch.Generator().manual_seed(2)).round()
    listed = torch.full((4, WINDOW + 7), -1, dtype=torch.int32)
    lengths = torch.zeros(4, dtype=torch.int32)
    own, options = placed(4), {"top_k": 5, "window": WINDOW, "ring": RING}
    list_chosen(scores, own, Pooled(kv, 4, 1, 96), listed, lengths, **options)
    for t, closed in enumerate(own.closed.tolist()):
        best = ref.choose(scores[t : t + 1, :closed], 5)[0].nonzero()[:, 0]
        far = 96 + table[t, best // 16] * 16 + best % 16
        want = [*near(t).tolist(), *far.tolist()]
        assert listed[t].tolist() == want + [-1] * (WINDOW + 7 - len(want))
        assert lengths[t] == len(want)
