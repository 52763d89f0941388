"""A model as the planner sees it, made from an installed pack or from the catalogue. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moet_desk.catalogue import CatalogueEntry
from moet_desk.engine.dense_format import PLAIN, saving
from moet_desk.engine.families import packed_head, runs, spec_for
from moet_desk.engine.families.tensors import NGRAM_TABLES, dense_shapes
from moet_desk.engine.model_shape import (
    RowSizes,
    cpu_shape,
    device_shape,
    kv_token_bytes,
)
from moet_desk.engine.spec import (
    DenseFfn,
    Gdn,
    Gqa,
    Indexer,
    Layer,
    Mixer,
    Mla,
    MoeFfn,
    Ngrams,
    QkNorm,
    Rope,
    Router,
    Spec,
)
from moet_desk.errors import MoetError, fail
from moet_desk.kernels.kinds import KvFormat, Score
from moet_desk.kernels.row_sizes import ExpertLayout
from moet_desk.plan import ModelShape, Wishes
from moet_desk.store.headers import HeaderEntry, read_header
from moet_desk.store.pack_format import DENSE_FILE
from moet_desk.store.pack_meta import read_meta

_ROPE_DIM, _LATENT = 64, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """What is to be planned.

    Attributes:
        dense_bytes: weights that are no routed experts and are loaded, as stored.
        dense_saving: what rounding them to 8 bits would save.
        not_yet: why it does not run here today; empty if it does.
        stands_in: whether a card has no kernels for its attention, so that what reading a prompt
            takes there is estimated with MLA of as many heads.
        kv_stated: KV bytes of a token by format, where the spec cannot say them.
        state_bytes: of a request, whatever its length, where the spec cannot say it.
        table_bytes: of tables of n-grams, which stay on the drive: rows are read from there.
        pack_bytes: on the drive.
        download_bytes: of the source; None: not known, or it is here already.
        is_installed: whether its pack is on this computer.
    """

    name: str
    spec: Spec
    sizes: RowSizes
    dense_bytes: int
    pack_bytes: int
    dense_saving: int = 0
    table_bytes: int = 0
    not_yet: str = ""
    stands_in: bool = False
    kv_stated: Mapping[KvFormat, int] | None = None
    state_bytes: int = 0
    download_bytes: int | None = None
    is_installed: bool = False

    def kv_token_bytes(self, form: KvFormat, *, with_head: bool = False) -> int:
        """KV bytes of a token, all layers, the MTP head's too if it is loaded."""
        if self.kv_stated is not None:
            return self.kv_stated[form]
        return kv_token_bytes(self.spec, form, with_head=with_head)

    def device_shape(
        self, form: KvFormat, wishes: Wishes, *, with_head: bool = False
    ) -> ModelShape:
        """For `plan_device_tiers`."""
        shape = device_shape(
            self.spec, self.sizes, form, wishes, dense_bytes=self.dense_bytes, with_head=with_head
        )
        return self._with_state(shape, form, with_head=with_head)

    def cpu_shape(self, form: KvFormat, *, with_head: bool = False) -> ModelShape:
        """For `plan_tiers`."""
        shape = cpu_shape(
            self.spec, self.sizes, form, dense_bytes=self.dense_bytes, with_head=with_head
        )
        return self._with_state(shape, form, with_head=with_head)

    def _with_state(self, shape: ModelShape, form: KvFormat, *, with_head: bool) -> ModelShape:
        if self.kv_stated is None:
            return shape
        kv = self.kv_token_bytes(form, with_head=with_head)
        states = self.state_bytes or shape.state_bytes
        return replace(shape, kv_token_bytes=kv, state_bytes=states)


def from_pack(pack: Path) -> PlannedModel:
    """An installed model.

    Raises:
        MoetError: MD-PACK-03, 06 or 07 it is not ready; MD-PACK-01, MD-SRC-07 it does not run.
    """
    meta = read_meta(pack)
    path = pack / "config.json"
    try:
        config = json.loads(path.read_bytes())
        names = [entry.name.removesuffix(".weight") for entry in _dense_entries(pack)]
        has_mtp = packed_head(config, meta.moe_layers, names, path=str(path))
        dense_bytes, table = (pack / DENSE_FILE).stat().st_size, table_bytes(pack)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise fail("MD-PACK-07", path=str(path), reason=str(error), model=pack.name) from error
    spec = spec_for(config, path=str(path), has_mtp=has_mtp)
    sizes = RowSizes(ExpertLayout(meta.hidden, meta.inter), meta.base_stride, meta.fine_stride)
    rows = meta.n_rows * (meta.base_stride + meta.fine_stride)
    return PlannedModel(
        name=pack.name, spec=spec, sizes=sizes, dense_bytes=dense_bytes - table,
        dense_saving=dense_saving(pack), table_bytes=table, pack_bytes=rows + dense_bytes,
        is_installed=True,
    )  # fmt: skip


def loaded_bytes(pack: Path) -> int:
    """Bytes of a pack's dense weights that are loaded: all but tables of n-grams.

    Raises:
        MoetError: MD-PACK-07 there is no such file, or it is damaged.
    """
    table = table_bytes(pack)
    return (pack / DENSE_FILE).stat().st_size - table


def table_bytes(pack: Path) -> int:
    """Bytes of a pack's tables of n-grams. Raises as `loaded_bytes`."""
    entries = _dense_entries(pack)
    return sum(entry.end - entry.begin for entry in entries if entry.name.startswith(NGRAM_TABLES))


def dense_saving(pack: Path) -> int:
    """Bytes that rounding a pack's dense weights to 8 bits would save, from the file's header.

    Raises:
        MoetError: MD-PACK-07 there is no such file, or it is damaged.
    """
    return saving(
        (entry.name.removesuffix(".weight"), entry.shape, entry.end - entry.begin)
        for entry in _dense_entries(pack)
        if entry.dtype in PLAIN
    )


def _dense_entries(pack: Path) -> list[HeaderEntry]:
    path = pack / DENSE_FILE
    try:
        return read_header(path)
    except (OSError, MoetError) as error:
        raise fail("MD-PACK-07", path=str(path), reason=str(error), model=pack.name) from error


def _stated_saving(entry: CatalogueEntry, spec: Spec) -> int:
    """The same of published sizes; 0 if they are not known in full."""
    if entry.dense_form != "bf16" or (entry.mla is None and entry.gqa is None):
        return 0
    return saving((name, shape, 2 * math.prod(shape)) for name, shape in dense_shapes(spec))


def from_catalogue(entry: CatalogueEntry) -> PlannedModel:
    """A model that is only known by its published sizes."""
    not_yet = entry.not_yet
    if not not_yet and not runs(entry.family):
        not_yet = f"the family {entry.family} is not written yet"
    stands_in = entry.mla is None and entry.gqa is None
    spec = spec_of(entry)
    return PlannedModel(
        name=entry.name,
        spec=spec,
        dense_saving=_stated_saving(entry, spec),
        sizes=RowSizes.of(entry.layout),
        dense_bytes=entry.dense_bytes,
        table_bytes=entry.table_bytes,
        pack_bytes=entry.pack_bytes,
        not_yet=not_yet,
        stands_in=stands_in,
        kv_stated={form: entry.kv_token_bytes(form) for form in KvFormat} if stands_in else None,
        state_bytes=entry.state_bytes,
        download_bytes=entry.download_bytes,
    )


def spec_of(entry: CatalogueEntry) -> Spec:
    """A spec with the sizes of an entry: right in every width, not meant to be computed with."""
    facts = entry.mla or entry.gqa
    n_identity = 0 if entry.mla is None else entry.mla.identity_experts
    router = Router(
        entry.experts, entry.top_k, Score.SIGMOID, True, 1, 1, True, 1.0, n_identity=n_identity
    )
    has_bias = entry.gqa is not None and entry.gqa.expert_bias
    shared = facts.shared_inter if facts else entry.inter
    moe = MoeFfn(router, entry.inter, shared, expert_bias=has_bias)
    if entry.gqa is not None and entry.gqa.shared_gate:
        moe = replace(moe, shared_gate=True, shared_name="shared_expert.")
    dense = DenseFfn(facts.dense_inter if facts else entry.inter)
    around = dense if entry.mla is not None and entry.mla.per_layer > 1 else None
    ngrams = None
    if entry.ngrams is not None and facts is not None:
        n_tables = entry.ngrams.splits * (entry.ngrams.longest - 1)
        ngrams = Ngrams(
            entry.ngrams.longest, entry.ngrams.splits, entry.ngrams.ratio * facts.vocab + 1,
            width=entry.hidden // n_tables, end=0,
        )  # fmt: skip
    n_dense = entry.layers - entry.moe_layers
    mixers = _mixers_of(entry)
    return Spec(
        model_type=entry.family, vocab=facts.vocab if facts else 1, hidden=entry.hidden,
        context=entry.context, norm_eps=1e-6, tied_head=False, mtp=None, ngrams=ngrams,
        layers=tuple(
            Layer(i, mixers[i], dense if i < n_dense else moe, around) for i in range(entry.layers)
        ),
    )  # fmt: skip


def _mixers_of(entry: CatalogueEntry) -> list[Mixer]:
    """Of each layer; of those with sparse attention, the first ones have the indexers."""
    mixer, mla, gqa, gdn = _mixer_of(entry), entry.mla, entry.gqa, entry.gdn
    if gdn is not None:
        linear = Gdn(
            gdn.keys, gdn.values, gdn.key_dim, gdn.value_dim, gdn.kernel, norm_eps=1e-6,
            fused=gdn.fused,
        )  # fmt: skip
        return [linear if (i + 1) % gdn.full_every else mixer for i in range(entry.layers)]
    if gqa is not None and gqa.window and isinstance(mixer, Gqa):
        near = replace(mixer, window=gqa.window)
        return [mixer if i % gqa.window_every else near for i in range(entry.layers)]
    if mla is None or not mla.index_layers or not isinstance(mixer, Mla):
        return [mixer] * entry.layers
    indexer = Indexer(mla.index_heads, mla.index_dim, mla.index_top_k, interleaved=True)
    own, reusing = replace(mixer, indexer=indexer), replace(mixer, reuses_choice=True)
    return [own if i < mla.index_layers else reusing for i in range(entry.layers)]


def _mixer_of(entry: CatalogueEntry) -> Mixer:
    """Its attention, or MLA of as many heads for one that is not written."""
    mla, gqa = entry.mla, entry.gqa
    if gqa is not None:
        return Gqa(
            entry.heads, gqa.keys, entry.head_dim, gqa.has_bias, QkNorm(gqa.qk_norm),
            norm_eps=1e-6, softmax_scale=1.0,
            rope=Rope(dim=entry.head_dim, base=10000.0, interleaved=False),
            out_gate=gqa.out_gate,
        )  # fmt: skip
    rope = Rope(dim=_ROPE_DIM, base=10000.0, interleaved=True)
    if mla is not None:
        return Mla(
            mla.heads, mla.q_rank, mla.kv_rank, mla.nope_dim, mla.rope_dim, mla.value_dim,
            softmax_scale=1.0, latent_eps=1e-6, rope=rope,
        )  # fmt: skip
    nope = max(entry.head_dim - _ROPE_DIM, _ROPE_DIM)
    return Mla(
        entry.heads, None, _LATENT, nope, _ROPE_DIM, entry.head_dim,
        softmax_scale=1.0, latent_eps=1e-6, rope=rope,
    )  # fmt: skip
