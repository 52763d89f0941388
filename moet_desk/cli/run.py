"""`run`: one question, or a conversation line by line. Runs in the main thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.context import (
    Invocation,
    device_option,
    draft_depth_option,
    drafts_option,
    engine_options,
    output_options,
)
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import (
    Format,
    be_plain,
    is_plain,
    print_document,
    print_event,
    print_text,
    prints_lines,
    say,
)
from moet_desk.cli.streams import harmless, is_text
from moet_desk.engine.handle import EngineHandle, GenerateRequest, Quality, Sampling
from moet_desk.errors import ExitCode, MoetError
from moet_desk.telemetry import EngineState

if TYPE_CHECKING:
    from moet_desk.cli.engine import Answer
    from moet_desk.settings import Settings

QUIT_WORDS = ("/quit", "/exit")


@dataclass(frozen=True, slots=True)
class Question:
    """What the arguments and stdin ask for."""

    model: str
    prompt: str  # empty: interactive
    interactive: bool


@click.command()
@click.argument("model", required=False, shell_complete=complete_model)
@click.argument("prompt", required=False)
@click.option("-i", "--interactive", is_flag=True, help="Talk line by line; /quit ends it.")
@click.option("--system", metavar="TEXT", help="Instruction put before the conversation.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0: always the likeliest word.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="1: off.")
@click.option("--top-k", type=click.IntRange(0), help="0: off.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="0: off.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text.")
@click.option(
    "--quality",
    type=click.Choice([quality.value for quality in Quality]),
    help="2-bit experts, exact ones where those are unsure, or exact ones.",
)
@click.option("--exact", "quality", flag_value="exact", help="The same as --quality exact.")
@click.option("--fast", "quality", flag_value="fast", help="The same as --quality fast.")
@click.option(
    "--gate",
    type=click.FloatRange(0, 1),
    help="Balanced: words less likely than this are made again, exactly.",
)
@click.option("--plain", is_flag=True, help="For screen readers: whole lines, nothing redrawn.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as text, without the chat template.")
@click.option(
    "--record-trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record what the cache does, with prompt and answer, for --demo-trace.",
)
@device_option
@drafts_option
@draft_depth_option
@output_options
@click.pass_obj
def run(
    invocation: Invocation,
    /,
    model: str | None,
    prompt: str | None,
    *,
    interactive: bool,
    system: str | None,
    plain: bool,
    raw: bool,
    quality: str | None,
    gate: float | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    device: str | None,
    drafts: str | None,
    draft_depth: int | None,
    record_trace: Path | None,
    **sampling: Any,
) -> int:
    """Ask MODEL one question, or talk with it.

    Text piped in is put behind PROMPT. A single argument is the name of a model if there is one of
    this name, otherwise it is the prompt for the model that comes with the program.
    """
    if (interactive or plain) and invocation.format is not Format.HUMAN:
        raise click.UsageError("-i and --plain print plain text only")
    if plain:
        be_plain(True)
    _check_text("--system", system or "")
    _check_text("--stop", *stop)
    question = _question(invocation, model, prompt, interactive=interactive)
    if raw and question.interactive:
        raise click.UsageError("--raw needs a prompt and no -i")
    settings = invocation.load_settings(
        engine__device=device, engine__drafts=drafts, engine__draft_depth=draft_depth
    ).settings
    base = replace(
        _base_request(settings, sampling, quality),
        gate=settings.answers.gate if gate is None else gate,
        stop=stop,
        max_tokens=max_tokens or settings.answers.max_tokens,
    )
    instruction = settings.answers.system if system is None else system
    start = [{"role": "system", "content": instruction}] if instruction else []

    from moet_desk import runtime
    from moet_desk.cli.engine import opened_engine

    runtime.start_logging(invocation.locations, settings.log.level)
    pack = invocation.model_path(question.model)
    options = engine_options(settings)
    _tell(f"Loading {question.model}.")
    with (
        opened_engine(pack, options, quiet=invocation.quiet or _is_piped()) as engine,
        _recorded(invocation, engine, record_trace) as handle,
    ):
        if question.interactive:
            return _talk(invocation, handle, base, start)
        if raw:
            request = replace(base, prompt=question.prompt)
        else:
            messages = [*start, {"role": "user", "content": question.prompt}]
            request = replace(base, messages=messages)
        return _ask_once(invocation, handle, request, question.model)


@contextmanager
def _recorded(
    invocation: Invocation, handle: EngineHandle, path: Path | None
) -> Iterator[EngineHandle]:
    """The engine, recorded for as long as the block runs if a file is given."""
    if path is None:
        yield handle
        return
    from moet_desk.cli.recording import start_recording

    recorder = start_recording(handle, path)
    try:
        yield recorder.watch(handle)
    finally:
        recorder.close()
    invocation.say(f"Recorded: {path} ({path.stat().st_size:,} bytes)")


def _question(
    invocation: Invocation, model: str | None, prompt: str | None, *, interactive: bool
) -> Question:
    """Sort out which argument is what, and read stdin."""
    from moet_desk.store.library import DEMO

    if model is not None and prompt is None:
        names = {DEMO, *(pack.name for pack in invocation.library.packs())}
        if model not in names:
            model, prompt = None, model
    _check_text("PROMPT", prompt or "")
    on_terminal = sys.stdin.isatty()
    if interactive or (prompt is None and on_terminal):
        if prompt is not None:
            raise click.UsageError("-i takes no PROMPT")
        return Question(model or DEMO, "", interactive=True)
    piped = "" if on_terminal else sys.stdin.read()
    _check_text("what was piped in", piped)
    text = "\n\n".join(part for part in (prompt, piped.rstrip("\n")) if part)
    if not text:
        raise click.UsageError("There is no prompt, and nothing was piped in")
    return Question(model or DEMO, text, interactive=False)


def _check_text(name: str, *given: str) -> None:
    if not all(map(is_text, given)):
        raise click.UsageError(f"{name}: this is not text in UTF-8")


def _base_request(
    settings: Settings, sampling: dict[str, Any], quality: str | None
) -> GenerateRequest:
    if sampling["temperature"] is None:
        sampling["temperature"] = settings.answers.temperature
    return GenerateRequest(
        prompt=None,
        sampling=Sampling(**sampling),
        quality=Quality(quality or settings.answers.quality),
        client="run",
    )


def _is_piped() -> bool:
    """Whether nobody watches stderr: scripts want no steps of loading there."""
    return not sys.stderr.isatty() and not is_plain()


def _tell(event: str) -> None:
    """An event that is seen elsewhere and has to be said in plain text."""
    if is_plain():
        say(event)


# -- one question ----------------------------------------------------------------------------


def _ask_once(
    invocation: Invocation, handle: EngineHandle, request: GenerateRequest, model: str
) -> int:
    from moet_desk.cli.engine import ask

    if prints_lines() and invocation.format is Format.HUMAN:
        answer = _ask_plainly(handle, request)
        return ExitCode.INTERRUPTED if answer.interrupted else ExitCode.OK
    on_text: Callable[[str], None] = _print_piece
    if invocation.format is Format.JSON:
        on_text = _keep_quiet
    elif invocation.format is Format.NDJSON:
        on_text = _print_text_event
    answer = ask(handle, request, on_text)
    if invocation.format is Format.HUMAN:
        if not answer.text.endswith("\n"):
            _print_piece("\n")
    elif invocation.format is Format.JSON:
        print_document({"model": model, "text": answer.text, **_result(answer)})
    else:
        print_event("finished", model=model, **_result(answer))
    return ExitCode.INTERRUPTED if answer.interrupted else ExitCode.OK


def _ask_plainly(handle: EngineHandle, request: GenerateRequest) -> Answer:
    """Print an answer line by line, with a sentence before and after it."""
    from moet_desk.cli.engine import ask
    from moet_desk.cli.plain import PlainText, end_words

    say("The answer:")
    text = PlainText(print_text)
    try:
        answer = ask(handle, request, text.feed)
    finally:
        text.end()
    say(end_words(answer.finished))
    return answer


def _print_piece(text: str) -> None:
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _print_text_event(text: str) -> None:
    print_event("text", text=text)


def _keep_quiet(text: str) -> None:
    """The document will hold it."""


def _result(answer: Answer) -> dict[str, Any]:
    finished, usage = answer.finished, answer.finished.usage
    rate = usage.completion_tokens / usage.decode_s if usage.decode_s > 0 else None
    return {
        "finish_reason": finished.reason.value,
        "stop": finished.stop,
        "quality": finished.quality,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "queue_s": usage.queue_s,
            "prefill_s": usage.prefill_s,
            "decode_s": usage.decode_s,
            "first_token_s": usage.first_token_s,
            "decode_tok_per_s": rate,
            "wait_s": usage.wait_s,
            "steps": usage.steps,
            "rerun_tokens": usage.rerun_tokens,
            "rerun_s": usage.rerun_s,
            "opportunistic": usage.opportunistic,
        },
    }


# -- conversation ----------------------------------------------------------------------------


def _talk(
    invocation: Invocation,
    handle: EngineHandle,
    base: GenerateRequest,
    start: list[dict[str, Any]],
) -> int:
    """Read lines and answer them until /quit or the end of input."""
    from moet_desk.cli.engine import ask

    messages = list(start)
    if sys.stdin.isatty():
        invocation.say("Type a line to ask; Ctrl+C stops an answer; /quit or Ctrl+D ends.")
    while True:
        try:
            line = _read_line()
        except KeyboardInterrupt:
            say("\n/quit or Ctrl+D ends.")
            continue
        if line is None or line.strip() in QUIT_WORDS:
            return ExitCode.OK
        if not line.strip():
            continue
        if not is_text(line):
            say("This line is not text in UTF-8; it was not asked.")
            continue
        turn = {"role": "user", "content": line}
        request = replace(base, messages=[*messages, turn])
        try:
            if prints_lines():
                answer = _ask_plainly(handle, request)
            else:
                answer = ask(handle, request, _print_piece)
        except MoetError as error:
            if handle.snapshot().state is EngineState.FAULT:
                raise  # no further turn can go well
            # The turn that failed is not kept, so the next one can go well.
            say(f"\n{error.title}  {error.code}\n  {error.cause}\n  Do: {error.do}")
            continue
        if not prints_lines():
            _print_piece("\n" if answer.text.endswith("\n") else "\n\n")
        messages += [turn, {"role": "assistant", "content": answer.text}]


def _read_line() -> str | None:
    """The next line, None at the end of input."""
    _tell("Your turn.")
    if sys.stdin.isatty() and sys.stdout.isatty() and not is_plain():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
