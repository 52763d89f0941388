"""The packed demo model against transformers' DeepseekV3ForCausalLM on the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine.text import Text
from moet_desk.store.pack_format import Plane
from tests.engine.oracle import loaded, logits_of, transformers_model

HELDOUT = Path(__file__).parent.parent / "data" / "heldout"


def some_texts(pack: Path, *, per_file: int, length: int) -> list[list[int]]:
    text = Text.load(pack)
    found = []
    for name in ("chat", "prose", "tasks"):
        lines = (HELDOUT / f"{name}.jsonl").read_text().splitlines()[:per_file]
        found += [text.encode_prompt(json.loads(line)["text"])[:length] for line in lines]
    return found


@pytest.fixture(scope="module")
def wanted(demo_source: Path, demo_pack: Path) -> Iterator[list[tuple[list[int], Tensor]]]:
    model = transformers_model(demo_source)
    with torch.inference_mode():
        texts = some_texts(demo_pack, per_file=4, length=320)
        yield [(ids, model(torch.tensor([ids])).logits[0]) for ids in texts]


def test_logits__float_path__equal_transformers(
    demo_pack: Path, wanted: list[tuple[list[int], Tensor]]
) -> None:
    with loaded(demo_pack, activations="float", kv_format="f32") as core:
        for ids, want in wanted:
            got = logits_of(core, ids, plane=Plane.FINE)
            assert (got - want).abs().max() < 1e-4 * want.std()


def test_logits__float_path_token_by_token__equal_transformers(
    demo_pack: Path, wanted: list[tuple[list[int], Tensor]]
) -> None:
    with loaded(demo_pack, activations="float", kv_format="f32") as core:
        for ids, want in wanted[::4]:
            ids = ids[:48]
            got = logits_of(core, ids, plane=Plane.FINE, sizes=[1] * len(ids))
            assert (got - want[: len(ids)]).abs().max() < 1e-4 * want.std()


@pytest.mark.parametrize("decoding", [False, True], ids=["prefill", "decode"])
def test_logits__exact_mode_as_shipped__near_transformers(
    demo_pack: Path, wanted: list[tuple[list[int], Tensor]], *, decoding: bool
) -> None:
    """Integer activations: RMS below 0.5 % of the spread, top-1 equal but for near ties."""
    agree = total = 0
    squares, spread = [], []
    with loaded(demo_pack) as core:
        for ids, want in wanted[:: 3 if decoding else 1]:
            ids = ids[:64] if decoding else ids
            sizes = [1] * len(ids) if decoding else None
            got = logits_of(core, ids, plane=Plane.FINE, sizes=sizes)
            want = want[: len(ids)]
            squares.append((got - want).square().mean())
            spread.append(want.std())
            best, ours = want.argmax(-1), got.argmax(-1)
            agree += int((best == ours).sum())
            total += len(ids)
            margin = want.gather(1, best[:, None]) - want.gather(1, ours[:, None])
            assert margin.max() < 0.02 * want.std()  # whoever differs was nearly tied
    rms = float(torch.stack(squares).mean().sqrt() / torch.stack(spread).mean())
    print(f"rms {rms:.2e} of the logit std, top-1 {agree}/{total}")
    assert rms < 5e-3
    assert agree >= 0.998 * total
