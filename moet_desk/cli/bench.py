"""`moet-desk bench`: measure a model on this computer and print the record that bench/records
keeps.

Everything is measured from outside, through the same handle as a chat: a figure here is one that a
person gets. Real text only; a prompt of noise would route experts as no real prompt does. Runs in
the main thread. Absent figures are null, never 0.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
from click.core import ParameterSource

from moet_desk.cli.bench_record import command_line, driver, machine, peak_rss, rounded
from moet_desk.cli.bench_shape import ShapeWishes, bench_shape, shape_options
from moet_desk.cli.context import (
    Invocation,
    device_option,
    draft_depth_option,
    drafts_option,
    engine_options,
    output_options,
)
from moet_desk.cli.engine import opened_engine
from moet_desk.cli.output import Format, print_result, print_text
from moet_desk.engine.handle import EngineHandle, EngineOptions, GenerateRequest, Quality, Sampling
from moet_desk.store.library import DEMO, embedded_source
from moet_desk.telemetry import CPU, DraftChoice, DraftCounters, Finished, TextDelta, TierCounters
from moet_desk.units import GIB, show_memory

PARAGRAPH = (
    "The ferry left the island at six in the morning, before the bakers had opened their shutters."
    " Mara stood at the rail with a basket of eggs and watched the lighthouse grow small. Her uncle"
    " had said that the sea keeps no promises, but that a captain must, and she thought about this"
    " while the gulls argued over a crust of bread. In the harbour on the other side a boy was"
    " waiting with a cart and a tired grey horse. He did not know her name, and she had forgotten"
    " his, so they shook hands and began again from the beginning."
)
"""Our own text, long enough to be repeated a few times without becoming a pattern."""

DECODE_TOKENS = 256
FIRST_TOKEN_PROMPT = 200
"""Length of the prompt in the promise about the first token (design §13)."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured answer."""

    prompt_tokens: int
    prefill_s: float
    first_token_s: float
    decode_tok_per_s: float
    gaps_ms: tuple[float, ...]  # between tokens, as they reach the reader
    tokens: int  # of the answer, without the first one, which is the prompt's
    steps: int
    decode_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What `bench` found for one quality mode."""

    short: tuple[Run, ...]  # FIRST_TOKEN_PROMPT tokens of prompt, DECODE_TOKENS of answer
    long: tuple[Run, ...]  # half the context as prompt
    counters: TierCounters  # of the measured answers alone
    steps: int
    drafts: DraftCounters  # of these too
    choice: DraftChoice  # the newest decision about guesses behind them


@click.command()
@click.argument("model", default=DEMO)
@click.option("--repeat", default=3, type=click.IntRange(1, 50), help="Measured runs of each kind.")
@click.option("--exact", is_flag=True, help="FP4 experts instead of 2-bit ones.")
@click.option("--pool-slots", type=int, help="2-bit slots; a smaller pool shows the tiers.")
@click.option("--arena-rows", type=int, help="Rows kept in RAM.")
@click.option("--no-pack", is_flag=True, help="Do not time packing (only the demo is packed).")
@device_option
@drafts_option
@draft_depth_option
@shape_options
@output_options
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    *,
    shape: str | None,
    model: str,
    repeat: int,
    exact: bool,
    pool_slots: int | None,
    arena_rows: int | None,
    no_pack: bool,
    device: str | None,
    drafts: str | None,
    draft_depth: int | None,
    **made_up: Any,
) -> None:
    """Measure decode, prefill, first token, loading and packing on this computer.

    With --shape: the decode step of made-up weights on the GPU, and where its time goes.
    """
    invocation: Invocation = ctx.obj
    of_a_model = ("model", "repeat", "pool_slots", "arena_rows", "no_pack", "device", "drafts")
    if shape is not None:
        _refuse(ctx, of_a_model, "cannot be used with --shape")
        bench_shape(
            invocation, shape, ShapeWishes(exact=exact, draft_depth=draft_depth or 0, **made_up)
        )
        return
    _refuse(ctx, made_up, "needs --shape")
    settings = invocation.load_settings(
        engine__device=device, engine__drafts=drafts, engine__draft_depth=draft_depth
    ).settings
    options = replace(engine_options(settings), save_heat=False, prefix_bytes=0)
    if pool_slots is not None:
        options = replace(options, pool_slots=pool_slots, fine_slots=pool_slots)
    if arena_rows is not None:
        options = replace(options, arena_rows=arena_rows)
    pack_s = None
    if model == DEMO and not no_pack:
        invocation.say("Packing the demo model into a temporary folder")
        pack_s = _time_packing()
    path = invocation.model_path(model)
    quality = Quality.EXACT if exact else Quality.FAST
    invocation.say(f"Measuring {model}, {quality.value}, {repeat} runs of each kind")
    began = time.perf_counter()
    with opened_engine(path, options, quiet=invocation.quiet) as handle:
        load_s = time.perf_counter() - began
        measured = _measure(handle, quality, repeat)
        record = _record(handle, options, measured, quality, repeat)
    record |= {"pack_s": rounded(pack_s), "load_s": rounded(load_s)}
    if invocation.format is Format.HUMAN:
        print_text(_for_people(record))
    else:
        print_result(invocation.format, "bench", record)


def _refuse(ctx: click.Context, names: Iterable[str], why: str) -> None:
    """Refuse parameters that were given and would be ignored."""
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "")
        if param.name in names and given is not ParameterSource.DEFAULT:
            what = param.name.upper() if isinstance(param, click.Argument) else param.opts[0]
            raise click.UsageError(f"{what} {why}", ctx)


def _time_packing() -> float:
    """Seconds that `moet-desk pack` takes for the demo model, as a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="moet-desk-bench-"))
    command = [sys.executable, "-m", "moet_desk", "pack", str(embedded_source())]
    command += ["--name", DEMO, "--data-dir", str(folder), "--quiet"]
    try:
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(handle: EngineHandle, quality: Quality, repeat: int) -> Measured:
    info = handle.model()
    context = info.context if info is not None else 0
    short = _prompt(handle, FIRST_TOKEN_PROMPT)
    long = _prompt(handle, context // 2)
    _answer(handle, short, quality, 16)  # warm: the first answer touches memory for the first time
    before = handle.snapshot()
    shorts = tuple(_answer(handle, short, quality, DECODE_TOKENS) for _ in range(repeat))
    after = handle.snapshot()
    longs = tuple(_answer(handle, long, quality, 4) for _ in range(repeat))
    return Measured(
        shorts, longs, _difference(after.counters, before.counters), after.steps - before.steps,
        _more_drafts(after.drafts, before.drafts), after.draft_choice,
    )  # fmt: skip


def _prompt(handle: EngineHandle, n_tokens: int) -> str:
    """Real text of at most `n_tokens` tokens, template included."""
    words = (PARAGRAPH + " ").split(" ") * (n_tokens // 40 + 1)
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        fits = handle.count_tokens(_request(" ".join(words[:middle]))) <= n_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(words[:low])


def _request(
    text: str, quality: Quality = Quality.FAST, max_tokens: int | None = None
) -> GenerateRequest:
    return GenerateRequest(
        messages=[{"role": "user", "content": text}],
        quality=quality,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        ignore_eos=True,
    )


def _answer(handle: EngineHandle, text: str, quality: Quality, n_tokens: int) -> Run:
    arrivals: list[tuple[float, int]] = []
    for event in handle.submit(_request(text, quality, n_tokens)):
        if isinstance(event, TextDelta):
            arrivals.append((time.perf_counter(), event.n_tokens))
        elif isinstance(event, Finished):
            usage = event.usage
    # a token may be half a character: then it arrives with the next one
    gaps = [1e3 * (b - a) / n for (a, _), (b, n) in itertools.pairwise(arrivals)]
    rate = (usage.completion_tokens - 1) / usage.decode_s if usage.decode_s else 0.0
    first = usage.first_token_s or 0.0
    return Run(
        usage.prompt_tokens, usage.prefill_s, first, rate, tuple(gaps),
        usage.completion_tokens - 1, usage.steps, usage.decode_s,
    )  # fmt: skip


def _difference(after: TierCounters, before: TierCounters) -> TierCounters:
    names = TierCounters.__dataclass_fields__
    return TierCounters(**{name: getattr(after, name) - getattr(before, name) for name in names})


def _more_drafts(after: DraftCounters, before: DraftCounters) -> DraftCounters:
    def more(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a - b for a, b in itertools.zip_longest(now, then, fillvalue=0))

    return DraftCounters(more(after.guessed, before.guessed), more(after.right, before.right))


def _drafts(measured: Measured) -> dict[str, Any]:
    """Who guessed in the end, and on what grounds."""
    choice = measured.choice
    return {
        "asked": choice.asked, "source": choice.source, "depth": choice.depth,
        "gain": rounded(choice.gain, 3), "guessed": list(measured.drafts.guessed),
        "right": list(measured.drafts.right),
        "step_ms_by_rows": {str(rows): rounded(ms, 3) for rows, ms in choice.rows_ms},
        "guess_ms": rounded(choice.guess_ms, 3),
        "spare_steps": rounded(choice.spare_steps), "probes": choice.probes,
    }  # fmt: skip


def _record(
    handle: EngineHandle, options: EngineOptions, measured: Measured, quality: Quality, repeat: int
) -> dict[str, Any]:
    """The figures in the schema of bench/records (design §13)."""
    info, now, counters = handle.model(), handle.snapshot(), measured.counters
    sizes = now.sizes
    hits = counters.hits_base + counters.hits_fine
    gaps = sorted(gap for run in measured.short for gap in run.gaps_ms)
    marks = quantiles(gaps, n=20)
    steps = max(measured.steps, 1)
    return {
        **machine(),
        **_card(now.device),
        "command": command_line(),
        "shape": info.name if info is not None else None,
        "weights": "real",
        "quality": quality.value,
        "vram_limit_gib": None,
        "ram_limit_gib": options.ram_bytes / GIB if options.ram_bytes else None,
        "base_slots": sizes.base_slots,
        "fine_slots": sizes.fine_slots,
        "arena_rows": sizes.arena_rows,
        "rows": sizes.rows,
        "hit_rate": rounded(hits / counters.lookups if counters.lookups else None, 4),
        "wait_share": rounded(counters.wait_s / counters.step_s if counters.step_s else None, 4),
        "tokens_per_step": rounded(
            sum(run.tokens for run in measured.short)
            / max(1, sum(run.steps for run in measured.short)),
            3,
        ),
        "acceptance": _shares(measured.drafts),
        "steps_per_s": _spread([run.steps / run.decode_s for run in measured.short]),
        "drafts": _drafts(measured),
        "context": info.context if info is not None else None,
        "prompt_tokens": [measured.short[0].prompt_tokens, measured.long[0].prompt_tokens],
        "decode_tok_per_s": _spread([run.decode_tok_per_s for run in measured.short]),
        "prefill_tok_per_s": _spread([run.prompt_tokens / run.prefill_s for run in measured.long]),
        "first_token_s": _spread([run.first_token_s for run in measured.short], digits=3),
        "step_ms": {
            "median": rounded(median(gaps)), "p05": rounded(marks[0]),
            "p95": rounded(marks[-1]), "by_group": None,
        },
        "bytes_per_step": {
            "vram": None, "pcie": None, "ram_to_slot": counters.bytes_ram_to_slot // steps,
            "nvme": counters.bytes_nvme_to_ram // steps,
        },
        "nvme_read_ms": now.reads and asdict(now.reads),
        "measured_bw": None,
        "roofline_ratio": None,
        "peak_vram_gib": None,
        "peak_rss_gib": rounded(peak_rss() / GIB),
        "repeats": repeat,
    }  # fmt: skip


def _shares(drafts: DraftCounters) -> list[float | None] | None:
    """Part of the guesses at each place that was right; None if none were made."""
    made = zip(drafts.right, drafts.guessed, strict=True)
    return [rounded(right / n if n else None, 3) for right, n in made] if drafts.guessed else None


def _card(device: str) -> dict[str, str | None]:
    """The card that an engine ran on, as its snapshots name it; nothing if that was the CPU."""
    return {} if device == CPU else {"gpu": device, "driver": driver()}


def _spread(values: list[float], digits: int = 1) -> dict[str, float | None]:
    return {
        "median": rounded(median(values), digits),
        "least": rounded(min(values), digits),
        "most": rounded(max(values), digits),
    }


def _for_people(record: Mapping[str, Any]) -> str:
    def figure(name: str, unit: str) -> str:
        spread = record[name]
        return f"{spread['median']} {unit}  ({spread['least']} to {spread['most']})"

    step, nothing = record["step_ms"], "not measured"
    share = record["hit_rate"]
    where = record["gpu"] or f"{record['cpu']} ({record['cores']} cores)"
    lines = [
        f"{record['shape']}, {record['quality']}, {record['repeats']} runs on {where}",
        f"  decode        {figure('decode_tok_per_s', 'tokens/s')}",
        f"  step          {step['median']} ms  (p05 {step['p05']}, p95 {step['p95']})",
        f"  steps         {figure('steps_per_s', '/s')}, {record['tokens_per_step']} tokens each",
        f"  guesses       {_draft_words(record)}",
        f"  prefill       {figure('prefill_tok_per_s', 'tokens/s')},"
        f" prompt of {record['prompt_tokens'][1]}",
        f"  first token   {figure('first_token_s', 's')}, prompt of {record['prompt_tokens'][0]}",
        f"  slots         {record['base_slots']} 2-bit, {record['fine_slots']} 4-bit"
        f" of {record['rows']} experts; {nothing if share is None else f'{share:.1%} hits'}",
        f"  memory        {show_memory(record['peak_rss_gib'] * GIB)} at most",
        f"  loading       {record['load_s']} s",
    ]
    if record["pack_s"] is not None:
        lines.append(f"  packing       {record['pack_s']} s")
    return "\n".join(lines)


def _draft_words(record: Mapping[str, Any]) -> str:
    """Who guessed, how far, and how often that was right: "auto, now mtp 2, x1.42; 71 %, 44 %"."""
    drafts, shares = record["drafts"], record["acceptance"]
    if drafts["asked"] == "off":
        return "off"
    now = "off" if drafts["source"] == "off" else f"{drafts['source']} {drafts['depth']}"
    words = f"auto, now {now}" if drafts["asked"] == "auto" else now
    if drafts["gain"] is not None:
        words += f", x{drafts['gain']:.2f} expected"
    if shares:
        words += "; right " + ", ".join(
            "-" if share is None else f"{share:.0%}" for share in shares
        )
    return words
