"""KV pages: what is written comes back, in every format, whatever pages a sequence got."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.spec import Gqa, Indexer, Mixer, Mla, QkNorm, Rings, Rope
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference import (
    gqa_read,
    gqa_write,
    index_read,
    index_write,
    mla_read,
    mla_write,
)

MIXER = Mla(
    n_heads=2, q_rank=None, kv_rank=32, nope_dim=8, rope_dim=16, v_dim=8, softmax_scale=1.0,
    latent_eps=1e-6, rope=Rope(dim=16, base=1e4, interleaved=True),
)  # fmt: skip
GROUPED = Gqa(
    n_heads=4, n_keys=2, head_dim=48, has_bias=False, qk_norm=QkNorm.NONE, norm_eps=1e-6,
    softmax_scale=1.0, rope=Rope(dim=48, base=1e4, interleaved=False),
)  # fmt: skip


def cache(form: KvFormat = KvFormat.F32, pages: int = 8, mixer: Mixer = MIXER) -> KvCache:
    return KvCache(mixer, n_layers=2, n_pages=pages, page_tokens=4, form=form)


def entries(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 32, generator=source),
        torch.randn(count, 16, generator=source),
    )


@pytest.mark.parametrize("form", list(KvFormat))
@pytest.mark.parametrize("sizes", [[11], [1] * 11, [3, 1, 5, 2]])
def test_write_then_read__any_split__equals_one_conversion(
    form: KvFormat, sizes: list[int]
) -> None:
    kv = cache(form)
    sequence = kv.reserve(11)
    assert sequence is not None
    latent, ropes = entries(11, seed=1)
    for size in sizes:
        part = slice(sequence.length, sequence.length + size)
        kv.write(1, sequence, latent[part], ropes[part])
        sequence.length += size
    want = mla_read(mla_write(latent, ropes, form), form, 32, 16)
    for got, wanted in zip(kv.read(1, sequence, 11), want, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("form", list(KvFormat))
def test_grouped__write_in_pieces_then_read__equals_one_conversion(form: KvFormat) -> None:
    kv = cache(form, mixer=GROUPED)
    sequence = kv.reserve(11)
    assert sequence is not None
    source = torch.Generator().manual_seed(9)
    k, v = (torch.randn(11, 2, 48, generator=source) for _ in range(2))
    for size in (3, 1, 5, 2):
        part = slice(sequence.length, sequence.length + size)
        kv.write(1, sequence, k[part], v[part])
        sequence.length += size
    want = gqa_read(gqa_write(k, v, form), form, 2, 48, 48)
    got = kv.read(1, sequence, 11)
    for mine, wanted, original in zip(got, want, (k, v), strict=True):
        assert torch.equal(mine, wanted)
        assert mine.shape == original.shape
        assert (mine - original).abs().max() < {"f32": 1e-9, "bf16": 0.02, "fp8": 0.2}.get(
            form.value, 1.0
        )
    assert not kv.pages(0).any()  # another layer's entries are untouched


def test_read__scattered_pages__same_as_neighbouring_ones() -> None:
    kv = cache()
    first, second, third = (kv.reserve(8) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    kv.release(first)
    kv.release(third)
    wide = kv.reserve(20)  # five pages, with the second sequence's two between them
    assert wide is not None
    assert not wide.in_a_row
    latent, ropes = entries(20, seed=2)
    kv.write(0, wide, latent, ropes)
    assert torch.equal(kv.read(0, wide, 20)[0], latent)
    assert torch.equal(kv.read(0, wide, 7)[1], ropes[:7])


def test_two_sequences__never_share_a_page() -> None:
    kv = cache()
    a, b = kv.reserve(9), kv.reserve(9)
    assert a is not None
    assert b is not None
    assert not set(a.pages) & set(b.pages)
    la, lb = entries(9, seed=3), entries(9, seed=4)
    kv.write(0, a, *la)
    kv.write(0, b, *lb)
    assert torch.equal(kv.read(0, a, 9)[0], la[0])
    assert torch.equal(kv.read(0, b, 9)[0], lb[0])


def test_reserve__too_much__none_and_nothing_lost() -> None:
    kv = cache()
    held = kv.reserve(20)
    assert held is not None
    assert kv.reserve(16) is None
    assert kv.free_tokens == 12
    kv.release(held)
    assert kv.free_tokens == 32
    assert kv.reserve(32) is not None


def test_rewind__then_write__overwrites() -> None:
    kv = cache()
    sequence = kv.reserve(8)
    assert sequence is not None
    latent, ropes = entries(8, seed=5)
    kv.write(0, sequence, latent, ropes)
    sequence.length = 8
    kv.rewind(sequence, 5)
    other, other_ropes = entries(2, seed=6)
    kv.write(0, sequence, other, other_ropes)
    assert torch.equal(kv.read(0, sequence, 7)[0], torch.cat([latent[:5], other]))


def test_entry_bytes__glm_and_deepseek_shape__352_in_nvfp4() -> None:
    mixer = Mla(
        n_heads=1, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
        softmax_scale=1.0, latent_eps=1e-6, rope=Rope(dim=64, base=1e4, interleaved=True),
    )  # fmt: skip
    kv = KvCache(mixer, n_layers=1, n_pages=1, page_tokens=1, form=KvFormat.NVFP4)
    assert kv.entry_bytes == 352


@pytest.mark.parametrize("form", list(KvFormat))
def test_take_out_then_put_in__other_pages__same_entries(form: KvFormat) -> None:
    kv = cache(form)
    first, second = kv.reserve(12), kv.reserve(16)
    assert first is not None
    assert second is not None
    for layer in range(2):
        kv.write(layer, first, *entries(11, seed=layer))
    taken = kv.take_out(first, 3, 7)  # neither begins nor ends with a page
    assert taken.shape == (2, 7, kv.entry_bytes)
    kv.write(0, first, *entries(11, seed=9))  # what was taken is a copy
    kv.put_in(second, 5, taken.reshape(-1))
    for layer in range(2):
        wanted = mla_read(mla_write(*entries(11, seed=layer), form), form, 32, 16)
        for got, want in zip(kv.read(layer, second, 12), wanted, strict=True):
            assert torch.equal(got[5:12], want[3:10])


# -- keys of indexers -----------------------------------------------------------------------------

SPARSE = replace(MIXER, indexer=Indexer(n_heads=2, head_dim=48, top_k=4, interleaved=True))


def sparse_cache(form: KvFormat) -> KvCache:
    """Three layers of which the first and the last have an indexer."""
    return KvCache(
        SPARSE, n_layers=3, n_pages=12, page_tokens=4, form=form, index_layers=(0, 2)
    )  # fmt: skip


def index_keys(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", list(KvFormat))
@pytest.mark.parametrize("sizes", [[11], [3, 1, 5, 2]])
def test_index__written_and_rewound__equals_one_conversion(
    form: KvFormat, sizes: list[int]
) -> None:
    kv = sparse_cache(form)
    between = [kv.reserve(4) for _ in range(3)]
    kv.release(between[0])
    kv.release(between[2])
    sequence = kv.reserve(44)
    assert sequence is not None
    assert not sequence.in_a_row
    keys, other = index_keys(11, 1), index_keys(11, 2)
    for layer, wanted in ((0, keys), (2, other)):
        sequence.length = 0
        kv.write_index(layer, sequence, index_keys(7, 3))  # undone
        for size in sizes:
            here = slice(sequence.length, sequence.length + size)
            kv.write_index(layer, sequence, wanted[here])
            sequence.length += size
    for layer, wanted in ((0, keys), (2, other)):
        stored = index_read(index_write(wanted, form), form, 48)
        assert torch.equal(kv.read_index(layer, sequence, 11), stored)


@pytest.mark.parametrize("form", list(KvFormat))
def test_index__taken_out_and_put_in__keys_go_along(form: KvFormat) -> None:
    kv = sparse_cache(form)
    first, second = kv.reserve(12), kv.reserve(16)
    assert first is not None
    assert second is not None
    for layer in range(3):
        kv.write(layer, first, *entries(11, seed=layer))
    for layer in (0, 2):
        kv.write_index(layer, first, index_keys(11, seed=layer))
    taken = kv.take_out(first, 3, 7)
    kv.put_in(second, 5, taken)
    places = torch.tensor([5, 6, 8, 11])
    for layer in range(3):
        for got, want in zip(
            kv.read_at(layer, second, places), kv.read(layer, first, 11), strict=True
        ):
            assert torch.equal(got, want[places - 2])
    for layer in (0, 2):
        assert torch.equal(
            kv.read_index(layer, second, 12)[5:], kv.read_index(layer, first, 11)[3:10]
        )


# -- layers with a window -------------------------------------------------------------------------

WINDOW = 5


def ringed_cache(form: KvFormat, sequences: int = 2) -> KvCache:
    """The first of two layers keeps the window, and a chunk of up to 6 tokens beside it."""
    rings = Rings((0,), window=WINDOW, pages=4, sequences=sequences)
    return KvCache(GROUPED, n_layers=2, n_pages=24, page_tokens=4, form=form, rings=rings)


def keys_values(count: int, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(count, 2, 48, generator=source) for _ in range(2))
    return k, v


@pytest.mark.parametrize("form", list(KvFormat))
def test_ring__many_times_around__the_window_and_the_chunk_are_there(form: KvFormat) -> None:
    kv = ringed_cache(form)
    other, sequence = kv.reserve(40), kv.reserve(44)
    assert sequence is not None
    assert other is not None
    assert (len(sequence.pages), len(sequence.ring)) == (11, 4)
    assert not set(sequence.ring) & set(other.ring)
    k, v = keys_values(44)
    want = gqa_read(gqa_write(k, v, form), form, 2, 48, 48)
    for size in (6, 1, 5, 6, 6, 1, 1, 6, 6, 6):
        here = slice(sequence.length, sequence.length + size)
        first = max(0, here.start + 1 - WINDOW)
        for layer in range(2):
            kv.write(layer, sequence, k[here], v[here])
            found = kv.read(layer, sequence, here.stop, first=first)
            for got, wanted in zip(found, want, strict=True):
                assert torch.equal(got, wanted[first : here.stop])
        sequence.length += size
    assert not kv.pages(0)[other.ring].any()
    other.length = 8
    with pytest.raises(ValueError, match="13 tokens at once"):
        kv.write(0, other, k[:13], v[:13])
    assert kv.forgets
    assert not cache().forgets


def test_ring__short_sequences__fewer_pages_and_all_come_back() -> None:
    kv = ringed_cache(KvFormat.F32)
    short = [kv.reserve(4) for _ in range(4)]
    assert [len(one.ring) for one in short if one is not None] == [1] * 4
    long = kv.reserve(40)
    assert long is not None
    assert kv.reserve(4) is None  # no page for its window
    kv.pages(0)[long.ring] = 255
    kv.release(long)
    again = kv.reserve(40)
    assert again is not None
    assert not kv.pages(0)[again.ring].any()


@pytest.mark.parametrize("chunk", [3, 6, 8])
def test_ring__taken_out_and_put_in_chunk_by_chunk__what_follows_sees_the_same(chunk: int) -> None:
    kv = ringed_cache(KvFormat.BF16)
    first, second = kv.reserve(28), kv.reserve(28)
    assert first is not None
    assert second is not None
    k, v = keys_values(24)
    for at in range(0, 24, chunk):
        for layer in range(2):
            kv.write(layer, first, k[at : at + chunk], v[at : at + chunk])
        first.length += chunk
        kv.put_in(second, at, kv.take_out(first, at, chunk))
        oldest = max(0, at + chunk + 1 - WINDOW)
        for layer, begin in ((0, oldest), (1, 0)):
            for got, wanted in zip(
                kv.read(layer, second, at + chunk, first=begin),
                kv.read(layer, first, at + chunk, first=begin),
                strict=True,
            ):
                assert torch.equal(got, wanted)
