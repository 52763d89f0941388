"""Merged experts are cut apart, quantised dense weights become what engines read; also streamed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moet_desk.errors import MoetError
from moet_desk.store import hub_repair
from moet_desk.store.hub_repair import repair_from_hub
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import DENSE_FILE, PackPlan, PackProgress, Phase
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.pack_rows import RowMaker
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.quant_formats import decode
from moet_desk.store.shard_book import spans
from moet_desk.store.sources import Format, TensorIndex
from moet_desk.store.stored_tensors import MadeTensor
from moet_desk.store.stream_pack import unit_shards
from tests.store.hub_server import HubServer, Repo
from tests.store.pulls import NAME, asked, line_to, pack_bytes, pull_all
from tests.store.tiny import (
    PARTS,
    SCALED_KINDS,
    Tiny,
    flip_bit,
    plan_of,
    scaled_values,
    store,
    write_source,
    write_weights,
)

TINY = Tiny(hidden=128, inter=256, n_experts=4, layers=(1, 2))
Tensors = dict[str, torch.Tensor]
ROWS = ("experts.base", "experts.fine", DENSE_FILE)


def merged(tensors: Tensors, tiny: Tiny, change: Callable[[Tensors], Tensors]) -> Tensors:
    """The same model with the experts of each layer in two tensors; `change` has them last."""
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in tiny.layers:
        gate, up, down = (
            torch.stack(
                [tensors[f"{tiny.expert(layer, e, part)}.weight"] for e in range(tiny.n_experts)]
            )
            for part in PARTS
        )
        base = f"model.layers.{layer}.mlp.experts."
        made = change({"gate": gate, "up": up, "down_proj": down})
        out |= {base + name: value.contiguous() for name, value in made.items()}
    return out


def halves(parts: Tensors) -> Tensors:
    both = torch.cat([parts["gate"], parts["up"]], dim=1)
    return {"gate_up_proj": both, "down_proj": parts["down_proj"]}


def alternating(parts: Tensors) -> Tensors:
    both = torch.stack([parts["gate"], parts["up"]], dim=2).flatten(1, 2)
    return {"gate_up_proj": both, "down_proj": parts["down_proj"]}


def turned(change: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    return lambda parts: {name: value.mT for name, value in change(parts).items()}


def named(parts: Tensors) -> Tensors:
    return {f"{name}.weight": value for name, value in halves(parts).items()}


LAYOUTS = {
    "halves": halves,
    "with .weight": named,
    "alternating": alternating,
    "turned": turned(halves),
    "turned alternating": turned(alternating),
}


def rows_of(pack: Path) -> dict[str, bytes]:
    return {name: (pack / name).read_bytes() for name in ROWS}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PackPlan, Tensors]:
    """A source with one tensor per matrix, its plan and what is stored."""
    folder = tmp_path_factory.mktemp("single") / "source"
    tensors = write_source(folder, TINY, "bf16", seed=5)
    return folder, plan_of(TINY, folder), tensors


def write_merged(
    folder: Path, single: tuple[Path, PackPlan, Tensors], layout: str, **more: Any
) -> PackPlan:
    source, plan, tensors = single
    folder.mkdir()
    write_weights(folder, merged(tensors, TINY, LAYOUTS[layout]), **more)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    return dataclasses.replace(plan, alternating="alternating" in layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_pack__merged_experts__same_rows_as_single_ones(
    layout: str, single: tuple[Path, PackPlan, Tensors], tmp_path: Path
) -> None:
    write_pack(single[0], single[1], tmp_path / "one")
    plan = write_merged(tmp_path / "merged", single, layout, shards=3)
    write_pack(tmp_path / "merged", plan, tmp_path / "pack", memory_budget=4 << 20)
    assert rows_of(tmp_path / "pack") == rows_of(tmp_path / "one")


@pytest.mark.parametrize("layout", ["halves", "alternating"])
def test_view__mxfp4_blocks_of_all_experts__keep_their_bits(layout: str, tmp_path: Path) -> None:
    """gpt-oss: [E, 2I, H/32, 16] codes with [E, 2I, H/32] scales."""
    tiny = Tiny(hidden=128, inter=64, n_experts=3, layers=(1,))
    tensors = write_source(tmp_path / "one", tiny, "mxfp4")
    plan = plan_of(tiny, tmp_path / "one")
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    for suffix, stored in (("_blocks", "weight_packed"), ("_scales", "weight_scale")):
        gate, up, down = (
            torch.stack([tensors[f"{tiny.expert(1, e, part)}.{stored}"] for e in range(3)])
            for part in PARTS
        )
        made = LAYOUTS[layout]({"gate": gate, "up": up, "down_proj": down})
        for name, value in made.items():
            blocks = value.unflatten(-1, (-1, 16)) if suffix == "_blocks" else value
            out[f"model.layers.1.mlp.experts.{name}{suffix}"] = blocks.contiguous()
    shutil.copytree(tmp_path / "one", tmp_path / "merged")
    write_weights(tmp_path / "merged", out)
    plan = dataclasses.replace(plan, alternating=layout == "alternating")
    meta = write_pack(tmp_path / "one", plan, tmp_path / "a")
    assert write_pack(tmp_path / "merged", plan, tmp_path / "b").fine_is_lossless
    assert meta.fine_is_lossless
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


@pytest.mark.parametrize(("hidden", "inter"), [(128, 64), (64, 64)])
@pytest.mark.parametrize("layout", ["halves", "turned"])
def test_view__stack_that_is_square__the_other_one_tells(
    layout: str, hidden: int, inter: int, tmp_path: Path
) -> None:
    tiny = Tiny(hidden=hidden, inter=inter, n_experts=2, layers=(1,))
    tensors = write_source(tmp_path, tiny, "bf16")
    plan = plan_of(tiny, tmp_path)
    write_weights(tmp_path, merged(tensors, tiny, LAYOUTS[layout]))
    index = RowMaker(ModelSource.open(tmp_path).index, plan).index
    for part in PARTS:
        name = tiny.expert(1, 1, part)
        assert torch.equal(decode(index, name), tensors[f"{name}.weight"].float())


def test_view__merged_experts__one_expert_at_a_time(
    single: tuple[Path, PackPlan, Tensors], tmp_path: Path
) -> None:
    plan = write_merged(tmp_path / "merged", single, "halves")
    maker = RowMaker(ModelSource.open(tmp_path / "merged").index, plan)
    for layer in TINY.layers:
        for expert in range(TINY.n_experts):
            for part in PARTS:
                (raw,) = maker.index.info(TINY.expert(layer, expert, part)).raws
                assert raw.n_bytes == 2 * TINY.hidden * TINY.inter
                assert type(raw).__name__ == "RawTensor"  # a span of the file, no copy
                want = single[2][f"{TINY.expert(layer, expert, part)}.weight"]
                assert torch.equal(raw.tensor(), want)


@pytest.mark.parametrize("what", ["experts", "width", "down", "rank"])
def test_view__stacks_of_other_shapes__missing_tensors_are_named(
    what: str, single: tuple[Path, PackPlan, Tensors], tmp_path: Path
) -> None:
    write_merged(tmp_path / "merged", single, "halves")
    tensors = merged(single[2], TINY, halves)
    base = "model.layers.2.mlp.experts."
    if what == "down":
        tensors[base + "down_proj"] = tensors[base + "down_proj"].mT.contiguous()
    else:
        stack = tensors[base + "gate_up_proj"]
        spoilt = {"experts": stack[1:], "width": stack[:, 1:], "rank": stack[None]}[what]
        tensors[base + "gate_up_proj"] = spoilt.contiguous()
    write_weights(tmp_path / "merged", tensors)
    with pytest.raises(MoetError, match=r"layers\.2\.mlp\.experts\.0\.gate_proj") as caught:
        RowMaker(ModelSource.open(tmp_path / "merged").index, single[1])
    assert caught.value.code == "MD-SRC-03"


def test_view__expert_alone_and_in_a_stack__is_a_damaged_file(
    single: tuple[Path, PackPlan, Tensors], tmp_path: Path
) -> None:
    write_merged(tmp_path / "merged", single, "halves")
    name = f"{TINY.expert(2, 3, 'up_proj')}.weight"
    write_weights(tmp_path / "merged", merged(single[2], TINY, halves) | {name: single[2][name]})
    with pytest.raises(MoetError, match="alone and in") as caught:
        RowMaker(ModelSource.open(tmp_path / "merged").index, single[1])
    assert caught.value.code == "MD-SRC-02"


# -- dense weights -----------------------------------------------------------------------------


DENSE = "model.layers.0.mlp.up_proj"


def write_with_dense(folder: Path, kind: str, **more: Any) -> tuple[PackPlan, Tensors]:
    """A source whose experts and one dense matrix are stored as `kind`, all else as usual."""
    tensors = write_source(folder, TINY, kind, seed=2, **more)
    stored = {name: value for name, value in tensors.items() if not name.startswith(DENSE)}
    own = store(DENSE, (96, TINY.hidden), kind, torch.Generator().manual_seed(9))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_weights(folder, stored | own, **more)
    return plan_of(TINY, folder), own


@pytest.mark.parametrize("kind", [k for k in SCALED_KINDS if not k.endswith("flat")])
def test_write_pack__dense_weight__fp8_as_shipped_others_as_bfloat16(
    kind: str, tmp_path: Path
) -> None:
    plan, own = write_with_dense(tmp_path / "source", kind)
    write_pack(tmp_path / "source", plan, tmp_path / "pack")
    want = torch.from_numpy(scaled_values(own, DENSE, kind)).float()
    with PackReader.open(tmp_path / "pack") as reader:
        info, got = reader.dense.info(DENSE), reader.dense_tensor(DENSE)
        assert DENSE + ".input_scale" not in reader.dense
    if kind.startswith("fp8"):
        assert info.format is Format.FP8_ROWS
        assert got.numpy() == pytest.approx(want.numpy(), rel=1e-7)
    else:
        assert info.format is Format.BF16
        assert got.numpy() == pytest.approx(want.numpy(), rel=2**-8)


def test_view__made_dense_weight__in_pieces_as_in_one(tmp_path: Path) -> None:
    plan, _ = write_with_dense(tmp_path / "source", "int4-32")
    index = RowMaker(ModelSource.open(tmp_path / "source").index, plan).index
    (raw,) = index.info(DENSE).raws
    assert isinstance(raw, MadeTensor)
    pieces = b"".join(bytes(piece) for piece in raw.chunks(1000))
    assert pieces == bytes(raw.data())
    assert len(pieces) == raw.n_bytes == 2 * 96 * TINY.hidden
    rows = slice(5, 90, 3)
    assert torch.equal(decode(index, DENSE, rows=rows), decode(index, DENSE)[rows])


# -- several tensors of a weight in several files ----------------------------------------------


def planner(plan: PackPlan) -> Callable[[Mapping[str, Any], str, object], PackPlan]:
    return lambda config, path, names: plan


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-ct", "int4-32", "fp8-rows"])
def test_pull__parts_of_weights_in_several_shards__same_pack_and_mended_from_the_hub(
    kind: str, hub: HubServer, tmp_path: Path
) -> None:
    source = tmp_path / "origin"
    plan, _ = write_with_dense(source, kind, shards=5)  # dealt out: scales lie in other files
    maker = RowMaker(ModelSource.open(source).index, plan)
    needs = unit_shards(maker)
    assert spans(needs) > 2
    assert len(needs[plan.n_rows + list(plan.dense).index(DENSE)]) > 1
    write_pack(source, plan, tmp_path / "clean")
    hub.repos[NAME] = Repo(source)
    wanted = asked(tmp_path, reclaim=True)
    pull_all(wanted, line_to(hub.url), planner(plan), memory_budget=4 << 20)
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")
    assert not wanted.work.exists()
    flip_bit(wanted.dest / "experts.base", 9)
    flip_bit(wanted.dest / DENSE_FILE, (wanted.dest / DENSE_FILE).stat().st_size - 9)
    report, work = verify_pack(wanted.dest), tmp_path / "mend"
    assert repair_from_hub(wanted.dest, work, report, line_to(hub.url), planner(plan)) == 2
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")


@pytest.mark.parametrize("layout", ["halves", "turned alternating"])
def test_pull__merged_experts__same_pack_and_one_row_mended_from_its_own_bytes(
    layout: str,
    hub: HubServer,
    single: tuple[Path, PackPlan, Tensors],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "origin"
    plan = write_merged(source, single, layout, shards=4, by_layer=True)
    write_pack(source, plan, tmp_path / "clean")
    hub.repos[NAME] = Repo(source)
    wanted = asked(tmp_path, reclaim=True)
    pull_all(wanted, line_to(hub.url), planner(plan), memory_budget=4 << 20)
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")
    flip_bit(wanted.dest / "experts.fine", 9)
    steps: list[PackProgress] = []
    line, report = line_to(hub.url), verify_pack(wanted.dest)
    monkeypatch.setattr(hub_repair, "_GAP_BYTES", 0)
    work = tmp_path / "mend"
    assert repair_from_hub(wanted.dest, work, report, line, planner(plan), progress=steps.append)
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")
    fetched = [step.total for step in steps if step.phase is Phase.FETCH]
    assert fetched[-1] == 3 * 2 * TINY.hidden * TINY.inter


def test_model_source__unknown_quantisation__refused_before_the_weights_are_read(
    tmp_path: Path,
) -> None:
    write_source(tmp_path, TINY, "bf16")
    config = '{"model_type": "tiny", "quantization_config": {"quant_method": "awq", "bits": 4}}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(MoetError, match="the method 'awq'") as caught:
        ModelSource.open(tmp_path)
    assert caught.value.code == "MD-SRC-09"


def test_pull__unknown_quantisation__refused_before_headers_are_fetched(
    hub: HubServer, tmp_path: Path
) -> None:
    source = tmp_path / "origin"
    plan, _ = write_with_dense(source, "int4-32")
    config = (source / "config.json").read_text().replace('"symmetric": true', '"symmetric": "no"')
    (source / "config.json").write_text(config)
    hub.repos[NAME] = Repo(source)
    with pytest.raises(MoetError, match="symmetric = 'no'") as caught:
        pull_all(asked(tmp_path), line_to(hub.url), planner(plan))
    assert caught.value.code == "MD-SRC-09"
    assert not any(path.endswith(".safetensors") for path, _ in hub.requests)


def test_open__packed_numbers_without_a_config__are_not_guessed(tmp_path: Path) -> None:
    plan, _ = write_with_dense(tmp_path, "int4-32")
    with pytest.raises(MoetError, match="MD-SRC-05"):
        RowMaker(TensorIndex.open(tmp_path), plan)


def test_pull__modelopts_own_file__is_fetched_and_read(hub: HubServer, tmp_path: Path) -> None:
    """A config that says nothing, and scales of the KV cache that only a quantised model has."""
    source = tmp_path / "origin"
    plan, _ = write_with_dense(source, "nvfp4")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    hub.repos[NAME] = Repo(source)

    def say(algorithm: str) -> None:
        words = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
        (source / "hf_quant_config.json").write_text(json.dumps(words))

    say("NVFP4_AWQ")
    with pytest.raises(MoetError, match=r"hf_quant_config\.json") as caught:
        pull_all(asked(tmp_path), line_to(hub.url), planner(plan))
    assert caught.value.code == "MD-SRC-09"
    assert not any(path.endswith(".safetensors") for path, _ in hub.requests)
    say("NVFP4")
    (path,) = source.glob("*.safetensors")
    scale = "model.layers.0.self_attn.k_proj.k_scale"
    write_weights(source, {**load_file(path), scale: torch.ones(1)})
    wanted = dataclasses.replace(asked(tmp_path), work=tmp_path / "again")
    pull_all(wanted, line_to(hub.url), planner(plan), memory_budget=4 << 20)
    write_pack(source, plan, tmp_path / "clean")
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")
    assert scale not in PackReader.open(wanted.dest).dense
