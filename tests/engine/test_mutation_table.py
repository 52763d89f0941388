"""The table of mutations is complete: each registered family, each field of its spec that changes
the maths and not the tensors' shapes, has a wrong value that a test notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import pytest

from moet_desk.engine.families import MODULE_OF_TYPE, spec_for
from moet_desk.engine.spec import Gdn, Gqa, MoeFfn, QkNorm, Spec
from moet_desk.kernels.kinds import Score
from tests.engine.family_mutations import MUTATIONS, Mutation, attention, router
from tests.engine.test_family_maths import EPSILON_NAMES
from tests.engine.test_v4 import EPSILONS as V4_EPSILONS
from tests.engine.test_v4 import MUTATIONS as V4_MUTATIONS
from tests.engine.test_v4 import SMALL
from tests.engine.tiny_models import MODELS

SAME_MATHS = {
    "kimi_k25": "deepseek_v3",  # tests/engine/test_kimi.py: the same spec
    "longcat_flash_ngram": "longcat_flash",  # test_ngrams.py tries what its embedding has beside
}
"""Families whose layers are those of another."""

SIZES = frozenset(
    "Mla.n_heads Mla.q_rank Mla.kv_rank Mla.nope_dim Mla.rope_dim Mla.v_dim Gqa.n_heads Gqa.n_keys"
    " Gqa.head_dim Gdn.n_keys Gdn.n_values Gdn.key_dim Gdn.value_dim Gdn.kernel Indexer.n_heads"
    " Indexer.head_dim Router.n_experts Router.n_identity MoeFfn.inter DenseFfn.inter Mla.rope.dim"
    " Spec.vocab Spec.hidden Spec.context Layer.index PooledAttention.n_heads Pool.ratio"
    " PooledAttention.head_dim PooledAttention.q_rank PooledAttention.out_groups"
    " PooledAttention.out_rank PoolIndexer.n_heads PoolIndexer.head_dim Streams.n".split()
)
"""Fields that tensors' shapes follow from: files that do not fit them are refused."""

NAMES = frozenset(
    "MoeFfn.name MoeFfn.router_name MoeFfn.bias_name MoeFfn.shared_name Spec.model_type"
    " Spec.tied_head".split()
)
"""What tensors are called, and which are there."""

EPSILONS = frozenset("Spec.norm_eps Mla.latent_eps Gqa.norm_eps".split())
"""Shown by small weights alone: `test_mutated_epsilon`."""

ELSEWHERE = {
    "Gqa.out_gate": "test_delta_maths.py: output gate left out",
    "Gdn.fused": "test_delta_maths.py: fused products as if they were flat",
    "Gdn.norm_eps": "test_delta_maths.py: no norm of heads",
    "Indexer.norm_eps": "tests/kernels/test_indexer.py: 1e-6 is in no config",
}

OFF: tuple[Any, ...] = (None, False, 0, QkNorm.NONE)
"""Of a part that a model does not have; with it on, tensors would be missing."""

ALWAYS = ("interleaved", "renormalize", "norm_offset")
"""Where these values mean something too."""


def spec_of(name: str) -> Spec:
    """The spec of a tiny model, from the config that transformers would save."""
    from transformers import AutoConfig

    kwargs = {"model_type": "deepseek_v3", **MODELS[name]}
    config = AutoConfig.for_model(**kwargs).to_dict()
    return spec_for(config, path=name, has_mtp=False)


def leaves(record: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Fields that are no records, under the record's own name; a rope counts as its attention's."""
    own = name or type(record).__name__
    for field in fields(record):
        value = getattr(record, field.name)
        path = f"{own}.{field.name}"
        if field.name in ("rope", "yarn", "glu") and is_dataclass(value):
            yield from leaves(value, path)
        elif is_dataclass(value) and not isinstance(value, Enum):
            yield from leaves(value)
        elif not isinstance(value, tuple):
            yield path, value


def parts_of(spec: Spec) -> list[tuple[str, Any]]:
    """Leaves of the whole model; layers in order."""
    layers = [leaf for layer in spec.layers for leaf in leaves(layer)]
    return [*leaves(spec), *layers]


def in_use(spec: Spec) -> set[str]:
    """Fields that change this model's maths and nothing else."""
    used = {p for p, value in parts_of(spec) if value not in OFF or p.endswith(ALWAYS)}
    plain = {"MoeFfn.glu.alpha"} if spec.moe_ffn.glu.alpha == 1.0 else set()
    if spec.moe_ffn.router.n_groups == 1:
        plain |= {"Router.n_groups", "Router.kept_groups"}
    if spec.moe_ffn.router.score is Score.TOPK_SOFTMAX:  # these add up to one anyway
        plain.add("Router.renormalize")
    # parts of yarn are in use, and so in question, together
    yarn = {path for path in used if ".yarn." in path}
    gains = {path for path, value in parts_of(spec) if path.endswith("_gain") and value == 1.0}
    groups = {path.rpartition(".")[0] for path in yarn}
    return used - SIZES - NAMES - plain - yarn - gains | groups


def touched(spec: Spec, mutant: Spec) -> set[str]:
    """Fields that differ; a part that is gone counts as itself."""
    before, after = parts_of(spec), parts_of(mutant)
    old, new = [path for path, _ in before], [path for path, _ in after]
    gone = {path.rpartition(".")[0] for path in set(old) - set(new)}
    if old == new:
        return {path for (path, a), (_, b) in zip(before, after, strict=True) if a != b}
    return gone | {path for path, value in after if path in old and (path, value) not in before}


def missing_of(module: str) -> set[str]:
    """Fields of a family that no mutation changes."""
    used, noticed = set[str](), {*ELSEWHERE}
    cases = list(cases_of(SAME_MATHS.get(module, module)))
    assert cases, f"no tiny model of {module}"
    for name, spec, mutations in cases:
        used |= in_use(spec)
        if name in EPSILON_NAMES:
            noticed |= EPSILONS
        for mutate in mutations.values():
            noticed |= touched(spec, mutate(spec))
    return used - noticed


def cases_of(module: str) -> Iterator[tuple[str, Spec, Mapping[str, Mutation]]]:
    """Tiny models of a family, with the wrong specs that are tried."""
    if module == "deepseek_v4":
        limit = {"no limit": _without_limit}  # test_limit__reached
        mutations = {**V4_MUTATIONS, **V4_EPSILONS, **limit, **OFFSET}
        yield "v4", spec_for(SMALL, path="v4", has_mtp=False), mutations
        return
    for name, mutations in MUTATIONS.items():
        spec = spec_of(name)
        if spec.model_type == module:
            yield name, spec, {**mutations, **OFFSET}


def _offset(spec: Spec) -> Spec:
    return replace(spec, norm_offset=spec.norm_offset + 1.0)


OFFSET = {"norms with 1 + w": _offset}
"""Tried for every model beside the table, in its weights."""


def _without_limit(spec: Spec) -> Spec:
    ffn = replace(spec.moe_ffn, glu=replace(spec.moe_ffn.glu, limit=None))
    return replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer in spec.layers))


@pytest.mark.parametrize("module", sorted(set(MODULE_OF_TYPE.values())))
def test_table__registered_family__every_field_in_use_has_a_wrong_value(module: str) -> None:
    assert missing_of(module) == set()


def test_table__every_tiny_model__is_in_it() -> None:
    assert set(MUTATIONS) == set(MODELS)


def test_in_use__a_new_field_of_a_family__would_be_missed() -> None:
    """The check itself: what it asks for, and that it sees what a mutation leaves alone."""
    spec = spec_of("glm")
    assert {
        "Gqa.rope.interleaved", "Gqa.rope.base", "Gqa.rope.dim", "Gqa.has_bias", "Gqa.qk_norm",
        "Gqa.softmax_scale", "Router.scale", "Router.score", "Router.selection_bias",
        "Router.renormalize", "Router.top_k", "MoeFfn.shared_inter", "Gqa.norm_eps",
    } <= in_use(spec)  # fmt: skip
    assert "Gqa.has_sinks" not in in_use(spec)
    assert "Gqa.has_sinks" in in_use(spec_of("gpt_oss"))
    assert {"Gqa.window", "Gqa.rope.yarn", "MoeFfn.glu.limit"} <= in_use(spec_of("gpt_oss"))
    assert touched(spec, attention(has_bias=False)(spec)) == {"Gqa.has_bias"}
    assert touched(spec, router(scale=3.0)(spec)) == {"Router.scale"}
    yarn = spec_of("kimi_k2")
    without = attention(rope=lambda rope: replace(rope, yarn=None))(yarn)
    assert "Mla.rope.yarn" in touched(yarn, without)
    assert touched(spec, spec) == set()
    kinds = {type(layer.mixer) for layer in spec_of("qwen3_5").layers}
    assert kinds == {Gdn, Gqa}
    assert isinstance(spec.layers[1].ffn, MoeFfn)
