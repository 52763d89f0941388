"""Models of real shape, as plain numbers, for measuring a step without 70 GB of files.

Where a family's attention does not exist here yet, MLA stands in for it, with sizes chosen so that
the dense weights have about as many bytes as the model's; `Shape.note` says how far it is off.
Every router is one of sigmoids with a bias, by which experts are made more popular than others. No
torch here, so that the command line can list the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moet_desk.engine.spec import (
    DenseFfn,
    Gqa,
    Layer,
    Mixer,
    Mla,
    MoeFfn,
    QkNorm,
    Rope,
    Router,
    Spec,
)
from moet_desk.kernels.kinds import Score

_MOST_ROWS, _MOST_PAIRS = 8, 64  # as in `buffers` and `kernels.triton.cache`, which need torch
_RANK, _ROPE_DIM, _HEAD_DIM = 512, 64, 128
_NVFP4_ENTRY_BYTES = 352
"""KV bytes per token and layer of MLA with these widths."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A named model shape.

    Attributes:
        stands_for: what the model has in the place of plain MLA; None if it has just that.
        dense_bytes: all weights of the model that are not routed experts, as FP8 files store them
            (FP8 products, bfloat16 embedding, head and router).
        kv_token_bytes: the model's own NVFP4 KV bytes per token.
    """

    name: str
    spec: Spec
    stands_for: str | None
    dense_bytes: int
    kv_token_bytes: int

    @property
    def most_rows(self) -> int:
        """Rows that a step of this shape can have: a look-up takes so many pairs."""
        return min(_MOST_ROWS, _MOST_PAIRS // self.spec.moe_ffn.router.top_k)

    @property
    def note(self) -> str | None:
        """What differs from the model, None if nothing does."""
        if self.stands_for is None:
            return None
        return (
            f"attention: MLA of about equal weight bytes stands in for {self.stands_for};"
            f" decode reads {self.seen(1000) / 1000:.2f} entries per token of context, so that"
            " the KV bytes are the model's; a prompt's rows see all rows before them"
        )

    def with_head(self) -> Shape:
        """The same with an MTP head of DeepSeek-V3's kind, a layer like its last one."""
        last = self.spec.layers[-1]
        return replace(self, spec=replace(self.spec, mtp=replace(last, index=last.index + 1)))

    def seen(self, context: int) -> int:
        """Entries of its attention that have the bytes of the model's KV of `context` tokens."""
        if self.stands_for is None:
            return context
        own = len(self.spec.layers) * _NVFP4_ENTRY_BYTES
        return max(1, -(-context * self.kv_token_bytes // own))


def _mla(*, heads: int, q_rank: int | None, nope: int, value: int) -> Mla:
    rope = Rope(dim=_ROPE_DIM, base=10000.0, interleaved=True)
    scale = (nope + _ROPE_DIM) ** -0.5
    return Mla(heads, q_rank, _RANK, nope, _ROPE_DIM, value, scale, 1e-6, rope)


def _gqa(*, heads: int, keys: int, qk_norm: QkNorm, has_bias: bool, rotary: int) -> Gqa:
    rope = Rope(dim=rotary, base=1e6, interleaved=False)
    return Gqa(
        heads, keys, _HEAD_DIM, has_bias, qk_norm, norm_eps=1e-6, softmax_scale=_HEAD_DIM**-0.5,
        rope=rope,
    )  # fmt: skip


def _spec(
    mixer: Mixer, context: int, *, hidden: int, layers: int, experts: int, top_k: int, inter: int,
    vocab: int, shared: int = 0, dense: int = 0, dense_inter: int = 0,
) -> Spec:  # fmt: skip
    router = Router(experts, top_k, Score.SIGMOID, True, 1, 1, True, 1.0)
    moe = MoeFfn(router, inter, shared)
    return Spec(
        model_type="deepseek_v3", vocab=vocab, hidden=hidden, context=context, norm_eps=1e-6,
        tied_head=False, mtp=None,
        layers=tuple(
            Layer(i, mixer, DenseFfn(dense_inter) if i < dense else moe) for i in range(layers)
        ),
    )  # fmt: skip


def _gib(gib: float) -> int:
    return round(gib * 1024**3)


def _deepseek_v4_flash(context: int) -> Shape:
    spec = _spec(
        _mla(heads=128, q_rank=1152, nope=128, value=128), context, hidden=4096, layers=43,
        experts=256, top_k=6, inter=2048, shared=2048, vocab=129280,
    )  # fmt: skip
    attention = "window, CSA and HCA layers, without mHC"
    return Shape("deepseek-v4-flash", spec, attention, _gib(7.93), 1935)


def _glm_5_2(context: int) -> Shape:
    spec = _spec(
        _mla(heads=64, q_rank=2048, nope=192, value=256), context, hidden=6144, layers=78,
        experts=256, top_k=8, inter=2048, shared=2048, vocab=154880, dense=3, dense_inter=12288,
    )  # fmt: skip
    return Shape("glm-5.2", spec, "MLA with the DSA indexer", _gib(19.21), 26784)


def _glm_4_5_air(context: int) -> Shape:
    # The one dense layer has 10944; blocks of FP8 scales want a multiple of 128.
    spec = _spec(
        _gqa(heads=96, keys=8, qk_norm=QkNorm.NONE, has_bias=True, rotary=64),
        context, hidden=4096, layers=46, experts=128, top_k=8, inter=1408, shared=1408,
        vocab=151552, dense=1, dense_inter=11008,
    )  # fmt: skip
    return Shape("glm-4.5-air", spec, None, _gib(7.88), 52992)


def _qwen3_30b_a3b(context: int) -> Shape:
    spec = _spec(
        _gqa(heads=32, keys=4, qk_norm=QkNorm.HEAD, has_bias=False, rotary=128),
        context, hidden=2048, layers=48, experts=128, top_k=8, inter=768, vocab=151936,
    )  # fmt: skip
    return Shape("qwen3-30b-a3b", spec, None, _gib(2.03), 27648)


def _qwen3_next_80b(context: int) -> Shape:
    spec = _spec(
        _mla(heads=32, q_rank=None, nope=128, value=192), context, hidden=2048, layers=48,
        experts=512, top_k=10, inter=512, shared=512, vocab=151936,
    )  # fmt: skip
    attention = "DeltaNet (147 MiB of state per token) and gated grouped-query layers"
    return Shape("qwen3-next-80b", spec, attention, _gib(2.83), 6912)


def _gpt_oss_120b(context: int) -> Shape:
    spec = _spec(
        _mla(heads=32, q_rank=None, nope=64, value=112), context, hidden=2880, layers=36,
        experts=128, top_k=4, inter=2880, vocab=201088,
    )  # fmt: skip
    attention = "grouped-query attention with windows and sinks"
    return Shape("gpt-oss-120b", spec, attention, _gib(3.07), 10368)


SHAPES: Mapping[str, Callable[[int], Shape]] = {
    "deepseek-v4-flash": _deepseek_v4_flash,
    "qwen3-30b-a3b": _qwen3_30b_a3b,
    "qwen3-next-80b": _qwen3_next_80b,
    "gpt-oss-120b": _gpt_oss_120b,
    "glm-4.5-air": _glm_4_5_air,
    "glm-5.2": _glm_5_2,
}
"""Name -> the shape for a longest context."""
