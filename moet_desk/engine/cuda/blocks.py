"""The launches of one decoder layer for 1..8 rows, over weights as shipped and static buffers.

The twins are engine/blocks. Nothing here allocates, waits or branches on data, so a whole step can
be captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from moet_desk.engine.blocks.ffn import checked_table
from moet_desk.engine.cuda.buffers import StepBuffers
from moet_desk.engine.cuda.delta import GdnLaunches
from moet_desk.engine.cuda.dense_weights import DenseSource, reordered
from moet_desk.engine.cuda.indexer import IndexerLaunches
from moet_desk.engine.families.tensors import TABLE
from moet_desk.engine.spec import (
    PROJECTIONS,
    DenseFfn,
    Gqa,
    Layer,
    Mla,
    MoeFfn,
    PooledAttention,
    QkNorm,
    Router,
)
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.attention import gqa_decode, mla_decode
from moet_desk.kernels.triton.delta import DeltaRows
from moet_desk.kernels.triton.dense import gemv, swiglu_gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.experts import combine
from moet_desk.kernels.triton.gates import gated
from moet_desk.kernels.triton.indexer import chosen_pages
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.latent import LatentWeight, mla_absorb, mla_out
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.prepare import Rotation, gqa_prepare, mla_prepare, rotate_queries
from moet_desk.kernels.triton.quant import rms_norm_quantize
from moet_desk.kernels.triton.route import route, route_named
from moet_desk.kernels.triton.routed_lookup import Routing, does_both
from moet_desk.kernels.triton.streams import Given


class Experts(Protocol):
    """Computes the routed experts of one MoE layer in a step."""

    @property
    def activations(self) -> Activations:
        """Which of the codes in a step's buffers the experts read and write."""
        ...

    def begin(self, buffers: StepBuffers, rows: int) -> None:
        """Their layer's input is in `buffers`, and it is about to choose ids and weights."""
        ...

    def __call__(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> None:
        """From ids, weights, codes and scales in `buffers` to `part`. With a routing ids and
        weights are not there yet; it says how they are chosen.
        """
        ...


class Branch:
    """More streams, for launches that need not wait for those of the main one: lanes, by number.

    Between `beside` and `join` the main stream goes on; a capture records them as parallel branches
    of the graph. Where launches wait for room on the card, those of higher lanes come first, for
    short ones that a long chain hangs on. On a CPU everything runs in order.
    """

    def __init__(self, device: torch.device, lanes: int = 2) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [
                torch.cuda.Stream(device, priority=-lane)  # type: ignore[no-untyped-call]
                for lane in range(lanes)
            ]

    @contextmanager
    def beside(self, lane: int = 0, *, since: Callable[[], None] | None = None) -> Iterator[None]:
        """Launches inside follow what was launched so far, or before the fork `since`, and run
        beside what comes.
        """
        if not self._streams:
            yield
            return
        stream = self._streams[lane]
        if since is None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if since is not None:
                since()
            yield

    def fork(self) -> Callable[[], None]:
        """A place in the main stream, for `beside`. What is launched there before the lane is
        comes first on the card, where both could begin: a lane that begins first fills it.
        """
        if not self._streams:
            return lambda: None
        event = torch.cuda.current_stream().record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def mark(self, lane: int = 0) -> Callable[[], None]:
        """What lets later launches follow those that are in the lane now, but no later ones.

        A capture ends with an error if nothing follows the lane's last launch.
        """
        if not self._streams:
            return lambda: None
        event = self._streams[lane].record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def join(self, lane: int = 0) -> None:
        """What is launched from here on, in the main stream or in a lane that this is called
        beside, follows what is in the lane so far too.
        """
        if self._streams:
            torch.cuda.current_stream().wait_stream(self._streams[lane])


class MlaLaunches:
    """Attention of one layer: from `x` through `normed` to `x` with the attention added."""

    def __init__(self, mixer: Mla, load: DenseSource, name: str) -> None:
        self.mixer = mixer
        first = "q_proj" if mixer.q_rank is None else "q_a_proj"
        self.w_in = load.matrix(name + first, name + "kv_a_proj_with_mqa")
        self.latent_norm = load.vector(name + "kv_a_layernorm") * mixer.kv_gain
        if mixer.q_rank is not None:
            self.q_norm = load.vector(name + "q_a_layernorm") * mixer.q_gain
            self.w_q = load.matrix(name + "q_b_proj")
        self.w_latent = LatentWeight(
            load.matrix(name + "kv_b_proj"), mixer.n_heads, mixer.nope_dim, mixer.v_dim
        )
        self.w_out = load.matrix(name + "o_proj")
        self.indexer: IndexerLaunches | None = None
        if mixer.indexer is not None:
            self.indexer = IndexerLaunches(mixer.indexer, load, name + "indexer.")

    @property
    def is_sparse(self) -> bool:
        """Whether a row sees only what an indexer chose."""
        return self.indexer is not None or self.mixer.reuses_choice

    def launch(
        self, b: StepBuffers, rows: int, rotation: Rotation, kv: KvPages, lengths: Tensor
    ) -> None:
        mixer, t = self.mixer, slice(0, rows)
        n, head = mixer.n_heads, mixer.nope_dim + mixer.rope_dim
        joined = b.joined[t]
        gemv(b.normed[t], self.w_in, joined)
        q_rope = b.q_rope[t]
        if mixer.q_rank is None:
            mla_prepare(
                joined, self.latent_norm, mixer.latent_eps, rotation=rotation, kv=kv, q_out=q_rope
            )
            queries = joined[:, : n * head].view(rows, n, head)
        else:
            latent = b.q_latent_in[t]
            mla_prepare(
                joined, self.latent_norm, mixer.latent_eps, rotation=rotation, kv=kv,
                q_out=latent, q_weight=self.q_norm,
            )  # fmt: skip
            if self.indexer is not None and b.index is not None:
                self.indexer.launch(b.index, b.normed[t], latent, rotation, kv, lengths)
            gemv(latent, self.w_q, b.queries[t])
            queries = b.queries[t].view(rows, n, head)
            rotate_queries(queries, q_rope, rotation=rotation)
        if self.is_sparse and b.index is not None:
            kv, lengths = chosen_pages(kv, b.index.chosen[t]), b.index.counts[t]
        self.mix(b, queries, q_rope, kv, lengths, b.heads[t])
        gemv(b.heads[t], self.w_out, b.x[t], residual=b.x[t])

    def mix(
        self, b: StepBuffers, queries: Tensor, q_rope: Tensor, kv: KvPages, lengths: Tensor,
        heads: Tensor,
    ) -> None:  # fmt: skip
        """What up to 8 rows see of the first `lengths` entries of their page tables.

        Shapes:
            queries [T, N, dn + dr], q_rope [T, N, dr], heads [T, N * dv]
        """
        mixer, t = self.mixer, slice(0, queries.shape[0])
        mla_absorb(queries[..., : mixer.nope_dim], self.w_latent, b.q_latent[t])
        mla_decode(
            b.q_latent[t], q_rope, kv, lengths, b.mixed[t],
            scale=mixer.softmax_scale, scratch=b.attention,
        )  # fmt: skip
        mla_out(b.mixed[t], self.w_latent, heads)


class GqaLaunches:
    """Grouped-query attention of one layer: the same for it."""

    def __init__(self, mixer: Gqa, load: DenseSource, name: str) -> None:
        self.mixer = mixer
        parts = [name + part for part in ("q_proj", "k_proj", "v_proj")]
        self.w_in = load.matrix(*parts)
        self.bias: Tensor | None = None
        if mixer.has_bias:
            self.bias = torch.cat([load.vector(part + ".bias") for part in parts])
        if mixer.out_gate:
            order = _gates_last(mixer)
            self.w_in = reordered(self.w_in, order)
            self.bias = None if self.bias is None else self.bias[order.to(self.bias.device)]
        has_norm = mixer.qk_norm is not QkNorm.NONE
        self._q_norm = load.norm(name + "q_norm") if has_norm else None
        self._k_norm = load.norm(name + "k_norm") if has_norm else None
        self.sinks = load.vector(name + "sinks") if mixer.has_sinks else None
        self.w_out = load.matrix(name + "o_proj")
        self.out_bias = load.vector(name + "o_proj.bias") if mixer.out_bias else None

    def launch(
        self, b: StepBuffers, rows: int, rotation: Rotation, kv: KvPages, lengths: Tensor
    ) -> None:
        mixer, t = self.mixer, slice(0, rows)
        heads = (rows, mixer.n_heads, mixer.head_dim)
        gemv(b.normed[t], self.w_in, b.joined[t], bias=self.bias)
        queries = b.queries[t].view(heads)
        plain, gate = self.apart(b.joined[t])
        self.prepare(plain, queries, rotation, kv)
        gqa_decode(
            queries, kv, lengths, b.heads[t].view(heads), n_keys=mixer.n_keys,
            scale=mixer.softmax_scale, scratch=b.attention, window=mixer.window, sink=self.sinks,
        )  # fmt: skip
        if gate is not None:
            gated(b.heads[t], gate, b.heads[t])
        gemv(b.heads[t], self.w_out, b.x[t], bias=self.out_bias, residual=b.x[t])

    def apart(self, joined: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the joined projections: queries, keys and values, and the output's gates, if any."""
        gates = self.mixer.n_heads * self.mixer.head_dim
        if not self.mixer.out_gate:
            return joined, None
        return joined[:, :-gates], joined[:, -gates:]

    def prepare(self, joined: Tensor, queries: Tensor, rotation: Rotation, kv: KvPages) -> None:
        """From the joined projections, which are changed, to queries [T, N, D] and KV entries."""
        mixer, q_norm, k_norm = self.mixer, self._q_norm, self._k_norm
        if mixer.qk_norm is QkNorm.FULL and q_norm is not None and k_norm is not None:
            width = mixer.n_heads * mixer.head_dim
            q, k = joined[:, :width], joined[:, width : width + mixer.n_keys * mixer.head_dim]
            rms_norm(q, q_norm, mixer.norm_eps, out=q)
            rms_norm(k, k_norm, mixer.norm_eps, out=k)
            q_norm = k_norm = None
        gqa_prepare(
            joined, queries, rotation=rotation, kv=kv, dv=mixer.head_dim, eps=mixer.norm_eps,
            q_weight=q_norm, k_weight=k_norm,
        )  # fmt: skip


def _gates_last(mixer: Gqa) -> Tensor:
    """Rows of the joined projections in another order: of each head the file has the query, then
    the gate.
    """
    n, d = mixer.n_heads, mixer.head_dim
    heads = torch.arange(2 * n * d).view(n, 2, d)
    others = torch.arange(2 * mixer.n_keys * d) + 2 * n * d
    return torch.cat([heads[:, 0].flatten(), others, heads[:, 1].flatten()])


class DenseLaunches:
    """A dense layer's feed-forward part: x += W_down(silu(W_gate n) * W_up n), n the normed x;
    `limit` of the two as in `reference.swiglu`.
    """

    def __init__(
        self, load: DenseSource, name: str, inter: int, *,
        names: tuple[str, str, str] = PROJECTIONS, limit: float | None = None,
    ) -> None:  # fmt: skip
        gate, up, down = (name + part for part in names)
        self.w_in, self.w_down = load.matrix(gate, up), load.matrix(down)
        self.inter, self.limit = inter, limit

    def launch(self, b: StepBuffers, rows: int, *, out: Tensor, residual: Tensor | None) -> None:
        mid = b.shared_mid[:rows, : self.inter]
        swiglu_gemv(b.normed[:rows], self.w_in, mid, limit=self.limit)
        gemv(mid, self.w_down, out, residual=residual)


class MoeLaunches:
    """Router, routed experts and shared expert: x += shared(n) + sum of weight * expert(n).

    What identity experts give takes the shared expert's place.

    Raises:
        ValueError: there are both.
    """

    def __init__(
        self, ffn: MoeFfn, load: DenseSource, name: str, *, moe_layer: int, branch: Branch
    ) -> None:
        self._branch = branch
        self.router: Router = ffn.router
        self.moe_layer = moe_layer
        self.w_router = load.matrix(name + ffn.router_name)
        self.logit_bias: Tensor | None = None
        if ffn.router.logit_bias:
            self.logit_bias = load.vector(name + ffn.router_name + ".bias")
        bias = ffn.router.selection_bias
        self.bias = load.vector(name + ffn.bias_name) if bias else None
        self.table: Tensor | None = None
        if ffn.hashed:
            of_table = f"{name}{ffn.router_name}.{TABLE}"
            table = load.vector(of_table).to(torch.int32)
            self.table = checked_table(table, of_table, ffn.router.n_experts)
        self.shared = None
        if ffn.shared_inter and ffn.router.n_identity:
            raise ValueError("identity experts beside a shared one")
        if ffn.shared_inter:
            self.shared = DenseLaunches(
                load, name + ffn.shared_name, ffn.shared_inter, names=ffn.projections,
                limit=ffn.glu.limit,
            )  # fmt: skip
        self.w_shared_gate: DenseWeight | None = None
        if ffn.shared_gate:
            self.w_shared_gate = load.matrix(name + "shared_expert_gate")

    def launch(
        self,
        b: StepBuffers,
        rows: int,
        experts: Experts,
        *,
        tokens: Tensor | None = None,
        adds: bool = True,
    ) -> None:
        """Of rows that read `tokens` [T] int32, needed where a table names experts. Without `adds`,
        x stays; what would be added is `given`.
        """
        t = slice(0, rows)
        experts.begin(b, rows)
        fork, routing = self._branch.fork(), self._routing(b, rows)
        if routing is None:
            self.choose(b, rows, tokens)
        else:
            gemv(b.normed[t], self.w_router, b.router[t], bias=self.logit_bias)
        if self.shared is not None:  # beside the router, the look-up and the fetch
            with self._branch.beside(since=fork):
                self.shared.launch(b, rows, out=b.shared_out[t], residual=None)
                if self.w_shared_gate is not None:
                    gemv(b.normed[t], self.w_shared_gate, b.shared_gate[t])
                    gated(b.shared_out[t], b.shared_gate[t], b.shared_out[t])
        experts(self.moe_layer, b, rows, routing)
        if self.shared is not None:
            self._branch.join()
        if adds:
            self.add(b, rows)

    def _routing(self, b: StepBuffers, rows: int) -> Routing | None:
        """How experts are chosen in the launch that finds their slots, if that can be."""
        router, t = self.router, slice(0, rows)
        few = does_both(rows, router.n_experts, router.top_k)
        if not few or self.table is not None or router.n_identity:
            return None
        return Routing(
            b.router[t], self.bias, b.weights[t], router.score, router.n_groups,
            router.kept_groups, router.renormalize, router.scale,
        )  # fmt: skip

    def choose(self, b: StepBuffers, rows: int, tokens: Tensor | None = None) -> None:
        """From `normed` to the experts' ids and weights, and to what identity experts give."""
        t = slice(0, rows)
        gemv(b.normed[t], self.w_router, b.router[t], bias=self.logit_bias)
        self.route(b.router[t], tokens, ids=b.ids[t], weights=b.weights[t], share=b.share[t])
        if self.router.n_identity:
            torch.mul(b.normed[t], b.share[t, None], out=b.shared_out[t])

    def route(
        self, logits: Tensor, tokens: Tensor | None, *, ids: Tensor, weights: Tensor, share: Tensor
    ) -> None:
        """From the router's logits to the experts; those of tokens if a table names them."""
        router = self.router
        if self.table is not None and tokens is not None:
            route_named(
                logits, self.table, tokens, ids=ids, weights=weights, score=router.score,
                renormalize=router.renormalize, scale=router.scale,
            )  # fmt: skip
            return
        route(
            logits, self.bias, ids=ids, weights=weights, score=router.score,
            n_groups=router.n_groups, kept_groups=router.kept_groups,
            renormalize=router.renormalize, scale=router.scale,
            n_real=router.n_experts, share=share,
        )  # fmt: skip

    def given(self, b: StepBuffers, rows: int) -> Given:
        """What the experts left in `part`, and the shared expert beside them."""
        t, pairs = slice(0, rows), slice(0, rows * self.router.top_k)
        return Given(b.shared_out[t], b.part[pairs], b.weights[t])

    def add(self, b: StepBuffers, rows: int) -> None:
        """x += what the experts left in `part`, and what is in the shared expert's place."""
        router, t, pairs = self.router, slice(0, rows), slice(0, rows * self.router.top_k)
        beside = self.shared is not None or router.n_identity > 0
        combine(
            b.part[pairs], b.weights[t], base=b.shared_out[t] if beside else None,
            residual=b.x[t], out=b.x[t], ids=b.ids[t] if router.n_identity else None,
        )  # fmt: skip


class LayerLaunches:
    """One decoder layer; with `half`, the attention of that number and the dense part behind it of
    a layer that has two.
    """

    def __init__(
        self,
        layer: Layer,
        load: DenseSource,
        *,
        moe_layer: int,
        branch: Branch,
        half: int | None = None,
    ) -> None:
        name, at = f"model.layers.{layer.index}.", "" if half is None else f".{half}"
        self.attention_norm = load.norm(f"{name}input_layernorm{at}")
        self.ffn_norm = load.norm(f"{name}post_attention_layernorm{at}")
        self.attention: MlaLaunches | GqaLaunches | GdnLaunches
        if isinstance(layer.mixer, Mla):
            self.attention = MlaLaunches(layer.mixer, load, f"{name}self_attn{at}.")
        elif isinstance(layer.mixer, Gqa):
            self.attention = GqaLaunches(layer.mixer, load, f"{name}self_attn{at}.")
        elif isinstance(layer.mixer, PooledAttention):
            raise TypeError("pooled attention stands between streams")
        else:
            self.attention = GdnLaunches(layer.mixer, load, name + "linear_attn.")
        self.ffn: DenseLaunches | MoeLaunches
        if half is not None and layer.around is not None:
            self.ffn = DenseLaunches(load, f"{name}mlps{at}.", layer.around.inter)
        elif isinstance(layer.ffn, DenseFfn):
            self.ffn = DenseLaunches(load, name + "mlp.", layer.ffn.inter)
        else:
            self.ffn = MoeLaunches(
                layer.ffn, load, name + layer.ffn.name, moe_layer=moe_layer, branch=branch
            )

    def launch(
        self,
        b: StepBuffers,
        rows: int,
        *,
        eps: float,
        rotation: Rotation,
        kv: KvPages | DeltaRows,
        lengths: Tensor,
        experts: Experts,
    ) -> None:
        t = slice(0, rows)
        self.attend(b, rows, eps=eps, rotation=rotation, kv=kv, lengths=lengths)
        if isinstance(self.ffn, DenseLaunches):
            rms_norm(b.x[t], self.ffn_norm, eps, out=b.normed[t])
            self.ffn.launch(b, rows, out=b.x[t], residual=b.x[t])
            return
        self.norm_for_experts(b, rows, eps, experts)
        self.ffn.launch(b, rows, experts)

    def attend(
        self, b: StepBuffers, rows: int, *, eps: float, rotation: Rotation,
        kv: KvPages | DeltaRows, lengths: Tensor,
    ) -> None:  # fmt: skip
        """x += attention."""
        t = slice(0, rows)
        rms_norm(b.x[t], self.attention_norm, eps, out=b.normed[t])
        self._mix(b, rows, rotation, kv, lengths)

    def norm_for_experts(self, b: StepBuffers, rows: int, eps: float, experts: Experts) -> None:
        """What the feed-forward part reads, as numbers and as the experts' codes."""
        t = slice(0, rows)
        rms_norm_quantize(
            b.x[t], self.ffn_norm, eps, out=b.normed[t],
            codes=b.codes[experts.activations][t], scales=b.scales[t],
        )  # fmt: skip

    def _mix(
        self, b: StepBuffers, rows: int, rotation: Rotation, kv: KvPages | DeltaRows,
        lengths: Tensor,
    ) -> None:  # fmt: skip
        attention, t = self.attention, slice(0, rows)
        if isinstance(attention, GdnLaunches):
            assert isinstance(kv, DeltaRows), "the step hands over states"  # noqa: S101
            assert b.delta is not None, "such a model has buffers for them"  # noqa: S101
            attention.launch(b.delta, b.normed[t], b.x[t], kv)
        else:
            assert isinstance(kv, KvPages), "the step hands over pages"  # noqa: S101
            attention.launch(b, rows, rotation, kv, lengths)
