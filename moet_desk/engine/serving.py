"""What the engine thread does with a loaded model: requests in, turns of work, snapshots out.

`prepare` and `encode` are called from other threads and touch only what never changes (tokenizer,
sizes). Everything else belongs to the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moet_desk import __version__, hardware
from moet_desk.engine import heat
from moet_desk.engine.breakdown import breakdown_of
from moet_desk.engine.card_faults import is_out_of_memory
from moet_desk.engine.checks import check_gate, check_ids, check_stops
from moet_desk.engine.families import spec_for
from moet_desk.engine.gate_file import gate_in_use
from moet_desk.engine.grammar import Grammars
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    ModelInfo,
    Quality,
    RequestStream,
)
from moet_desk.engine.hot_set import HotSet
from moet_desk.engine.loader import Core, load
from moet_desk.engine.meter import Meter
from moet_desk.engine.model_shape import without_kernels
from moet_desk.engine.prefix_cache import Prefix, PrefixCache
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.sampling import Sampler
from moet_desk.engine.scheduler import Scheduler
from moet_desk.engine.text import Text
from moet_desk.engine.thinking import budget_of
from moet_desk.errors import MoetError, fail
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.saved_prefixes import SavedPrefixes
from moet_desk.telemetry import CPU, EngineSnapshot, EngineState, LoadStep

if TYPE_CHECKING:
    from moet_desk.engine.cuda.loader import CudaCore

log = logging.getLogger("moet_desk.engine")

SHOW_EVERY_S = 0.1
SAVE_HEAT_EVERY_S = 60.0


def _load(
    pack: Path, options: EngineOptions, show: Callable[[tuple[LoadStep, ...]], None]
) -> Core | CudaCore:
    if _device(options.device, pack) == "cpu":
        return load(pack, options, show)
    from moet_desk.engine.cuda.loader import load as load_cuda  # brings in triton

    return load_cuda(pack, options, show, device=torch.device("cuda"))


def _device(wanted: str, pack: Path) -> str:
    """What computes. Raises MD-GPU-01, MD-GPU-02; for "auto", what reading the pack raises."""
    if wanted == "cpu":
        return wanted
    if wanted == "auto" and (why := _left_to_cpu(pack)):
        log.info("computing on cpu: %s", why)
        return "cpu"
    found = hardware.probe_accelerator()
    if not found.missing and (card := hardware.take_card()) is not None:
        log.info("of several cards %s (%s): %s", card.gpu.name, card.gpu.uuid, card.why)
        found = hardware.probe_accelerator()
    choice = hardware.choose_device(wanted, found)
    log.info("computing on %s: %s", choice.device, choice.why)
    return choice.device


def _left_to_cpu(pack: Path) -> str:
    """Why no card computes this model, whatever this computer has; empty if one may."""
    reader = PackReader.open(pack)
    try:
        spec = spec_for(reader.config(), path=str(pack / "config.json"), has_mtp=False)
    finally:
        reader.close()
    part = without_kernels(spec)
    return part and f"layers of {spec.model_type} have {part}, for which a card has no kernels yet"


class Serving:
    """A loaded model at work.

    Raises (from the constructor):
        MoetError: as `loader.load` and `Text.load`; MD-GPU-01, MD-GPU-02 no card to compute on.
    """

    def __init__(
        self,
        pack: Path,
        options: EngineOptions,
        *,
        show: Callable[[tuple[LoadStep, ...]], None] = lambda steps: None,
    ) -> None:
        torch.set_num_threads(options.threads or hardware.engine_threads(hardware.probe().cores))
        self._pack = pack
        self._options = options
        self._text = Text.load(pack)
        self._grammars = Grammars(self._text)
        self.core = _load(pack, options, show)
        self._saved_prefixes = _saved_prefixes(options)
        self._prefixes = self._prefix_cache()
        self._scheduler = Scheduler(options.max_running)
        self._meter = Meter()
        self._generation = 0
        self._shown = self._saved = time.monotonic()
        self._ended: list[str] = []
        self._hot_set = HotSet(self.core.residency, self._shown) if options.hot_set else None
        self._uses_fine = (
            options.quality is not Quality.FAST
            or options.opportunistic
            or self.core.prefiller.fast_uses_fine
        )
        self.info = self._describe()

    # -- any thread --------------------------------------------------------------------------

    def encode(self, request: GenerateRequest) -> list[int]:
        """Prompt ids of a request. Raises MD-API-04, MD-CHAT-01."""
        given = [request.messages, request.prompt, request.prompt_ids]
        if sum(part is not None for part in given) != 1:
            reason = "give exactly one of messages, prompt and prompt_ids"
            raise fail("MD-API-04", parameter="messages", reason=reason)
        if request.messages is not None:
            return self._text.encode_chat(
                request.messages, request.tools, switches=request.template
            )
        if request.prompt is not None:
            ids = self._text.encode_prompt(request.prompt)
            if not ids:  # no token of an answer can follow
                raise fail("MD-API-04", parameter="prompt", reason="it is empty")
            return ids
        ids = [int(token) for token in request.prompt_ids or ()]
        check_ids(ids, self.info.vocab)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelt out. Raises MD-API-04."""
        check_ids(ids, self.info.vocab)
        return self._text.decode(ids)

    def prepare(self, request: GenerateRequest, stream: RequestStream) -> ActiveRequest:
        """Check a request and encode its prompt.

        Raises:
            MoetError: MD-API-03 too long, MD-API-04 bad parameter, MD-CHAT-01 template,
                MD-GRAM-01 a form that cannot be enforced.
        """
        check_stops(request.stop)
        if request.gate is None:
            request = replace(request, gate=self.info.default_gate)
        check_gate(request.gate)
        least = 0 if request.prompt_logprobs else 1
        if request.max_tokens is not None and request.max_tokens < least:
            raise fail("MD-API-04", parameter="max_tokens", reason="it must be at least 1")
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= 20:
            raise fail("MD-API-04", parameter="top_logprobs", reason="it must be 0 to 20")
        ids = self.encode(request)
        room = self.info.context - len(ids)
        if room < 1:
            raise fail(
                "MD-API-03",
                prompt_tokens=len(ids), context=self.info.context, reserve=1,
                model_context=self.info.model_context,
            )  # fmt: skip
        stream.answers, stream.prompt_end = self._text.answers, self._text.prompt_end(ids)
        sampler = Sampler(
            request.sampling,
            self._text.defaults,
            prompt_ids=ids,
            vocab=self.info.vocab,
            top_logprobs=request.top_logprobs,
            model=self.info.name,
            constraint=self._grammars.constraint(request, stream.prompt_end),
            budget=budget_of(request, self._text, stream.prompt_end),
        )
        stream.prompt_tokens = len(ids)
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        return ActiveRequest(
            request, stream, ids, text=self._text, sampler=sampler, limit=limit,
            opportunistic=self.info.opportunistic and request.quality is not Quality.EXACT,
        )  # fmt: skip

    # -- engine thread -----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def add(self, request: ActiveRequest) -> None:
        """Put a request at the end of the queue."""
        self._uses_fine |= request.request.quality is not Quality.FAST
        self._scheduler.waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """End a request; one that has ended already is left alone."""
        for request in (*self._scheduler.waiting, *self._scheduler.running):
            if request.id == request_id:
                request.cancel()
        for request in [r for r in self._scheduler.waiting if r.ended]:
            self._scheduler.waiting.remove(request)
            self._ended.append(request.id)

    @torch.inference_mode()  # a third less per small op than without gradients alone
    def turn(self) -> None:
        """Admit who fits, read one chunk of one prompt, write one token of every answer."""
        self._admit()
        reading = self._scheduler.to_read()
        if reading is not None:
            self._guarded([reading], lambda: self._read_chunk(reading))
        writing = self._scheduler.to_write()
        if writing:
            self._guarded(writing, lambda: self._write_tokens(writing))
        for request in self._scheduler.take_ended():
            self.core.kv.release(request.kv)
            self._ended.append(request.id)
        self._between_steps(lambda: self._promote(writing))
        self._between_steps(self._tend_card)

    def take_ended(self) -> list[str]:
        """Ids of requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fail_all(self, error: MoetError) -> None:
        """End all requests with an error; their text so far was sent."""
        for request in (*self._scheduler.waiting, *self._scheduler.running):
            request.fail(error)

    def idle(self, now: float) -> None:
        """Housekeeping while there is nothing to do."""
        if self._hot_set is not None and self._uses_fine:
            self._between_steps(self._hot_set.idle_turn)
        self._between_steps(self._tend_card)
        if now - self._saved > SAVE_HEAT_EVERY_S:
            self._save_heat(now)

    def limit_vram(self, n_bytes: int | None) -> None:
        """See `EngineHandle.limit_vram`."""
        if self.core.vram is not None:
            self.core.vram.limit(n_bytes)
        elif self.core.device != CPU:
            log.info("memory.vram_limit counts when the model is loaded again")

    def close(self) -> None:
        """Cancel what runs, save heat, release memory."""
        for request in (*self._scheduler.waiting, *self._scheduler.running):
            request.cancel()
        try:
            self._save_heat(time.monotonic())
        finally:
            self.release()

    def release(self) -> None:
        """Release threads, files and memory."""
        if self._saved_prefixes is not None:
            self._saved_prefixes.close()
        self.core.close()

    def _admit(self) -> None:
        while (request := self._scheduler.next_to_admit(self.core.kv.free_tokens)) is not None:
            pages = self.core.kv.reserve(request.most_tokens)
            if pages is None:
                return
            request.kv = pages
            request.timing.admitted = time.monotonic()
            self._scheduler.admit(request)

    def _read_chunk(self, request: ActiveRequest) -> None:
        began = time.monotonic()
        if request.n_restored is None:  # not when it was admitted: another may have read since
            self._restore(request)
        n_tokens = self.core.prefiller.step(request)
        self._meter.note_read(n_tokens, time.monotonic() - began)
        if n_tokens and request.reading:
            self._prefixes.keep(
                _prefix(request), request.kv, self.core.kv, n_read=request.kv.length
            )

    def _restore(self, request: ActiveRequest) -> None:
        """Take what was read of the same beginning of another prompt."""
        request.n_restored = 0
        if request.request.prompt_logprobs:
            return  # the scores of all its tokens are wanted
        request.n_restored = self._prefixes.restore(_prefix(request), request.kv, self.core.kv)
        request.kv.length = request.n_restored
        if request.n_restored:
            self.core.decoder.drafting.restored(request, head_too=self.core.prefiller.head_keeps_up)

    def _write_tokens(self, requests: list[ActiveRequest]) -> None:
        began, waited = time.monotonic(), self.core.residency.wait_s
        before = sum(len(request.out_ids) for request in requests)
        self.core.decoder.step(requests)
        now = time.monotonic()
        self._meter.note_step(
            now, step_s=now - began, wait_s=self.core.residency.wait_s - waited,
            n_tokens=sum(len(request.out_ids) for request in requests) - before,
            n_answers=len(requests),
        )  # fmt: skip

    def _promote(self, writing: list[ActiveRequest]) -> None:
        """Improve the hot FP4 set if one of these answers looks into it. A copy takes time from
        them, so it must be for their good, and a prompt needs the bus for itself.
        """
        if self._hot_set is None or self._scheduler.to_read() is not None:
            return
        if any(r.opportunistic or r.request.quality is not Quality.FAST for r in writing):
            self._hot_set.turn(time.monotonic(), idle=False)

    def _guarded(self, requests: list[ActiveRequest], work: Callable[[], None]) -> None:
        """Run a piece of work; a bug in it ends these requests, not the engine.

        Raises:
            MoetError: MD-GPU-07, the card is lost.
        """
        try:
            work()
        except Exception as error:  # the request boundary: others must go on
            log.exception("a request failed")
            found = breakdown_of(error, card=self.core.device)
            if found is not None and found.ends_engine:
                raise found.error from error
            reason = f"{type(error).__name__}: {error}"
            bug = fail("MD-ENG-04", reason=reason, model=self.info.name)
            for request in requests:
                request.fail(bug if found is None else found.error)
            if found is not None and found.no_room:
                self._make_room()

    def _between_steps(self, work: Callable[[], object]) -> None:
        """Work that nobody asked for: when the card is full, it is left for another time."""
        try:
            work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("the card is full: %s", error)
            self._make_room()

    def _tend_card(self) -> None:
        if self.core.vram is not None:
            self.core.vram.turn(time.monotonic())

    def _make_room(self) -> None:
        if self.core.vram is not None:
            self.core.vram.make_room()

    # -- what others see ---------------------------------------------------------------------

    def state(self) -> EngineState:
        if self._scheduler.to_read() is not None:
            return EngineState.READING
        return EngineState.WRITING if self._scheduler.running else EngineState.READY

    def should_show(self) -> bool:
        now = time.monotonic()
        if self.busy and now - self._saved > SAVE_HEAT_EVERY_S:
            self._save_heat(now)
        return now - self._shown >= SHOW_EVERY_S or not self.busy

    def snapshot(self, state: EngineState) -> EngineSnapshot:
        """A picture of now; made at most every `SHOW_EVERY_S` while busy."""
        self._shown = time.monotonic()
        self._generation += 1
        residency, meter, running = self.core.residency, self._meter, self._scheduler.running
        reading = self._scheduler.to_read()
        return EngineSnapshot(
            state=state,
            model=self.info.name,
            family=self.info.family,
            device=self.core.device,
            opportunistic=self.info.opportunistic,
            context=self.info.context,
            context_used=max((request.kv.length for request in running), default=0),
            requests_running=len(running),
            requests_waiting=len(self._scheduler.waiting),
            decode_tok_per_s=meter.decode_rate(self._shown),
            prefill_tok_per_s=meter.prefill_rate,
            prompt_done=reading.n_read if reading else 0,
            prompt_total=len(reading.prompt_ids) if reading else 0,
            steps=meter.steps,
            tokens=meter.tokens,
            step_ms=meter.step_ms(),
            wait_share=meter.wait_share(),
            tier_share=residency.tier_share(),
            counters=residency.counters(step_s=meter.step_s),
            gate=self.core.decoder.gate.counters(),
            drafts=self.core.decoder.drafting.acceptance.counters(),
            draft_choice=self.core.decoder.drafting.policy.view(),
            tokens_per_step=meter.tokens_per_step(self._shown),
            sizes=residency.sizes(),
            vram=None if self.core.vram is None else self.core.vram.view(),
            reads=self.core.arena.read_times(),
            cache=residency.view(),
            generation=self._generation,
        )

    def _describe(self) -> ModelInfo:
        spec, core = self.core.spec, self.core
        router, gate = spec.moe_ffn.router, gate_in_use(self._pack, self._options.gate)
        return ModelInfo(
            name=self._pack.name,
            family=spec.model_type,
            context=core.plan.context,
            model_context=spec.context,
            vocab=spec.vocab,
            n_layers=len(spec.layers),
            n_moe_layers=len(spec.main_moe_layers),
            n_experts=router.n_experts,
            top_k=router.top_k,
            identity=core.reader.meta.identity,
            default_quality=self._options.quality,
            default_gate=gate.tau,
            gate=gate,
            prompts=core.prefiller.prompts,
            opportunistic=self._options.opportunistic,
            thinks=self._text.answers.think is not None,
            switches=self._text.switches,
            efforts=self._text.efforts,
        )

    def _prefix_cache(self) -> PrefixCache:
        """Its identity says all that the bits of KV depend on besides tokens and plane."""
        core, options = self.core, self._options
        identity = "/".join(
            str(part)
            for part in (
                core.reader.meta.identity, core.device, core.kv.form.value, core.kv.n_layers,
                core.kv.state_bytes, core.dense_format.value, core.prefiller.chunk,
                core.prefiller.prompts.name, options.activations,
                options.codebook.name, torch.get_num_threads(), torch.__version__, __version__,
            )
        )  # fmt: skip
        return PrefixCache(
            identity, chunk=core.prefiller.chunk, n_bytes=core.prefix_bytes,
            saved=self._saved_prefixes,
        )  # fmt: skip

    def _save_heat(self, now: float) -> None:
        self._saved = now
        if self._options.save_heat:
            heat.write(self._pack, self.core.residency.hottest())


def _saved_prefixes(options: EngineOptions) -> SavedPrefixes | None:
    if options.saved_prefixes is None or not options.saved_bytes:
        return None
    return SavedPrefixes(options.saved_prefixes, n_bytes=options.saved_bytes)


def _prefix(request: ActiveRequest) -> Prefix:
    return Prefix(request.prompt_ids, request.plane.value)
