"""The tensor index: what it accepts, and that hostile files end in catalogue errors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from moet_desk.errors import MoetError
from moet_desk.store.headers import ITEM_BYTES, MAX_HEADER_BYTES, parse_header
from moet_desk.store.sources import DTYPES, Format, TensorIndex
from tests.store.tiny import Tiny, store, write_source, write_weights


def file_of(header: Any, data: bytes = b"", *, claim: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if claim is None else claim
    return length.to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\2\0\0\0\0\0\0",
    "length beyond the file": file_of({}, claim=1000),
    "length above the cap": file_of({}, claim=MAX_HEADER_BYTES + 1),
    "length of 2**64-1": b"\xff" * 8 + b"{}",
    "no JSON": file_of(b"hello"),
    "JSON array": file_of([]),
    "empty header": file_of(b""),
    "bytes that are no UTF-8": file_of(b'{"\xff": 1}'),
    "deep nesting": file_of(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "text after the JSON": file_of(b"{} x"),
    "entry is a number": file_of({"a": 5}),
    "no dtype": file_of({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "negative shape": file_of({"a": entry(0, 1, shape=[-1])}, b"x"),
    "fractional shape": file_of({"a": entry(0, 1, shape=[1.5])}, b"x"),
    "boolean shape": file_of({"a": entry(0, 1, shape=[True])}, b"x"),
    "shape beyond 64 bits": file_of({"a": entry(0, 1, shape=[1 << 70])}, b"x"),
    "negative shape beyond 64 bits": file_of({"a": entry(0, 1, shape=[-(1 << 70)])}, b"x"),
    "shape with 1000 dimensions": file_of({"a": entry(0, 1, shape=[1] * 1000)}, b"x"),
    "negative offset": file_of({"a": entry(-1, 0)}, b"x"),
    "offsets backwards": file_of({"a": entry(1, 0, shape=[1])}, b"x"),
    "three offsets": file_of({"a": entry(0, 1) | {"data_offsets": [0, 1, 2]}}, b"x"),
    "size is not the shape's": file_of({"a": entry(0, 4, "F32", [2])}, b"1234"),
    "offset beyond the file": file_of({"a": entry(0, 9)}, b"12345678"),
    "data cut short": file_of({"a": entry(0, 4), "b": entry(4, 8)}, b"123456"),
    "bytes behind the data": file_of({"a": entry(0, 4)}, b"123456"),
    "overlap": file_of({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"),
    "same bytes twice": file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"),
    "hole": file_of({"a": entry(0, 2), "b": entry(4, 6)}, b"123456"),
    "does not begin at 0": file_of({"a": entry(2, 6)}, b"123456"),
    "metadata is a list": file_of({"__metadata__": [1], "a": entry(0, 1)}, b"x"),
    "metadata with a number": file_of({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_open_file__hostile_header__is_a_damaged_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(MoetError) as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-02"
    assert "model.safetensors" in caught.value.cause


def test_open_file__unknown_dtype__names_tensor_and_dtype(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(file_of({"odd": entry(0, 1, "F4_X")}, b"x"))
    with pytest.raises(MoetError) as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-05"
    assert "odd" in caught.value.cause
    assert "F4_X" in caught.value.cause


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 64))
def test_parse_header__any_bytes__only_catalogue_errors(data: bytes, data_bytes: int) -> None:
    try:
        parse_header(data, data_bytes=data_bytes, file="f")
    except MoetError as error:
        assert error.code in ("MD-SRC-02", "MD-SRC-05")  # noqa: PT017


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=4) | st.just("__metadata__"),
        json_values
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "F8_E8M0", "X"]) | json_values,
                "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-1, 9), max_size=3) | json_values,
            }
        ),
        max_size=3,
    ),
    st.integers(0, 32),
)
def test_parse_header__any_json__only_catalogue_errors(header: Any, data_bytes: int) -> None:
    try:
        entries = parse_header(json.dumps(header).encode(), data_bytes=data_bytes, file="f")
    except MoetError as error:
        assert error.code in ("MD-SRC-02", "MD-SRC-05")  # noqa: PT017
    else:
        assert sum(entry.end - entry.begin for entry in entries) == data_bytes


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_open__any_bytes_of_a_good_file_changed__never_crashes(
    tmp_path: Path, data: st.DataObject
) -> None:
    good = bytearray(save({"a.weight": torch.zeros(3), "b": torch.ones(2, dtype=torch.uint8)}))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)) | st.just(len(good)))
    (tmp_path / "model.safetensors").write_bytes(good[:cut])
    try:
        index = TensorIndex.open(tmp_path)
    except MoetError as error:
        assert error.code in ("MD-SRC-02", "MD-SRC-05")  # noqa: PT017
    else:
        for name in index.names():
            for raw in index.raw(name).values():
                raw.tensor()


def test_tensor__every_dtype__equals_what_the_library_wrote(tmp_path: Path) -> None:
    values = torch.arange(-4, 8)
    tensors = {
        str(dtype): values.to(dtype).reshape(3, 4)
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
            *(torch.float8_e4m3fn, torch.float8_e5m2),
        )
    }
    save_file(tensors, tmp_path / "model.safetensors")
    index = TensorIndex.open(tmp_path)
    assert index.names() == sorted(tensors)
    for name, want in tensors.items():
        got = index.info(name).weight.tensor()
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


def test_tensor__not_aligned__is_copied_to_the_right_values(tmp_path: Path) -> None:
    data = b"x" + torch.tensor([1.5, -2.5]).numpy().tobytes()
    header = {"a": entry(0, 1), "b": entry(1, 9, "F32", [2])}
    (tmp_path / "model.safetensors").write_bytes(file_of(header, data))
    raw = TensorIndex.open(tmp_path).info("b").weight
    assert raw.tensor().tolist() == [1.5, -2.5]


def test_tensor__aligned__is_a_view_of_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    raw = TensorIndex.open(tmp_path).info("a").weight
    assert raw.tensor().data_ptr() == raw.mapped.data_ptr() + raw.start


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("bf16", Format.BF16),
        ("f16", Format.F16),
        ("f32", Format.F32),
        ("f64", Format.F64),
        ("fp8", Format.FP8),
        ("fp8-scale", Format.FP8),
        ("fp8-e8m0", Format.FP8),
        ("mxfp4", Format.MXFP4),
        ("mxfp4-v4", Format.MXFP4),
    ],
)
def test_grouping__each_layout__is_one_logical_tensor(
    kind: str, want: Format, tmp_path: Path
) -> None:
    stored = store("x.proj", (160, 64), kind, torch.Generator().manual_seed(1))
    write_weights(tmp_path, stored)
    index = TensorIndex.open(tmp_path)
    assert index.names() == ["x.proj"]
    info = index.info("x.proj")
    assert (info.format, info.shape) == (want, (160, 64))
    assert set(index.raw("x.proj")) == set(stored)
    assert info.bytes == sum(part.nbytes for part in stored.values())


def test_grouping__gpt_oss_blocks__have_a_leading_expert_dimension(tmp_path: Path) -> None:
    blocks = torch.zeros(3, 8, 2, 16, dtype=torch.uint8)
    tensors = {"m.up_blocks": blocks, "m.up_scales": torch.zeros(3, 8, 2, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    info = TensorIndex.open(tmp_path).info("m.up")
    assert (info.format, info.shape) == (Format.MXFP4, (3, 8, 64))


def test_grouping__bare_parameters__keep_their_names(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(2),
        "a.bias": torch.zeros(2),
        "a.scale": torch.zeros(2),
        "g.e_score_correction_bias": torch.zeros(2),
        "lost.weight_scale": torch.zeros(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    names = TensorIndex.open(tmp_path).names()
    assert names == ["a", "a.bias", "a.scale", "g.e_score_correction_bias", "lost.weight_scale"]


F8 = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
U8 = torch.zeros(4, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    "tensors",
    [
        {"x.weight": F8},
        {"x.weight": F8, "x.weight_scale": torch.ones(64, 1)},
        {"x.weight": torch.cat([F8, F8]), "x.weight_scale": torch.ones(1, 1)},
        {"x.weight": F8, "x.weight_scale": torch.ones(128, 4)},
        {"x.weight": F8[0], "x.weight_scale": torch.ones(())},
        {
            "x.weight": F8,
            "x.weight_scale": torch.ones(1, 1),
            "x.weight_scale_inv": torch.ones(1, 1),
        },
        {"x.weight": U8, "x.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn)},
        {"x.weight_packed": U8.int(), "x.weight_scale": torch.ones(4, 4).bfloat16()},
        {
            "x.weight_packed": U8,
            "x.weight_scale": torch.zeros(4, 1, dtype=torch.uint8),
            "x.weight_global_scale": torch.ones(1),
        },
        {"x.weight_packed": U8, "x.weight_scale": torch.zeros(4, 2, dtype=torch.uint8)},
    ],
)
def test_grouping__layouts_not_read_here__are_unknown_not_wrong(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    info = TensorIndex.open(tmp_path).info("x")
    assert info.format is Format.UNKNOWN
    assert str(list(tensors["x.weight" if "x.weight" in tensors else "x.weight_packed"].shape)) in (
        info.stored_as
    )


@pytest.mark.parametrize("other", ["x", "x.weight_packed"])
def test_grouping__two_tensors_of_one_name__is_an_error(other: str, tmp_path: Path) -> None:
    save_file({"x.weight": torch.zeros(2), other: torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(MoetError, match="both be x") as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-02"


# -- folders and shards ------------------------------------------------------------------------


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_open__shards__gives_the_tensors_of_one_file(tmp_path: Path) -> None:
    write_source(tmp_path / "one", Tiny(), seed=3)
    write_source(tmp_path / "three", Tiny(), seed=3, shards=3)
    one, three = TensorIndex.open(tmp_path / "one"), TensorIndex.open(tmp_path / "three")
    assert one.names() == three.names()
    assert len(three.files) == 3
    for name in one.names():
        for key, raw in one.raw(name).items():
            assert torch.equal(raw.bytes(), three.raw(name)[key].bytes())


def test_open__missing_shard__says_how_many_and_which(tmp_path: Path) -> None:
    write_source(tmp_path, Tiny(), shards=3)
    (tmp_path / "model-00002.safetensors").unlink()
    gone = [k for k, v in index_of(tmp_path)["weight_map"].items() if "00002" in v]
    with pytest.raises(MoetError) as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-03"
    assert caught.value.facts["n_missing"] == len(gone)
    assert "model-00002.safetensors" in caught.value.do


def test_open__index_names_an_absent_tensor__says_which(tmp_path: Path) -> None:
    write_source(tmp_path, Tiny(), shards=2)
    index = index_of(tmp_path)
    index["weight_map"]["ghost.weight"] = "model-00001.safetensors"
    write_index(tmp_path, index)
    with pytest.raises(MoetError, match=r"ghost\.weight") as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-03"


def test_open__tensor_not_in_the_index__says_which(tmp_path: Path) -> None:
    write_source(tmp_path, Tiny(), shards=2)
    index = index_of(tmp_path)
    del index["weight_map"]["model.norm.weight"]
    write_index(tmp_path, index)
    with pytest.raises(MoetError, match=r"model\.norm\.weight") as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-02"


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": {}},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": "../a.safetensors"}},
        {"weight_map": {"a": "/etc/a.safetensors"}},
        {"weight_map": {"a": "passwd"}},
        {"weight_map": {"a": "a\0.safetensors"}},
        {"weight_map": {"a": ""}},
    ],
)
def test_open__hostile_index__is_a_damaged_file(index: Any, tmp_path: Path) -> None:
    write_index(tmp_path, index)
    with pytest.raises(MoetError) as caught:
        TensorIndex.open(tmp_path)
    assert caught.value.code == "MD-SRC-02"


def test_open__no_weights__says_what_is_missing(tmp_path: Path) -> None:
    for folder, files in ((tmp_path / "none", []), (tmp_path / "two", ["a", "b"])):
        folder.mkdir()
        for name in files:
            save_file({name: torch.zeros(1)}, folder / f"{name}.safetensors")
        with pytest.raises(MoetError) as caught:
            TensorIndex.open(folder)
        assert caught.value.code == "MD-SRC-01"
    with pytest.raises(MoetError, match="MD-SRC-01"):
        TensorIndex.open(tmp_path / "nowhere")


def test_item_bytes__agree_with_the_types_of_views() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
