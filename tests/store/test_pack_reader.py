"""Opening packs and reading rows; every kind of damage is found and named."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet_desk.errors import MoetError
from moet_desk.store import read_tensors
from moet_desk.store.pack_format import (
    DENSE_FILE,
    FORMAT_VERSION,
    QUANTIZER_VERSION,
    PackMeta,
    Plane,
    decode_meta,
    encode_meta,
)
from moet_desk.store.pack_meta import read_meta
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.quant_formats import decode
from moet_desk.store.row_table import ROW_FORMATS
from moet_desk.store.sources import TensorIndex
from moet_desk.store.stored_tensors import Format
from tests.faults import n_open_files
from tests.store.tiny import flip_bit


def stored_row(pack: Path, plane: Plane, row: int, stride: int) -> bytes:
    name = "experts.base" if plane is Plane.BASE else "experts.fine"
    return (pack / name).read_bytes()[row * stride : (row + 1) * stride]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("shift", [0, 64])
def test_read_row__any_buffer__gives_the_stored_bytes(
    direct: bool, shift: int, tiny_pack: Path
) -> None:
    with PackReader.open(tiny_pack, direct=direct) as reader:
        for plane in Plane:
            stride = reader.meta.stride(plane)
            out = memoryview(mmap.mmap(-1, stride + shift))[shift:]
            for row in range(reader.meta.n_rows):
                reader.read_row(plane, row, out)
                assert bytes(out) == stored_row(tiny_pack, plane, row, stride)


def test_open__file_system_without_direct_reads__falls_back(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    with PackReader.open(tiny_pack, direct=True) as reader:
        assert not reader.direct
        reader.read_row(Plane.BASE, 0, mmap.mmap(-1, reader.meta.base_stride))


def test_read_row__short_reads__are_continued(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    with PackReader.open(tiny_pack) as reader:
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:1000]], at))
        out = bytearray(reader.meta.fine_stride)
        reader.read_row(Plane.FINE, 3, out)
        assert bytes(out) == stored_row(tiny_pack, Plane.FINE, 3, reader.meta.fine_stride)


def test_read_row__many_threads__each_gets_its_row(tiny_pack: Path) -> None:
    with PackReader.open(tiny_pack) as reader:

        def read(row: int) -> bytes:
            out = bytearray(reader.meta.base_stride)
            reader.read_row(Plane.BASE, row, out)
            return bytes(out)

        rows = [i % reader.meta.n_rows for i in range(200)]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(read, rows))
        stride = reader.meta.base_stride
        assert got == [stored_row(tiny_pack, Plane.BASE, row, stride) for row in rows]


def test_read_row__disk_error__names_layer_expert_and_reason(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with PackReader.open(tiny_pack) as reader:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(MoetError) as caught:
            reader.read_row(Plane.BASE, 6, bytearray(reader.meta.base_stride))
    assert caught.value.code == "MD-NVME-04"
    facts = caught.value.facts
    assert (facts["layer"], facts["expert"], facts["model"]) == (2, 2, "tiny")
    assert facts["reason"] == "Input/output error"


@pytest.mark.parametrize("direct", [False, True])
def test_read_row__drive_came_back_as_another_device__file_is_opened_anew(
    direct: bool, tiny_pack: Path, tmp_path: Path
) -> None:
    with PackReader.open(tiny_pack, direct=direct) as reader:
        stride = reader.meta.base_stride
        want, got = mmap.mmap(-1, stride), mmap.mmap(-1, stride)
        reader.read_row(Plane.BASE, 6, want)

        def dies(file: Path) -> None:
            """What was open can no longer be read."""
            dead = os.open(file, os.O_WRONLY)
            for fds in (reader._fds, reader._direct_fds):
                if Plane.BASE in fds:
                    os.dup2(dead, fds[Plane.BASE], inheritable=False)
            os.close(dead)

        dies(tiny_pack / "experts.base")
        n_files = n_open_files()
        reader.read_row(Plane.BASE, 6, got)
        assert got[:] == want[:]
        assert n_open_files() == n_files
        (tmp_path / "other").write_bytes(b"shorter")
        dies(tmp_path / "other")
        with pytest.raises(MoetError, match="another file"):
            reader.read_row(Plane.BASE, 6, got)
        tiny_pack.rename(tmp_path / "gone")
        with pytest.raises(MoetError, match="No such file"):
            reader.read_row(Plane.BASE, 6, got)


def test_dense_rows__drive_came_back_as_another_device__file_is_opened_anew(
    tiny_pack: Path,
) -> None:
    with PackReader.open(tiny_pack) as reader:
        infos = map(reader.dense.info, reader.dense.names())
        name = next(i.name for i in infos if len(i.shape) == 2 and i.format in ROW_FORMATS)
        table = reader.dense_rows(name)
        want = table.read([0, 1])
        dead = os.open(tiny_pack / DENSE_FILE, os.O_WRONLY)
        os.dup2(dead, reader._dense_file.fd, inheritable=False)
        assert torch.equal(table.read([0, 1]), want)
        os.dup2(dead, reader._dense_file.fd, inheritable=False)
        os.close(dead)
        (tiny_pack / DENSE_FILE).unlink()
        with pytest.raises(MoetError, match=r"MD-NVME-05.*No such file"):
            table.read([0, 1])


def test_dense__file_cut_or_drive_dead_while_open__is_an_error_of_the_pack(tiny_pack: Path) -> None:
    """A mapping would end the process."""
    with PackReader.open(tiny_pack) as reader:
        names = sorted(reader.dense.names(), key=lambda name: reader.dense.info(name).weight.start)
        first, last = names[0], names[-1]
        want = reader.dense_tensor(first)
        os.truncate(tiny_pack / DENSE_FILE, reader.dense.info(last).weight.start + 1)
        assert torch.equal(reader.dense_tensor(first), want)
        for read in (reader.dense_tensor, lambda name: reader.dense.info(name).weight.tensor()):
            with pytest.raises(MoetError, match="ends too early") as caught:
                read(last)
            assert caught.value.code == "MD-PACK-07"
        dead = os.open(tiny_pack / DENSE_FILE, os.O_WRONLY)
        os.dup2(dead, reader._dense_file.fd, inheritable=False)
        assert torch.equal(reader.dense_tensor(first), want)  # opened anew
        os.dup2(dead, reader._dense_file.fd, inheritable=False)
        os.close(dead)
        (tiny_pack / DENSE_FILE).unlink()
        with pytest.raises(MoetError, match=r"MD-PACK-07.*No such file"):
            reader.dense_tensor(first)


def test_dense__several_pieces__bits_of_the_file(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = TensorIndex.open_file(tiny_pack / DENSE_FILE)
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", 24)
    with PackReader.open(tiny_pack) as reader:
        assert reader.dense.names() == index.names()
        for name in index.names():
            mapped, read = index.info(name), reader.dense.info(name)
            assert (read.shape, read.format) == (mapped.shape, mapped.format)
            assert torch.equal(read.weight.bytes(), mapped.weight.bytes())
            if mapped.format is not Format.INTEGER:
                assert torch.equal(reader.dense_tensor(name), decode(index, name))


def test_read_row__file_cut_while_open__is_a_read_error(tiny_pack: Path) -> None:
    with PackReader.open(tiny_pack) as reader:
        os.truncate(tiny_pack / "experts.base", 3 * reader.meta.base_stride + 10)
        out = bytearray(reader.meta.base_stride)
        reader.read_row(Plane.BASE, 2, out)
        with pytest.raises(MoetError, match="ends before this row") as caught:
            reader.read_row(Plane.BASE, 3, out)
    assert caught.value.code == "MD-NVME-04"


@pytest.mark.parametrize(("plane", "file"), [(Plane.BASE, "base"), (Plane.FINE, "fine")])
@pytest.mark.parametrize("where", [0, 777, -1])
def test_read_row__one_flipped_bit__names_the_row(
    plane: Plane, file: str, where: int, tiny_pack: Path
) -> None:
    with PackReader.open(tiny_pack) as reader:
        stride = reader.meta.stride(plane)
        flip_bit(tiny_pack / f"experts.{file}", 5 * stride + where % stride, 3)
        out = bytearray(stride)
        for row in range(reader.meta.n_rows):
            if row != 5:
                reader.read_row(plane, row, out)
        with pytest.raises(MoetError, match=rf"layer 2 expert 1 \({file}\)") as caught:
            reader.read_row(plane, 5, out)
        assert caught.value.code == "MD-PACK-04"


def test_read_row__wrong_row_or_buffer__is_a_programmers_error(tiny_pack: Path) -> None:
    with PackReader.open(tiny_pack) as reader:
        good = bytearray(reader.meta.base_stride)
        for row, out in ((-1, good), (8, good), (0, bytearray(10))):
            with pytest.raises(ValueError, match="stride"):
                reader.read_row(Plane.BASE, row, out)


# -- opening -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experts.base", "experts.fine", "rows.b3", "dense.safetensors"])
@pytest.mark.parametrize("change", ["missing", "short", "long"])
def test_open__file_of_another_size__names_it(name: str, change: str, tiny_pack: Path) -> None:
    path = tiny_pack / name
    size = path.stat().st_size
    if change == "missing":
        path.unlink()
    else:
        os.truncate(path, size + (1 if change == "long" else -1))
    with pytest.raises(MoetError) as caught:
        PackReader.open(tiny_pack)
    assert caught.value.code == "MD-PACK-07"
    assert name in caught.value.cause


def test_open__flipped_bit_in_the_digests__names_the_file(tiny_pack: Path) -> None:
    flip_bit(tiny_pack / "rows.b3", 40)
    with pytest.raises(MoetError, match=r"rows\.b3: it does not match") as caught:
        PackReader.open(tiny_pack)
    assert caught.value.code == "MD-PACK-07"


def test_open__flipped_bit_anywhere_in_the_record__is_found(tiny_pack: Path) -> None:
    good = (tiny_pack / "pack.json").read_bytes()
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 1 << (at % 8)
        (tiny_pack / "pack.json").write_bytes(data)
        with pytest.raises(MoetError) as caught:
            read_meta(tiny_pack)
        # the digit of the version alone is its own kind of error
        assert caught.value.code in ("MD-PACK-07", "MD-PACK-03")
        assert caught.value.facts["model"] == "tiny"


def test_open__another_format_version__says_which(tiny_pack: Path) -> None:
    record = json.loads((tiny_pack / "pack.json").read_bytes())
    record["format"] = 7
    (tiny_pack / "pack.json").write_text(json.dumps(record))
    with pytest.raises(MoetError, match="has format 7, this program reads 1") as caught:
        PackReader.open(tiny_pack)
    assert caught.value.code == "MD-PACK-03"


def test_open__damaged_dense_header__does_not_say_download_again(tiny_pack: Path) -> None:
    flip_bit(tiny_pack / "dense.safetensors", 9)
    with pytest.raises(MoetError) as caught:
        PackReader.open(tiny_pack)
    assert caught.value.code == "MD-PACK-07"
    assert "Download" not in caught.value.do


def test_open__no_pack__says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MoetError, match=r"it has no pack\.json") as caught:
            PackReader.open(path)
        assert caught.value.code == "MD-PACK-07"


def test_config__changed_since_packing__is_refused(tiny_pack: Path) -> None:
    with PackReader.open(tiny_pack) as reader:
        assert reader.config()["model_type"] == "tiny"
        (tiny_pack / "config.json").write_text("{}")
        with pytest.raises(MoetError, match=r"config\.json"):
            reader.config()
        (tiny_pack / "config.json").unlink()
        with pytest.raises(MoetError, match="MD-PACK-07"):
            reader.config()


def test_dense_tensor__not_in_the_pack__names_it(tiny_pack: Path) -> None:
    with PackReader.open(tiny_pack) as reader, pytest.raises(MoetError, match=r"no\.such"):
        reader.dense_tensor("no.such")


def test_record__encoded_again__is_the_same_bytes(tiny_pack: Path) -> None:
    data = (tiny_pack / "pack.json").read_bytes()
    assert encode_meta(decode_meta(data, path="p")) == data


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=4),
        lambda inner: st.dictionaries(st.sampled_from(["format", "hidden", "x"]), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_decode_meta__any_bytes__only_catalogue_errors(data: bytes) -> None:
    with pytest.raises(MoetError) as caught:
        decode_meta(data, path="pack.json")
    assert caught.value.code in ("MD-PACK-03", "MD-PACK-07")


def test_read_meta__half_made_pack_with_damaged_journal__is_still_incomplete(
    tiny_pack: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pack, tmp_path / "half")
    (tmp_path / "half" / "pack.json").unlink()
    (tmp_path / "half" / "journal").write_bytes(b"MDJ1" + bytes(10))
    with pytest.raises(MoetError, match=r"has 0 of \? rows") as caught:
        read_meta(tmp_path / "half")
    assert caught.value.code == "MD-PACK-06"


def test_spec__names_every_field_of_the_record_in_order() -> None:
    page = (Path(__file__).parents[2] / "docs/design/pack.md").read_text("utf-8")
    spec = page.partition("### For other programs")[2].partition("A reader makes the text anew")[0]
    rows = [line.split("|")[1] for line in spec.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == [field.name for field in msgspec.structs.fields(PackMeta)]
    assert f"`{QUANTIZER_VERSION}`" in spec
    assert f"| {FORMAT_VERSION};" in spec
