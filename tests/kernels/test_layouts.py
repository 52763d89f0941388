"""Bytes of rows: the written formula, golden bytes, and the way back."""

from __future__ import annotations

import hashlib

import pytest
import torch

from moet_desk.kernels.layouts import (
    ExpertLayout,
    MatrixLayout,
    base_codes,
    fifth,
    fine_digits,
    pack_base,
    pack_expert,
    pack_fine,
    unpack_base,
    unpack_nibbles,
)
from tests.kernels.makers import all_quads, random_matrix

NIBBLE_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def small_matrix() -> torch.Tensor:
    """One block of +0 with a few others: -6 at 0, 6 at 9, -0.5 at 17, 2 at 30, 3 at 31."""
    nibbles = torch.zeros(1, 32, dtype=torch.uint8)
    nibbles[0, [0, 9, 17, 30, 31]] = torch.tensor([15, 7, 9, 4, 5], dtype=torch.uint8)
    return nibbles


def test_pack_base__one_block__bytes_worked_out_by_hand() -> None:
    # +0 is code 2, so an untouched nibble of a word is 0b1010.
    packed = pack_base(small_matrix(), torch.tensor([[0x7B]], dtype=torch.uint8))
    assert packed.numpy().tobytes().hex() == "e8aaaaaa" + "9aaaaaea" + "7b"


def test_pack_fine__one_block__bytes_worked_out_by_hand() -> None:
    # words 0, 2, 4, 7 are 2, 5 * 2, 5 * 1 and 25 * 4 at bits 0, 20, 40, 70
    assert pack_fine(small_matrix()).numpy().tobytes().hex() == "0200a000" + "00050000" + "0019"


def test_pack_base__random_matrix__each_code_where_the_formula_says() -> None:
    nibbles, scales = random_matrix(3, 96)
    buf = pack_base(nibbles, scales).numpy().tobytes()
    codes = base_codes(nibbles)
    for n in range(3):
        for k in range(96):
            g, h, o, b = k // 32, k % 32 // 16, k % 16 // 4, k % 4
            at = 4 * (h * 9 + n * 3 + g)
            word = int.from_bytes(buf[at : at + 4], "little")
            assert word >> (4 * ((o % 2) * 4 + b) + 2 * (o // 2)) & 3 == codes[n, k]
    assert buf[72:] == scales.numpy().tobytes()


def test_pack_fine__random_matrix__each_digit_where_the_formula_says() -> None:
    nibbles, _ = random_matrix(3, 96)
    buf = pack_fine(nibbles).numpy().tobytes()
    digits = fine_digits(nibbles)
    for n in range(3):
        for g in range(3):
            i = 3 * n + g
            record = int.from_bytes(
                buf[4 * i : 4 * i + 4]
                + buf[36 + 4 * i : 40 + 4 * i]
                + buf[72 + 2 * i : 74 + 2 * i],
                "little",
            )
            for j in range(8):
                word = record >> (10 * j) & 1023
                for d in range(4):
                    assert word // 5**d % 5 == digits[n, 32 * g + 4 * j + d]


def test_base_codes__all_nibbles__nearest_class_with_the_sign_bit() -> None:
    codes = base_codes(torch.arange(16, dtype=torch.uint8))
    levels = [[-4, -1, 1, 4][int(code)] for code in codes]
    for nibble, level in enumerate(levels):
        assert abs(level) == (1 if abs(NIBBLE_VALUES[nibble]) <= 2 else 4)
        assert (level < 0) == (nibble >= 8)


def test_unpack__all_nibbles_and_all_scales__bit_for_bit() -> None:
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(256, 4)  # [256, 64]
    nibbles = nibbles.roll(3, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 2)
    layout = MatrixLayout(256, 64)
    base, fine = pack_base(nibbles, scales), pack_fine(nibbles)
    got_nibbles, got_scales = unpack_nibbles(base, fine, layout)
    assert torch.equal(got_nibbles, nibbles)
    assert torch.equal(got_scales, scales)
    codes, again = unpack_base(base, layout)
    assert torch.equal(codes, base_codes(nibbles))
    assert torch.equal(again, scales)


def test_all_quads__turns__each_quad_in_each_word() -> None:
    shifts = 4 * torch.arange(4)
    seen = torch.zeros(8, 1 << 16, dtype=torch.bool)
    for turn in range(8):
        quads = (all_quads(turn).long().view(-1, 8, 4) << shifts).sum(-1)  # [8192, 8]
        for word in range(8):
            seen[word, quads[:, word]] = True
    assert seen.all()


def test_unpack__every_quad_of_nibbles_and_every_scale__bit_for_bit() -> None:
    # 65,536 quads x 256 scales; the words they lie in change with the scale, so all are seen
    layout = MatrixLayout(8192, 32)
    for scale in range(256):
        nibbles = all_quads(scale % 8)
        scales = torch.full((8192, 1), scale, dtype=torch.uint8)
        got = unpack_nibbles(pack_base(nibbles, scales), pack_fine(nibbles), layout)
        assert torch.equal(got[0], nibbles), scale
        assert torch.equal(got[1], scales), scale


@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 64), (64, 32), (7, 1056)])
def test_unpack__random_matrix__bit_for_bit(n: int, k: int) -> None:
    nibbles, scales = random_matrix(n, k, low=0, high=255)
    base, fine = pack_base(nibbles, scales), pack_fine(nibbles)
    layout = MatrixLayout(n, k)
    assert (base.numel(), fine.numel()) == (layout.base_bytes, layout.fine_bytes)
    got = unpack_nibbles(base, fine, layout)
    assert torch.equal(got[0], nibbles)
    assert torch.equal(got[1], scales)


def test_pack_expert__made_by_arithmetic__rows_never_change() -> None:
    def noise(n: int, k: int, salt: int, span: int) -> torch.Tensor:
        x = (torch.arange(n * k, dtype=torch.int64) + salt) * 2654435761
        return ((x >> 13) % span).to(torch.uint8).view(n, k)

    def part(n: int, k: int, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
        return noise(n, k, salt, 16), noise(n, k // 32, salt + 7, 200)

    base, fine = pack_expert(part(64, 96, 1), part(64, 96, 2), part(96, 64, 3))
    digest = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in (base, fine)]
    assert digest == ["3e755d28446fa58d", "df319ef15b7a684a"]


def test_pack_expert__demo_shape__padded_rows_in_order() -> None:
    layout = ExpertLayout(512, 128)
    gate, up, down = random_matrix(128, 512), random_matrix(128, 512), random_matrix(512, 128)
    base, fine = pack_expert(gate, up, down)
    assert (layout.base_bytes, layout.base_stride) == (55296, 57344)
    assert (layout.fine_bytes, layout.fine_stride) == (61440, 61440)
    assert (base.numel(), fine.numel()) == (layout.base_stride, layout.fine_stride)
    assert layout.slot_floats == 3 * 512 * 128
    assert not base[layout.base_bytes :].any()
    split = layout.gate_up.base_bytes
    assert torch.equal(base[split : layout.base_bytes], pack_base(*down))
    stacked = pack_base(torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]]))
    assert torch.equal(base[:split], stacked)


def test_layout__width_not_in_blocks__refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"\[4, 48\]"):
        MatrixLayout(4, 48)
    with pytest.raises(ValueError, match="40"):
        ExpertLayout(64, 40)
    with pytest.raises(ValueError, match=r"\[0, 32\]"):
        MatrixLayout(0, 32)


def test_pack__parts_that_do_not_fit__refused() -> None:
    nibbles, scales = random_matrix(4, 64)
    with pytest.raises(ValueError, match=r"\(4, 1\)"):
        pack_base(nibbles, scales[:, :1])
    with pytest.raises(ValueError, match="not one expert"):
        pack_expert((nibbles, scales), (nibbles, scales), (nibbles, scales))


def test_fifth__every_digit_word__equals_division() -> None:
    x = torch.arange(1024).numpy()
    assert (fifth(x) == x // 5).all()
    assert (1024 * 0x334) >> 12 != 1024 // 5  # the bound is tight
