"""Bytes and errors of cached entries in every format."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference import (
    gqa_entry_bytes,
    gqa_read,
    gqa_write,
    mla_entry_bytes,
    mla_read,
    mla_write,
)

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_mla_entry_bytes__deepseek_shape__as_published() -> None:
    sizes = [mla_entry_bytes(fmt, 512, 64) for fmt in KvFormat]
    assert dict(zip(KvFormat, sizes, strict=True)) == {
        KvFormat.F32: 2304,
        KvFormat.BF16: 1152,
        KvFormat.FP8: 656,
        KvFormat.NVFP4: 352,
    }


@pytest.mark.parametrize("fmt", list(KvFormat))
@pytest.mark.parametrize(("r", "dr"), [(512, 64), (128, 32), (160, 16)])
def test_mla__write_and_read__size_and_error(fmt: KvFormat, r: int, dr: int) -> None:
    latent, rope = torch.randn(50, r), torch.randn(50, dr)
    buf = mla_write(latent, rope, fmt)
    assert (buf.dtype, tuple(buf.shape)) == (torch.uint8, (50, mla_entry_bytes(fmt, r, dr)))
    got, got_rope = mla_read(buf, fmt, r, dr)
    assert (got.shape, got_rope.shape) == (latent.shape, rope.shape)
    assert (got.dtype, got_rope.dtype) == (torch.float32, torch.float32)
    bound, rope_bound = {
        KvFormat.F32: (0.0, 0.0),
        KvFormat.BF16: (0.003, 0.003),
        KvFormat.FP8: (0.03, 0.003),
        KvFormat.NVFP4: (0.1, 0.03),
    }[fmt]
    assert relative(got, latent) <= bound
    assert relative(got_rope, rope) <= rope_bound


@pytest.mark.parametrize("fmt", list(KvFormat))
def test_mla__entries_alone_or_together__same_bytes(fmt: KvFormat) -> None:
    latent, rope = torch.randn(9, 96) * 3, torch.randn(9, 16)
    whole = mla_write(latent, rope, fmt)
    decoded = mla_read(whole, fmt, 96, 16)
    for t in range(9):
        one = mla_write(latent[t : t + 1], rope[t : t + 1], fmt)
        assert torch.equal(one[0], whole[t])
        again = mla_read(one, fmt, 96, 16)
        assert torch.equal(again[0][0], decoded[0][t])
        assert torch.equal(again[1][0], decoded[1][t])


def test_mla__nvfp4_on_normal_values__known_error() -> None:
    latent = torch.randn(400, 512)
    got, _ = mla_read(
        mla_write(latent, torch.zeros(400, 64), KvFormat.NVFP4), KvFormat.NVFP4, 512, 64
    )
    assert relative(got, latent) == pytest.approx(0.095, abs=0.002)


def test_mla__nvfp4__bytes_worked_out_by_hand() -> None:
    latent = torch.zeros(1, 32)
    latent[0, :8] = torch.tensor(E2M1)  # amax 6: scale 1 = 64 * 2**-6, e4m3 64.0 = 0x68
    latent[0, 8:16] = -torch.tensor(E2M1)
    rope = torch.tensor([[1.0, -2.0, 1000.0, -1000.0]])
    buf = mla_write(latent, rope, KvFormat.NVFP4)
    first = "10325476" + "98badcfe"  # even dim in the low nibble; -0.0 keeps its sign
    assert buf.numpy().tobytes().hex() == first + "00" * 8 + "68" + "00" + "38c07efe"
    got, got_rope = mla_read(buf, KvFormat.NVFP4, 32, 4)
    assert torch.equal(got, latent)
    assert got_rope.tolist() == [[1.0, -2.0, 448.0, -448.0]]


def test_mla__fp8__bytes_worked_out_by_hand() -> None:
    latent = torch.zeros(1, 130)
    latent[0, 0], latent[0, 1], latent[0, 129] = 448.0, -224.0, 0.5
    buf = mla_write(latent, torch.tensor([[1.0, -1.0]]), KvFormat.FP8).numpy().tobytes()
    assert buf[:2].hex() == "7ef6"  # 448 and -224 at scale 1
    assert buf[129:130].hex() == "7e"  # the short last block has its own scale
    assert buf[130:134].hex() == "0000803f"
    assert buf[138:].hex() == "803f80bf"  # bfloat16 1 and -1
    assert len(buf) == 142


def test_mla__nvfp4_rounding__nearest_and_even_on_ties() -> None:
    x = torch.cat(
        [torch.linspace(-6, 6, 4801), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])]
    )
    x = torch.nn.functional.pad(x, (0, -x.numel() % 15)).view(-1, 15)
    latent = torch.cat([x, torch.full((x.shape[0], 1), 6.0)], 1)  # amax 6 keeps the scale at 1
    rope = torch.zeros(x.shape[0], 0)
    got, _ = mla_read(mla_write(latent, rope, KvFormat.NVFP4), KvFormat.NVFP4, 16, 0)
    for value, rounded in zip(latent.flatten().tolist(), got.flatten().tolist(), strict=True):
        size = abs(value)
        best = min(range(8), key=lambda i: (abs(E2M1[i] - size), i % 2))
        assert abs(rounded) == E2M1[best]
        assert rounded == 0 or (rounded < 0) == (value < 0)


@pytest.mark.parametrize("fmt", [KvFormat.FP8, KvFormat.NVFP4])
def test_mla__zero_and_tiny_blocks__read_as_zero(fmt: KvFormat) -> None:
    latent = torch.zeros(2, 128)
    latent[1] = 1e-30 if fmt is KvFormat.NVFP4 else 0.0
    got, _ = mla_read(mla_write(latent, torch.zeros(2, 16), fmt), fmt, 128, 16)
    assert not got.any()


@pytest.mark.parametrize("fmt", list(KvFormat))
def test_mla__nan__comes_back_in_its_entry_alone(fmt: KvFormat) -> None:
    latent, rope = torch.randn(3, 64), torch.randn(3, 16)
    latent[1, 5] = float("nan")
    rope[2, 3] = float("nan")
    got, got_rope = mla_read(mla_write(latent, rope, fmt), fmt, 64, 16)
    assert got[1].isnan().any()
    assert got_rope[2].isnan().any()
    assert got[[0, 2]].isfinite().all()
    assert got_rope[:2].isfinite().all()


def test_nvfp4__latent_not_in_blocks__refused() -> None:
    with pytest.raises(ValueError, match="24"):
        mla_entry_bytes(KvFormat.NVFP4, 24, 8)
    with pytest.raises(ValueError, match="24"):
        gqa_entry_bytes(KvFormat.NVFP4, 2, 32, 24)


def test_mla_read__f32__no_copy() -> None:
    buf = mla_write(torch.randn(4, 32), torch.randn(4, 8), KvFormat.F32)
    latent, _ = mla_read(buf, KvFormat.F32, 32, 8)
    assert latent.data_ptr() == buf.data_ptr()


def test_mla_read__some_entries_of_a_page__same_values() -> None:
    for fmt in KvFormat:
        latent, rope = torch.randn(6, 64), torch.randn(6, 16)
        page = mla_write(latent, rope, fmt)
        whole = mla_read(page, fmt, 64, 16)
        part = mla_read(page[2:5], fmt, 64, 16)
        assert torch.equal(part[0], whole[0][2:5])
        assert torch.equal(part[1], whole[1][2:5])


@pytest.mark.parametrize("fmt", list(KvFormat))
def test_gqa__write_and_read__size_and_error(fmt: KvFormat) -> None:
    k, v = torch.randn(20, 2, 48), torch.randn(20, 2, 32)
    v[:, 1] *= 1000  # heads are scaled apart
    buf = gqa_write(k, v, fmt)
    assert tuple(buf.shape) == (20, gqa_entry_bytes(fmt, 2, 48, 32))
    got_k, got_v = gqa_read(buf, fmt, 2, 48, 32)
    bound = {KvFormat.F32: 0.0, KvFormat.BF16: 0.003, KvFormat.FP8: 0.03, KvFormat.NVFP4: 0.1}[fmt]
    assert relative(got_k, k) <= bound
    assert relative(got_v[:, 0], v[:, 0]) <= bound
    saturated = fmt is KvFormat.NVFP4  # 42 is the largest value of the fixed global scale
    assert got_v[:, 1].abs().max() == 42 if saturated else relative(got_v, v) <= bound


def test_gqa_entry_bytes__head_width_128__as_designed() -> None:
    assert gqa_entry_bytes(KvFormat.NVFP4, 8, 128, 128) == 8 * 2 * (64 + 8)
    assert gqa_entry_bytes(KvFormat.FP8, 8, 128, 128) == 8 * 2 * (128 + 4)
    assert gqa_entry_bytes(KvFormat.BF16, 8, 128, 128) == 8 * 2 * 256
