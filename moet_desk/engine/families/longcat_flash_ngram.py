"""LongCat-Flash-Lite: LongCat-Flash behind an embedding with tables of n-grams.

Its MTP head is left out: it reads an embedding of its own, and what that is could not be found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families import longcat_flash
from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import no_head
from moet_desk.engine.spec import Ngrams, Spec
from moet_desk.store.pack_format import PackPlan

NGRAM_KEYS = frozenset("ngram_vocab_size_ratio emb_neighbor_num emb_split_num".split())
"""What this family has and LongCat-Flash has not."""

UNUSED_KEYS = frozenset(("disable_quant_module",))
"""Of the program that made FP8 files: each tensor says by itself how it is stored."""

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    other = NGRAM_KEYS | UNUSED_KEYS
    same = {key: value for key, value in config.items() if key not in other}
    plain = longcat_flash.spec(same, path=path, has_mtp=False)
    ngrams = _ngrams(Keys(config, path=path), plain)
    return replace(plain, model_type="longcat_flash_ngram", ngrams=ngrams)


def _ngrams(keys: Keys, plain: Spec) -> Ngrams:
    longest, splits = keys.count("emb_neighbor_num", least=2), keys.count("emb_split_num")
    n_tables = splits * (longest - 1)
    if plain.hidden % n_tables:
        raise keys.wrong(f"{n_tables} tables of n-grams cannot share {plain.hidden} numbers")
    return Ngrams(
        longest=longest,
        splits=splits,
        least_rows=keys.count("ngram_vocab_size_ratio") * plain.vocab + 1,
        width=plain.hidden // n_tables,
        end=keys.count("eos_token_id", least=0),
    )


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`. The embedding is shared by two parts of the released program, so
    files may have it under either name.
    """
    made = longcat_flash.plan(spec)
    return replace(
        made, renames=(("model.ngram_embeddings.word_embeddings", "model.embed_tokens"),)
    )
