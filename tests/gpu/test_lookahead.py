"""Rows brought ahead for the next layer, on a card: the same bits with any slots and rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.handle import EngineOptions
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.test_parity_demo import some_texts
from tests.engine.tiny_v4 import ON_CARD, random_v4, save_v4
from tests.gpu.test_engine import forced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def opened(pack: Path, *, lookahead: bool, **sizes: int) -> CudaCore:
    options = EngineOptions(
        save_heat=False, kv_format="bf16", context=512, lookahead=lookahead, **sizes
    )  # type: ignore[arg-type]
    return load_cuda(pack, options, device=torch.device("cuda"), widths=(1, 2, 4))


def differing(pack: Path, ids: list[int], **sizes: int) -> list[tuple[Plane, int]]:
    """Planes and rows per step at which lookahead changes a bit of the logits."""
    plain, ahead = (opened(pack, lookahead=lookahead, **sizes) for lookahead in (False, True))
    try:
        found = [
            (plane, rows)
            for plane in Plane
            for rows in (1, 2, 4)
            if not torch.equal(
                forced(ahead, ids, plane, rows=rows), forced(plain, ids, plane, rows=rows)
            )
        ]
        brought, needed = ahead.pools[Plane.BASE].tables.ahead.sum(0).tolist()
        assert brought >= needed > 0
        assert int(plain.pools[Plane.BASE].tables.ahead.sum()) == 0
    finally:
        plain.close()
        ahead.close()
    return found


@pytest.mark.parametrize("slots", [48, 160])
def test_step__demo_model_in_few_slots__same_bits(demo_pack: Path, slots: int) -> None:
    ids = some_texts(demo_pack, per_file=1, length=200)[0]
    assert differing(demo_pack, ids, pool_slots=slots, fine_slots=slots) == []


def test_step__streams_and_tables_of_tokens__same_bits(tmp_path: Path) -> None:
    save_v4(random_v4(ON_CARD, 0.25), ON_CARD, tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    core = opened(pack, lookahead=True)
    least = core.pools[Plane.BASE].least
    core.close()
    assert differing(pack, ids, pool_slots=least, fine_slots=least) == []
