"""The catalogue: what it says agrees with what can be counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk import catalogue
from moet_desk.catalogue import CatalogueEntry, find_entry, load_catalogue, parse
from moet_desk.engine.families import MODULE_OF_TYPE, runs
from moet_desk.engine.families.tensors import NGRAM_TABLES, dense_shapes
from moet_desk.engine.model_shape import kv_token_bytes
from moet_desk.engine.planned_model import spec_of
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat
from moet_desk.units import GIB

ENTRIES = load_catalogue()
MLA = [entry for entry in ENTRIES if entry.mla is not None]
KNOWN = [entry for entry in ENTRIES if entry.mla or entry.gqa]


def name_of(entry: CatalogueEntry) -> str:
    return entry.name


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_entry__routed_experts__as_many_as_stated(entry: CatalogueEntry) -> None:
    counted = entry.n_rows * 3 * entry.hidden * entry.inter
    stated = (entry.params_b - entry.dense_params_b) * 1e9 - entry.table_numbers
    assert counted == pytest.approx(stated, rel=0.005)


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_entry__2_bit_bytes__as_stated(entry: CatalogueEntry) -> None:
    assert entry.n_rows * entry.layout.base_bytes / GIB == pytest.approx(entry.base_gib, abs=0.06)
    each = entry.dense_gib * GIB / (entry.dense_params_b * 1e9)
    if entry.dense_form == "bf16":
        assert each == pytest.approx(2.0, rel=0.01)
    else:  # the embedding, the head and the routers stay in bfloat16
        assert 1.02 < each < 1.5


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_entry__active_weights__about_what_a_token_reads(entry: CatalogueEntry) -> None:
    chosen = entry.top_k * entry.moe_layers * 3 * entry.hidden * entry.inter / 1e9
    assert entry.active_b is not None
    router = spec_of(entry).moe_ffn.router
    chosen *= router.mean_used / router.top_k
    # makers leave out the embedding, and some the head; all names are rounded
    assert chosen * 0.95 <= entry.active_b + 0.2
    assert entry.active_b <= (chosen + entry.dense_params_b) * 1.1


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_entry__recommended_ram__holds_all_2_bit_experts(entry: CatalogueEntry) -> None:
    usable = 0.7 * (0.98 * entry.ram_gib - 5)  # the planner's share of what a desktop leaves
    assert entry.base_gib <= usable
    assert entry.ram_gib <= 2.2 * entry.base_gib + 24


@pytest.mark.parametrize("entry", KNOWN, ids=name_of)
def test_attention__dense_bytes_counted_from_tensor_shapes__as_stated(
    entry: CatalogueEntry,
) -> None:
    total = 0
    for name, shape in dense_shapes(spec_of(entry)):
        if name.startswith(NGRAM_TABLES):
            continue
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if entry.dense_form == "bf16":
            total += 2 * size
        elif len(shape) == 1:
            total += 4 * size
        elif "embed" in name or "lm_head" in name or name.endswith(".gate"):
            total += 2 * size
        else:  # FP8 with a float32 scale per 128 x 128
            total += size + 4 * -(-shape[0] // 128) * -(-shape[1] // 128)
    assert total / GIB == pytest.approx(entry.dense_gib, abs=0.05)


@pytest.mark.parametrize("entry", MLA, ids=name_of)
def test_mla__kv_bytes__the_engines_own(entry: CatalogueEntry) -> None:
    assert entry.kv_token_bytes(KvFormat.BF16) == kv_token_bytes(spec_of(entry), KvFormat.BF16)


@pytest.mark.parametrize("form", [KvFormat.BF16, KvFormat.FP8, KvFormat.NVFP4])
def test_pooled__kv_bytes__the_engines_own(form: KvFormat) -> None:
    entry = find_entry("deepseek-v4-flash")
    assert entry is not None
    assert entry.kv_token_bytes(form) == kv_token_bytes(spec_of(entry), form)


@pytest.mark.parametrize("entry", KNOWN, ids=name_of)
def test_attention__dense_layers__all_that_are_no_moe_layers(entry: CatalogueEntry) -> None:
    facts = entry.mla or entry.gqa
    assert facts is not None
    assert facts.dense_layers == entry.layers - entry.moe_layers


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.gqa], ids=name_of)
@pytest.mark.parametrize("form", [KvFormat.BF16, KvFormat.NVFP4])
def test_gqa__kv_bytes__the_engines_own(entry: CatalogueEntry, form: KvFormat) -> None:
    assert entry.kv_token_bytes(form) == kv_token_bytes(spec_of(entry), form)


def test_runnable__only_families_that_are_written() -> None:
    running = {entry.name for entry in ENTRIES if runs(entry.family) and not entry.not_yet}
    assert running == {
        "deepseek-v3.1", "deepseek-r1", "glm-4.5-air", "glm-4.7", "qwen3-30b-a3b",
        "qwen3-235b-a22b", "qwen3-coder-480b", "olmoe-1b-7b", "mixtral-8x7b", "glm-4.7-flash",
        "minimax-m2.7", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v3.2", "glm-5.2", "glm-5.2-fp8",
        "longcat-flash", "qwen3-next-80b", "qwen3.6-35b-a3b", "qwen3.5-122b-a10b",
        "kimi-k2-0905", "kimi-k2.5", "longcat-flash-lite", "deepseek-v4-flash",
    }  # fmt: skip
    for entry in ENTRIES:
        assert entry.not_yet or entry.family in MODULE_OF_TYPE


def test_names__unique_and_found_by_name_and_repository() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert find_entry(entry.name.upper()) is entry
        assert find_entry(entry.repo) is entry
    assert find_entry("no-such-model") is None


def test_parse__a_misspelt_key__refused() -> None:
    with pytest.raises(TypeError, match="contxt"):
        parse('[[model]]\nname = "x"\ncontxt = 5\n')


@pytest.mark.parametrize("text", ["[[model]\n", "[[model]]\nname = 1\n", "x = 1\n"])
def test_catalogue__not_as_it_was__said_with_the_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "catalogue.toml"
    path.write_text(text)
    monkeypatch.setattr(catalogue, "_find", lambda: path)
    read = load_catalogue.__wrapped__  # without what was read before
    with pytest.raises(MoetError) as caught:
        read()
    assert caught.value.code == "MD-CAT-01"
    assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(MoetError, match="MD-CAT-01"):
        read()
