"""The engine's newest snapshot as Prometheus text. Pure; runs in the endpoint's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moet_desk.telemetry import TIER_LETTERS, EngineSnapshot, EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(now: EngineSnapshot) -> str:
    """All figures in the text format 0.0.4. What is not known yet is left out."""
    return "".join(f"{line}\n" for line in _lines(now))


def _lines(now: EngineSnapshot) -> Iterator[str]:
    yield from _family("info", "gauge", "What runs here.", {
        f'model="{_escaped(now.model)}",device="{_escaped(now.device)}"': 1,
    })  # fmt: skip
    states = {f'state="{state.value}"': int(now.state is state) for state in EngineState}
    yield from _family("state", "gauge", "1 for what the engine is doing.", states)
    for name, kind, words, value in _numbers(now):
        if value is not None:
            yield from _family(name, kind, words, {"": value})
    if now.tier_share is not None:
        shares = zip(TIER_LETTERS, now.tier_share, strict=True)
        by_tier = {f'tier="{letter}"': share for letter, share in shares}
        yield from _family("tier_share", "gauge", "Recent look-ups by tier.", by_tier)
    counters = now.counters
    lookups = {
        'tier="N"': counters.from_nvme,
        'tier="R"': counters.from_ram,
        'tier="G"': counters.hits_base,
        'tier="Q"': counters.hits_fine,
    }
    yield from _family("lookups_total", "counter", "Look-ups of experts by tier.", lookups)


def _numbers(now: EngineSnapshot) -> Iterator[tuple[str, str, str, float | None]]:
    counters, sizes, gate = now.counters, now.sizes, now.gate
    yield "requests_running", "gauge", "Requests being worked on.", now.requests_running
    yield "requests_waiting", "gauge", "Requests in the queue.", now.requests_waiting
    yield "context_tokens", "gauge", "Tokens a request may use.", now.context
    yield "context_used_tokens", "gauge", "Tokens of the longest request.", now.context_used
    yield "steps_total", "counter", "Decode steps.", now.steps
    yield "tokens_total", "counter", "Tokens written.", now.tokens
    yield "decode_tokens_per_second", "gauge", "Over the last 3 s.", now.decode_tok_per_s
    yield "prefill_tokens_per_second", "gauge", "Of the last prompt.", now.prefill_tok_per_s
    step_s = None if now.step_ms is None else now.step_ms / 1000
    yield "step_seconds", "gauge", "Median of the last 64 steps.", step_s
    yield "step_seconds_total", "counter", "Time in decode steps.", counters.step_s
    yield "wait_seconds_total", "counter", "Of that: waiting for experts.", counters.wait_s
    yield "evictions_total", "counter", "Rows dropped from slots.", counters.evictions
    yield "promotions_total", "counter", "Rows put into 4-bit slots.", counters.promotions
    yield "read_errors_total", "counter", "Rows that could not be read.", counters.read_errors
    yield "ram_to_slot_bytes_total", "counter", "Copied to slots.", counters.bytes_ram_to_slot
    yield "disk_to_ram_bytes_total", "counter", "Read from disk.", counters.bytes_nvme_to_ram
    yield "gate_judged_total", "counter", "Balanced tokens from 2 bits.", gate.judged
    yield "gate_rerun_total", "counter", "Of these: made again.", gate.rerun
    yield "base_slots", "gauge", "2-bit slots.", sizes.base_slots
    yield "base_slots_used", "gauge", "2-bit slots in use.", sizes.base_slots_used
    yield "fine_slots", "gauge", "4-bit slots.", sizes.fine_slots
    yield "fine_slots_used", "gauge", "4-bit slots in use.", sizes.fine_slots_used
    if (vram := now.vram) is not None:
        yield "slot_bytes", "gauge", "Of the card, in slots.", vram.slots
        yield "vram_free_bytes", "gauge", "Of the card, nobody's.", vram.free
        yield "slot_changes_total", "counter", "Slots given back or got again.", vram.changes
    yield "arena_rows", "gauge", "Rows that fit RAM.", sizes.arena_rows
    yield "arena_rows_used", "gauge", "Rows in RAM.", sizes.arena_rows_used


def _family(name: str, kind: str, words: str, values: Mapping[str, float]) -> Iterator[str]:
    full = f"moet_desk_{name}"
    yield f"# HELP {full} {words}"
    yield f"# TYPE {full} {kind}"
    for labels, value in values.items():
        yield f"{full}{{{labels}}} {value}" if labels else f"{full} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
