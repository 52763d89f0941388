"""The decode step on a device: all layers as one captured graph per (rows, plane).

The host fills the inputs, launches the graph, waits for one event and reads the error word and
either logits or chosen tokens. The choice is a graph of its own behind the step's: one serves both
planes, and a step whose logits go to the host does not pay for it. No Python runs per layer.
Without a CUDA device (tests in the interpreter) the same launches run one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from moet_desk.engine.cuda.blocks import Branch, Experts, LayerLaunches, MoeLaunches
from moet_desk.engine.cuda.buffers import (
    MAX_ROWS,
    Choices,
    StepBuffers,
    StepInputs,
)
from moet_desk.engine.cuda.delta import DeviceStates
from moet_desk.engine.cuda.dense_weights import DenseSource
from moet_desk.engine.cuda.head import HeadLaunches
from moet_desk.engine.cuda.lookahead import Lookahead, StepAhead, following_layers
from moet_desk.engine.cuda.mailbox_server import MailboxServer
from moet_desk.engine.cuda.named import BroughtExperts, NamedExperts
from moet_desk.engine.cuda.ngrams import DeviceNgrams
from moet_desk.engine.cuda.pool_states import PooledStates, PoolMemory
from moet_desk.engine.cuda.pooled import PooledRows
from moet_desk.engine.cuda.pools import PoolExperts
from moet_desk.engine.cuda.shortcut import ShortcutLaunches
from moet_desk.engine.cuda.step_rows import StepRow, head_runs_of, most_rows, runs_of
from moet_desk.engine.cuda.streams import (
    StreamHeadLaunches,
    StreamLaunches,
    StreamMaker,
    Turns,
    chain,
    spread,
    streams_of,
)
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.model import RopeTable
from moet_desk.engine.model_shape import kv_places
from moet_desk.engine.sampling import GREEDY, Draw
from moet_desk.engine.spec import Gdn, MoeFfn, Spec
from moet_desk.errors import MoetError, fail
from moet_desk.kernels.triton.cache import STEPS_BETWEEN_REBASES
from moet_desk.kernels.triton.delta import DeltaMemory, DeltaRows
from moet_desk.kernels.triton.dense import embed, gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.sampling import greedy, sample
from moet_desk.store.pack_format import Plane

log = logging.getLogger("moet_desk.engine")

ERROR_TIMEOUT, ERROR_READ, ERROR_NAN = 1, 2, 4
"""Bits of the error word that a step's kernels set."""

SETTLE_S = 5.0
"""How long the host waits for the reads that a step gave up on. No kernel waits meanwhile, so this
is enough for the rows of a layer from a slow drive.
"""

REPEAT_S = 15.0
"""How long a step is done again, when it gave up on rows that come after all: a first step of
GLM-5.2 may need 4 GB from a drive, which is more than a kernel can wait for.
"""


class StepModel:
    """Weights, buffers and graphs of the decode step.

    Args:
        spec: the model.
        load: reads dense tensors onto the device.
        kv: the page pool on the device.
        experts: what computes routed experts, by plane.
        states: of the layers that have one instead of pages, if there are such.
        context: longest sequence, for the rope table and the page tables.
        error: int32 [1], the word in which a step's kernels report.
        server: reads rows that are not in RAM, if there can be such.
        with_head: load the model's MTP head too, for `guess`.
        looks_ahead: bring rows that the next layer will probably ask for.

    Attributes:
        layers: the launches of each layer.
        lookahead: by plane, of those whose rows are in RAM.
        most_rows: of a step.
    """

    def __init__(
        self,
        spec: Spec,
        load: DenseSource,
        kv: KvCache,
        experts: Mapping[Plane, PoolExperts],
        *,
        context: int,
        device: torch.device,
        error: Tensor,
        server: MailboxServer | None = None,
        with_head: bool = False,
        looks_ahead: bool = False,
        states: DeviceStates | PooledStates | None = None,
    ) -> None:
        self.spec = spec
        self.most_rows = most_rows(spec.moe_ffn.router.top_k)
        self._kv, self._experts, self._device = kv, experts, device
        self._states, self._places = states, kv_places(spec)
        self.embedding = load.table("model.embed_tokens")
        if spec.tied_head:
            self._head = DenseWeight(self.embedding)
        else:
            self._head = load.matrix("lm_head")
        self.ngrams: DeviceNgrams | None = None
        if spec.ngrams is not None:
            self.ngrams = DeviceNgrams(spec.ngrams, spec.vocab, load, device)
        self.final_norm = load.norm("model.norm")
        rope = RopeTable(spec.attention.rope, context)
        self.cos, self.sin = rope.cos.to(device), rope.sin.to(device)
        self.interleaved = spec.attention.rope.interleaved
        self.layers: list[LayerLaunches | ShortcutLaunches | StreamLaunches] = []
        n_moe, branch = 0, Branch(device, lanes=3)
        made = StreamMaker(spec, load, branch, Turns(context, device), context)
        for layer in spec.layers:
            if spec.streams is not None:
                self.layers.append(made.layer(layer, n_moe))
            else:
                kind = LayerLaunches if layer.around is None else ShortcutLaunches
                self.layers.append(kind(layer, load, moe_layer=n_moe, branch=branch))
            n_moe += isinstance(layer.ffn, MoeFfn)
        tables = _tables(self.layers)
        self._named = NamedExperts(tables, device) if tables else None
        self._following = following_layers(self.layers) if looks_ahead else {}
        self.lookahead = {
            plane: Lookahead(spec.moe_ffn.router, own.pools_in_ram, device)
            for plane, own in experts.items()
            if self._following and own.pools_in_ram
        }
        self.end = None if spec.streams is None else made.end("model.")
        if self.end is not None:
            chain([one for one in self.layers if isinstance(one, StreamLaunches)], self.end)
        self.head: HeadLaunches | StreamHeadLaunches | None = None
        if with_head and spec.mtp is not None:
            if self.end is None:
                self.head = HeadLaunches(spec, spec.mtp, load, branch=branch)
            else:
                self.head = StreamHeadLaunches(made, spec.mtp)
        self.buffers = StepBuffers.make(spec, device, context=context)
        max_pages = -(-context // kv.page_tokens)
        self._inputs = StepInputs(max_pages, device, has_rings=kv.has_rings)
        self.error, self._server = error, server
        pinned = device.type == "cuda"
        self._host_logits = torch.zeros((MAX_ROWS, spec.vocab), pin_memory=pinned)
        self._host_error = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._choices = Choices(spec.vocab, device)
        self._graphs: dict[tuple[int, Plane, bool], torch.cuda.CUDAGraph] = {}  # bool: the head
        self._choice_graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # rows, any drawn
        self._broken = False  # a step failed, and what it left is not cleared up yet
        self._n_steps = 0

    def run(self, rows: Sequence[StepRow], plane: Plane) -> Tensor:
        """Compute a step and store its KV; the callers move the sequences' lengths on.

        Returns:
            float32 [T, V] logits on the host, valid until the next run.

        Raises:
            MoetError: MD-NVME-04, 05 a row could not be read in time or at all; no token may be
                taken.
        """
        self._compute(rows, plane, ())
        return self._host_logits[: len(rows)]

    def choose(
        self, rows: Sequence[StepRow], plane: Plane, draws: Sequence[Draw]
    ) -> Sequence[int | None]:
        """Compute a step as `run` does and choose each row's token on the device.

        Args:
            rows: the step.
            plane: of its experts.
            draws: how to choose, by row.

        Returns:
            Token ids, those of `Sampler.choose` on the logits of `run`; None for a row whose logits
            hold NaN or infinity.

        Raises:
            MoetError: as `run`.
        """
        if len(draws) != len(rows):
            raise ValueError(f"{len(draws)} draws for {len(rows)} rows")
        self._compute(rows, plane, draws)
        return self._choices.read(len(rows))

    def guess(self, rows: Sequence[StepRow], plane: Plane, states: Tensor) -> Sequence[int | None]:
        """What the MTP head takes for the token behind each row. Their states then are in `states`.

        Args:
            rows: tokens, placed as the head counts them.
            plane: of its experts.
            states: what the model, or the head, knew at the token before each, [T, H] float32.

        Raises:
            MoetError: as `run`.
        """
        if self.head is None:
            raise ValueError("the MTP head was not loaded")
        own = self.head.states[: len(rows)]
        own.copy_(states.view_as(own))
        self._compute(rows, plane, [GREEDY] * len(rows), head=True)
        return self._choices.read(len(rows))

    def states(self, first: int, count: int) -> Tensor:
        """What the newest step, or the head, knew at some of its rows, after the final norm: [T, H]
        float32, valid until the next one. With streams all of them, without a norm: [T, n * H].
        """
        if self.buffers.streams is not None:
            return self.buffers.streams.x[first : first + count].flatten(1)
        return self.buffers.normed[first : first + count]

    def judge(self, count: int) -> Sequence[int | None]:
        """Each row's likeliest token, of the logits that the newest step or `logits_of` left."""
        self._choose(count, drawn=False)
        self._choices.fetch()
        self._wait()
        self.error.zero_()  # at most that numbers are invalid, and the result says so
        return self._choices.read(count)

    def confidence(self, count: int) -> Sequence[float]:
        """Probability of each row's likeliest token, as the newest `choose` or `judge` found it;
        NaN for a row whose logits hold NaN or infinity.
        """
        return self._choices.read_confidence(count)

    def _compute(
        self,
        rows: Sequence[StepRow],
        plane: Plane,
        draws: Sequence[Draw],
        *,
        head: bool = False,
    ) -> None:
        """A step; its results are on the host when it returns: tokens if there are draws.

        A step that waited too long for a drive is done again. What came meanwhile is there then,
        and all that a step writes lies where its repetition writes it again (docs/adr/0018).
        """
        until = time.perf_counter() + REPEAT_S
        while (error := self._attempt(rows, plane, draws, head=head)) & ~ERROR_NAN:
            self._broken = True
            if error & ERROR_READ or time.perf_counter() >= until:
                raise self._reason(error)
            log.info("a step waited too long for rows from the drive and is done again")
        if error:
            self.error.zero_()  # the choice says which rows; nothing else of the step is wrong
        if not head and plane in self.lookahead:
            self.lookahead[plane].review()
        self._n_steps += 1
        if self._n_steps % STEPS_BETWEEN_REBASES == 0:
            for experts in self._experts.values():
                experts.rebase()

    def _attempt(
        self, rows: Sequence[StepRow], plane: Plane, draws: Sequence[Draw], *, head: bool
    ) -> int:
        """Run a step once and give its error word."""
        if self._broken:
            self._recover()
        self._fill(rows, draws, head=head)
        if self._server is not None:
            self._server.begin()
        try:
            self._replay(len(rows), plane, draws, head=head)
        except BaseException:
            self._broken = True
            self._forget()
            raise
        finally:
            if self._server is not None:
                self._server.end()
        return int(self._host_error[0])

    def _replay(self, count: int, plane: Plane, draws: Sequence[Draw], *, head: bool) -> None:
        """Inputs to the device, the launches, results to the host; returns when all is done."""
        self._inputs.send()
        if self.ngrams is not None:
            self.ngrams.send()
        graph = self._graphs.get((count, plane, head))
        if graph is not None:
            graph.replay()
        elif head:
            self.launch_head(count, plane)
        else:
            self.launch(count, plane)
        if draws:
            self._choose(count, any(draw.temperature > 0 for draw in draws))
            self._choices.fetch()
        else:
            self._host_logits[:count].copy_(self.buffers.logits[:count], non_blocking=True)
        self._host_error.copy_(self.error, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _choose(self, count: int, drawn: bool) -> None:
        """Tokens of rows whose logits are there; `drawn` if some have a temperature."""
        graph = self._choice_graphs.get((count, drawn))
        if graph is not None:
            graph.replay()
        else:
            self._launch_choice(count, drawn)

    def capture(self, rows: int, plane: Plane) -> None:
        """Record the step of `rows` rows and the choice of their tokens.

        The kernels must have run once before: in `choose`, with a temperature, and in `guess`.
        """
        self._graphs[rows, plane, False] = _recorded(partial(self.launch, rows, plane))
        if self.head is not None:
            self._graphs[rows, plane, True] = _recorded(partial(self.launch_head, rows, plane))
        for drawn in (False, True):
            if (rows, drawn) not in self._choice_graphs:
                choice = _recorded(partial(self._launch_choice, rows, drawn))
                self._choice_graphs[rows, drawn] = choice

    def launch(self, rows: int, plane: Plane) -> None:
        """All launches of a step, from the input lines to the logits."""
        b, eps, t = self.buffers, self.spec.norm_eps, slice(0, rows)
        ids, positions, lengths, table = self._inputs.unpack(rows)
        own, ahead = self._experts[plane], self._step_ahead(rows, plane)
        brought = {} if self._named is None else self._named.bring(ids, own)
        rotation = Rotation(positions, self.cos, self.sin, self.interleaved)
        embed(ids, self.embedding, b.x[t])
        if self.ngrams is not None:
            self.ngrams.launch(b.x[t])
        for i, layer in enumerate(self.layers):
            if isinstance(layer, StreamLaunches):
                if not i:
                    spread(b.x[t], streams_of(b).x[t])
                    pooled = self._find_places(rows, positions, table)
                    layer.begin(b, rows)
                experts = _experts_of(layer, own, brought, ahead)
                layer.launch(b, pooled.at(self.pool_memory(i)), ids, experts)
                continue
            if isinstance(layer, ShortcutLaunches):
                layer.launch(
                    b, rows, eps=eps, rotation=rotation, lengths=lengths,
                    kv=self.both(i, table), experts=own,
                )  # fmt: skip
                continue
            kv: KvPages | DeltaRows
            memory = self.memory(i, table, self._inputs.ring_table(rows))
            if isinstance(memory, DeltaMemory):
                kv = DeltaRows(memory, self._inputs.runs(rows), positions)
            else:
                kv = memory
            layer.launch(
                b, rows, eps=eps, rotation=rotation, kv=kv, lengths=lengths,
                experts=_experts_of(layer, own, brought, ahead),
            )  # fmt: skip
        if self.end is not None:
            self.end.launch(b, rows)
        self._logits(b.x[t], rows)

    def _step_ahead(self, rows: int, plane: Plane) -> StepAhead | None:
        lookahead = self.lookahead.get(plane)
        if lookahead is None or not lookahead.takes(rows):
            return None
        return StepAhead(lookahead, self._following)

    def launch_head(self, rows: int, plane: Plane) -> None:
        """All launches of the MTP head, from the input lines to the logits."""
        head, b, t = self.head, self.buffers, slice(0, rows)
        assert head is not None, "`guess` looked"  # noqa: S101
        self._experts[plane].let_go()  # between two steps its look-ups all have one `now`
        ids, positions, lengths, table = self._inputs.unpack(rows)
        rotation = Rotation(positions, self.cos, self.sin, self.interleaved)
        embed(ids, self.embedding, b.x[t])
        if isinstance(head, StreamHeadLaunches):
            own = self._find_places(rows, positions, table)
            own = own.at(self.pool_memory(len(self.layers)))
            head.launch(b, own, ids, self._experts[plane])
        else:
            head.launch(
                b, rows, eps=self.spec.norm_eps, rotation=rotation,
                kv=self.memory_of_head(table), lengths=lengths, experts=self._experts[plane],
            )  # fmt: skip
        self._logits(b.x[t], rows, norm=head.final_norm)

    def pool_memory(self, i: int) -> PoolMemory:
        """Of a layer with pooled attention; the MTP head's is behind the last one."""
        return self.pooled_states.layer(i)

    @property
    def pooled_states(self) -> PooledStates:
        """States of pooled attention.

        Raises:
            TypeError: the model has none.
        """
        if not isinstance(self._states, PooledStates):
            raise TypeError("a model without states of pooled attention")
        return self._states

    def _find_places(self, rows: int, positions: Tensor, table: Tensor) -> PooledRows:
        """The rows of a step at its first layer; other layers have them `at` their memory."""
        places = streams_of(self.buffers).pooled.places.of(slice(0, rows))
        self.pooled_states.find(self._inputs.runs(rows), positions, places)
        return PooledRows(places, table, self.pool_memory(0))

    def memory(self, i: int, table: Tensor, ring_table: Tensor) -> KvPages | DeltaMemory:
        """Pages of a layer with its table, of the two that there are, or its states."""
        if isinstance(self.spec.layers[i].mixer, Gdn):
            assert isinstance(self._states, DeviceStates), "such a model gets some"  # noqa: S101
            return self._states.layer(self._places[i])
        place = self._places[i]
        return self._pages(place, ring_table if self._kv.is_ring(place) else table)

    def both(self, i: int, table: Tensor) -> tuple[KvPages, KvPages]:
        """Pages of the attentions of a layer that has two."""
        place = self._places[i]
        return self._pages(place, table), self._pages(place + 1, table)

    def memory_of_head(self, table: Tensor) -> KvPages:
        """Pages of the MTP head's layer, which is the last one of the cache."""
        return self._pages(self.spec.n_kv_layers, table)

    def _pages(self, place: int, table: Tensor) -> KvPages:
        """The pages of an attention, by its place in the KV cache."""
        kv = self._kv
        return KvPages(kv.pages(place), table, kv.form, kv.index_pages(place))

    def _launch_choice(self, rows: int, drawn: bool) -> None:
        """The launches from the logits to the tokens. Greedy rows alone take two, any draw twelve
        more.
        """
        c, t = self._choices, slice(0, rows)
        logits, tokens, sure = self.buffers.logits[t], c.tokens[t], c.confidence[t]
        if drawn:
            wishes, draws = self._inputs.draws(rows)
            sample(logits, wishes, draws, tokens, sure, self.error, scratch=c.scratch)
        else:
            greedy(logits, tokens, sure, self.error, scratch=c.scratch)

    def logits_of(self, x: Tensor) -> Tensor:
        """Scores behind some rows of the residual stream, outside a step.

        Shapes:
            x [T, H] float32 on the device, with streams [T, n, H], T = 1..8; returns float32 [T, V]
            on the host, valid until the next run
        """
        rows, b = x.shape[0], self.buffers
        if self.end is not None:
            streams_of(b).x[:rows].copy_(x)
            self.end.launch_alone(b, rows)
            x = b.x[:rows]
        self._logits(x, rows)
        self._host_logits[:rows].copy_(self.buffers.logits[:rows])
        return self._host_logits[:rows]

    def _logits(self, x: Tensor, rows: int, norm: Tensor | None = None) -> None:
        b, t = self.buffers, slice(0, rows)
        norm = self.final_norm if norm is None else norm
        rms_norm(x, norm, self.spec.norm_eps, out=b.normed[t])
        gemv(b.normed[t], self._head, b.logits[t])

    def _fill(self, rows: Sequence[StepRow], draws: Sequence[Draw], *, head: bool) -> None:
        for i, row in enumerate(rows):
            position = row.sequence.length + row.ahead
            self._inputs.set_row(i, row.token, position, row.sequence.pages, row.sequence.ring)
            if self.ngrams is not None:
                self.ngrams.set_row(i, row.sequence, position, row.token)
        if self._states is not None:
            self._inputs.set_runs(head_runs_of(rows) if head else runs_of(rows))
        for i, draw in enumerate(draws):
            self._inputs.set_draw(i, draw)

    def _reason(self, error: int) -> MoetError:
        """Why a step failed."""
        known = None if self._server is None else self._server.take_error()
        if known is not None:
            return known
        return _unread("no answer in time" if error & ERROR_TIMEOUT else "read error")

    def _recover(self) -> None:
        """Clear up after a failed step. Reads that it gave up on must end first: they change the
        host's table, and a place that one of them fills may be another row's in the device's.
        """
        if self._server is not None:
            if not self._server.settle(SETTLE_S):
                raise _unread("no answer in time")
            self._server.take_error()  # of a request that failed long ago
        self.error.zero_()
        for experts in self._experts.values():
            experts.recover()
        self._broken = False

    def _forget(self) -> None:
        """Empty all slots at once, because the next prompt may read them."""
        with suppress(RuntimeError):  # of a lost card, for which the first error stands
            for experts in self._experts.values():
                experts.forget()


def _experts_of(
    layer: LayerLaunches | StreamLaunches,
    own: PoolExperts,
    brought: Mapping[int, BroughtExperts],
    ahead: StepAhead | None,
) -> Experts:
    """What computes a layer's experts: brought as the step began, or found when it asks."""
    if not isinstance(layer.ffn, MoeLaunches):
        return own
    experts = brought.get(layer.ffn.moe_layer, own)
    return experts if ahead is None else ahead.around(experts, layer.ffn.moe_layer)


def _tables(layers: Iterable[object]) -> dict[int, Tensor]:
    """Tables that name the experts of tokens, by MoE layer."""
    ffns = (layer.ffn for layer in layers if isinstance(layer, StreamLaunches))
    return {ffn.moe_layer: ffn.table for ffn in ffns if ffn.table is not None}


def _recorded(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    return graph


def _unread(reason: str) -> MoetError:
    return fail("MD-NVME-04", layer="?", expert="?", path="the pack", model="M", reason=reason)
