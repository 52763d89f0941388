"""Which launches of a step may begin early: none behind a copy, a fork or a join, all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moet_desk.engine.cuda import blocks, pools, step
from moet_desk.engine.cuda.measure import ShapeBench
from moet_desk.kernels.triton.launch import Chain
from moet_desk.store.arena import plain_memory
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB
from tests.engine.test_shape_bench import tiny

ATTENTION = [
    "rms_norm", "gemv", "mla_prepare", "gemv", "rotate_queries", "mla_absorb", "mla_decode",
    "mla_out", "gemv",
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Chain | None]]:
    """Filled by the launches of a step, which then do nothing; forks and joins are None."""
    seen: list[tuple[str, Chain | None]] = []

    def recorder(name: str) -> Callable[..., None]:
        def record(*_: object, chain: Chain = Chain.OFF, **__: object) -> None:
            seen.append((name, chain))

        return record

    @contextmanager
    def beside(_: blocks.Branch) -> Iterator[None]:
        seen.append(("fork", None))
        yield
        seen.append(("main", None))

    names = {*ATTENTION, "swiglu_gemv", "rms_norm_quantize", "route", "combine", "embed"}
    names |= {"lookup", "fetch", "experts_hidden", "experts_down"}
    for module in (blocks, pools, step):
        for name in names & set(vars(module)):
            monkeypatch.setattr(module, name, recorder(name))
    monkeypatch.setattr(blocks.Branch, "beside", beside)
    monkeypatch.setattr(blocks.Branch, "join", lambda _: seen.append(("join", None)))
    return seen


def test_step__pdl__begins_early_only_behind_a_kernel_of_its_stream(
    launched: list[tuple[str, Chain | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ShapeBench(tiny(4 * GIB), plain_memory, lambda _: None).model
    assert {chain for _, chain in launched} == {Chain.OFF, None}
    monkeypatch.setattr(step, "chain_on", lambda *_, **__: Chain.NEXT)
    model.use_pdl(enabled=True)
    launched.clear()
    model.launch(1, Plane.BASE)
    early = [(name, Chain.NEXT) for name in ATTENTION]
    assert launched == [
        ("embed", Chain.FIRST),  # behind copies
        *early,
        ("rms_norm", Chain.NEXT),
        ("swiglu_gemv", Chain.NEXT),
        ("gemv", Chain.NEXT),
        *early,
        ("rms_norm_quantize", Chain.NEXT),
        ("fork", None),
        ("swiglu_gemv", Chain.FIRST),
        ("gemv", Chain.NEXT),
        ("main", None),
        ("gemv", Chain.NEXT),
        ("route", Chain.NEXT),
        ("lookup", Chain.NEXT),
        ("fetch", Chain.OFF),
        ("experts_hidden", Chain.NEXT),
        ("experts_down", Chain.NEXT),
        ("join", None),
        ("combine", Chain.FIRST),
        ("rms_norm", Chain.NEXT),
        ("gemv", Chain.NEXT),
    ]
