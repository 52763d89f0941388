"""Models of real shape, as plain numbers, for measuring a step without 70 GB of files.

Models have the blocks of their family, with the catalogue's sizes; `Shape.note` says what differs.
Every router is one of sigmoids with a bias, by which experts are made more popular than others. No
torch here, so that the command line can list the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from moet_desk.catalogue import find_entry
from moet_desk.engine.model_shape import kv_token_bytes
from moet_desk.engine.planned_model import from_catalogue, spec_of
from moet_desk.engine.spec import (
    Gdn,
    Gqa,
    Layer,
    Mixer,
    Mla,
    MoeFfn,
    PooledAttention,
    Spec,
)
from moet_desk.kernels.kinds import Glu, KvFormat

_MOST_ROWS, _MOST_PAIRS = 8, 64  # as in `buffers` and `kernels.triton.cache`, which need torch


@dataclass(frozen=True, slots=True)
class Shape:
    """A named model shape.

    Attributes:
        dense_bytes: all weights of the model that are not routed experts, as its files store them
            (FP8 products, bfloat16 embedding, head and router; or all in bfloat16).
        kv_token_bytes: the model's own NVFP4 KV bytes per token.
        is_fp8: whether dense products are FP8.
        is_rounded: whether those in bfloat16 are rounded to int8, as a plan for 32 GiB has it.
    """

    name: str
    spec: Spec
    dense_bytes: int
    kv_token_bytes: int
    is_fp8: bool = True
    is_rounded: bool = False

    @property
    def most_rows(self) -> int:
        """Rows that a step of this shape can have: a look-up takes so many pairs."""
        return min(_MOST_ROWS, _MOST_PAIRS // self.spec.moe_ffn.router.top_k)

    @property
    def note(self) -> str | None:
        """What differs from the model, None if nothing does."""
        if self.is_rounded:
            return "dense products are rounded to int8: in bfloat16 they do not fit 32 GiB"
        return None

    def with_head(self) -> Shape:
        """The same with an MTP head: of DeepSeek-V3's kind, a layer like its last one with an
        indexer of its own, or of LongCat's, a single attention and a dense part.
        """
        last = self.spec.layers[-1]
        ffn = last.ffn if last.around is None else last.around
        mtp = Layer(last.index + 1, self.spec.attention, ffn)
        return replace(self, spec=replace(self.spec, mtp=mtp))


_TURNED_PARTS = {"glm4_moe": 2, "minimax_m2": 2, "qwen3_next": 4, "qwen3_5_moe": 4}
"""Families whose rope turns one of so many parts of each head."""

_OSS_WINDOW = 128
_OSS_GLU = Glu(limit=7.0, alpha=1.702, shift=1.0)
_V4_GLU = Glu(limit=10.0)
_V4_NAMED = 3  # layers whose experts tables name


def _known(name: str, context: int, *, is_rounded: bool = False) -> Shape:
    """A model of the catalogue with the blocks of its family."""
    entry = find_entry(name)
    if entry is None:
        raise ValueError(f"{name} is not in the catalogue")
    spec = spec_of(entry)
    layers = tuple(
        replace(layer, mixer=_computed(layer.mixer, entry.family)) for layer in spec.layers
    )
    if entry.family == "gpt_oss":
        layers = tuple(_oss_layer(layer) for layer in layers)
    if entry.family == "deepseek_v4":
        layers = tuple(_v4_layer(layer) for layer in layers)
    spec = replace(spec, context=context, layers=layers)
    kv_bytes = kv_token_bytes(spec, KvFormat.NVFP4)
    dense_bytes = entry.dense_bytes
    if is_rounded:
        dense_bytes -= from_catalogue(entry).dense_saving
    is_fp8 = entry.dense_form == "fp8"
    return Shape(name, spec, dense_bytes, kv_bytes, is_fp8, is_rounded)


def _computed(mixer: Mixer, family: str) -> Mixer:
    """Attention of the catalogue's widths with the scale and the rope that steps need."""
    if isinstance(mixer, Gdn):
        return mixer
    if isinstance(mixer, Mla):
        return replace(mixer, softmax_scale=(mixer.nope_dim + mixer.rope_dim) ** -0.5)
    if isinstance(mixer, PooledAttention):
        base = 1e4 if mixer.pool is None else 1.6e5
        rope = replace(mixer.rope, base=base)
        return replace(mixer, softmax_scale=mixer.head_dim**-0.5, rope=rope)
    rope = replace(mixer.rope, dim=mixer.head_dim // _TURNED_PARTS.get(family, 1))
    return replace(mixer, softmax_scale=mixer.head_dim**-0.5, rope=rope)


def _oss_layer(layer: Layer) -> Layer:
    """Sinks, a bias of the output, every other layer with a window, and experts of its kind."""
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, Gqa):
        window = None if layer.index % 2 else _OSS_WINDOW
        mixer = replace(mixer, out_bias=True, has_sinks=True, window=window)
    if isinstance(ffn, MoeFfn):
        router = replace(ffn.router, logit_bias=True)
        ffn = replace(ffn, router=router, router_name="router", glu=_OSS_GLU)
    return replace(layer, mixer=mixer, ffn=ffn)


def _v4_layer(layer: Layer) -> Layer:
    """Experts of its kind, in the first layers named by tables; the router is not its own."""
    if not isinstance(layer.ffn, MoeFfn):
        return layer
    ffn = replace(layer.ffn, name="ffn.", glu=_V4_GLU, projections=("w1", "w3", "w2"))
    if layer.index < _V4_NAMED:
        router = replace(ffn.router, selection_bias=False)
        ffn = replace(ffn, router=router, hashed=True)
    return replace(layer, ffn=ffn)


KNOWN = (
    "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "glm-4.5-air", "glm-4.7", "glm-4.7-flash",
    "minimax-m2.7", "olmoe-1b-7b", "mixtral-8x7b", "qwen3-235b-a22b", "qwen3-coder-480b",
    "deepseek-v3.1", "deepseek-v3.2", "deepseek-r1", "kimi-k2-0905", "kimi-k2.5", "glm-5.2",
    "glm-5.2-fp8", "longcat-flash", "longcat-flash-lite", "qwen3-next-80b",
    "qwen3.6-35b-a3b", "qwen3.5-122b-a10b", "deepseek-v4-flash",
)  # fmt: skip
"""Models of the catalogue whose family runs. Named here, so that the command line need not read
it to list them.
"""

SHAPES: Mapping[str, Callable[[int], Shape]] = {
    **{name: partial(_known, name) for name in KNOWN},
    "glm-5.2": partial(_known, "glm-5.2", is_rounded=True),
}
"""Name -> the shape for a longest context."""
