"""Chat, endpoint, a download and a check of a pack together, for as long as one likes.

    python -m bench.soak --minutes N [--device cuda] [--record FILE]

One JSON object. The demo model answers a chat (as the app does: stored while it is written) and clients of
the endpoint in all three protocols, some of which hang up; beside it, processes of their own fetch a tiny
model from a hub on loopback, verify it, remove it, and verify the demo's pack, again and again. Every
answer must be the one that the same question got before all this began, token for token and character for
character; every chat must be in the store as it was shown. Memory, open files and threads of the process
are counted all along, and what is left of them once everything is closed. The answers before come from an
engine that is closed again: what a driver and libraries keep for good (descriptors, a card's memory) is
there before and after, and the rest can be compared. Other programs may use the card meanwhile, but not at
these two moments.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.cli.bench_record import driver, machine
from moet_desk.engine.cuda import pinned
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Quality,
    Sampling,
    start_engine,
)
from moet_desk.store.chats import ChatStore
from moet_desk.telemetry import Finished, TextDelta
from moet_desk.ui.bridge import Bridge
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.conversation import Conversation
from moet_desk.units import MIB
from tests.conftest import DEMO, pack_source

QUESTIONS = (
    "What is 17 + 25?",
    "Tell me a short story about a fox.",
    "Name three harbours, as a list.",
    "Write a haiku about rain.",
)
MAX_TOKENS = 60
SAMPLE_S = 1.0
PATIENCE_S = 900.0  # of clients: what a busy computer makes slow is not lost
MODULES_MIB = 64  # of VRAM: kernels that ran first in the soak keep their code there
GROWTH_MIB = 32.0  # of resident memory over the second half; less is noise of allocators


@dataclass
class Known:
    """What a question is answered with, alone."""

    text: str
    tokens: int
    gap: int  # tokens of the usage that no piece of text counted (an end token)


@dataclass
class Seen:
    """What happened; written by all threads."""

    answers: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lost_tokens: int = 0
    other_text: int = 0
    not_stored: int = 0

    def fail(self, words: str) -> None:
        self.failures.append(words[:400])

    def compare(self, who: str, known: Known, text: str, tokens: int) -> None:
        self.answers[who] += 1
        self.tokens[who] += tokens
        self.lost_tokens += max(0, known.tokens - tokens)
        if text != known.text:
            self.other_text += 1
            self.fail(f"{who}: other text: {text[:80]!r} instead of {known.text[:80]!r}")


@dataclass(frozen=True)
class Sample:
    """The process at one moment. Bytes."""

    at_s: float
    rss: int
    fds: int
    threads: int
    pinned: int  # of our own mappings, as they were registered with the driver
    vram: int  # that torch's allocator has given out


def take_sample(began_s: float) -> Sample:
    process = psutil.Process()
    return Sample(
        at_s=time.monotonic() - began_s,
        rss=process.memory_info().rss,
        fds=process.num_fds(),
        threads=process.num_threads(),
        pinned=sum(PINNED.values()),
        vram=vram_bytes(),
    )


def vram_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())


def open_files() -> Counter[str]:
    """What the process has open, by name."""
    found = Counter[str]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own
            found[re.sub(r"\d+", "N", str(link.readlink()))] += 1
    return found


def driver_vram_bytes() -> int:
    """What the driver has given out on the card, to anyone; 0 without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


PINNED: dict[int, int] = {}
"""Sizes of the pieces that are registered, by address: the system counts none of them as locked."""


class CountedRuntime:
    """Registers memory as CUDA's runtime does, and counts it."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def cudaHostRegister(self, address: int, n_bytes: int, how: int) -> int:
        """See CUDA."""
        status = int(self._runtime.cudaHostRegister(address, n_bytes, how))
        if not status:
            PINNED[address] = n_bytes
        return status

    def cudaHostUnregister(self, address: int) -> int:
        """See CUDA."""
        PINNED.pop(address, None)
        return int(self._runtime.cudaHostUnregister(address))


def count_pinned() -> None:
    """From now on."""
    runtime = pinned._runtime
    pinned._runtime = lambda: CountedRuntime(runtime())


# -- what is asked ----------------------------------------------------------------------------------


def request_for(question: str, quality: Quality) -> GenerateRequest:
    return GenerateRequest(
        messages=[{"role": "user", "content": question}],
        sampling=Sampling(temperature=0.0),
        max_tokens=MAX_TOKENS,
        quality=quality,
    )


def answer_alone(handle: EngineHandle, question: str, quality: Quality) -> Known:
    text, counted = "", 0
    for event in handle.submit(request_for(question, quality)):
        if isinstance(event, TextDelta):
            text += event.text
            counted += event.n_tokens
        elif isinstance(event, Finished):
            return Known(
                text, event.usage.completion_tokens, event.usage.completion_tokens - counted
            )
    raise AssertionError(f"no answer to {question!r}")


def answers_alone(pack: Path, options: EngineOptions) -> dict[tuple[str, Quality], Known]:
    """What every question is answered with, by an engine of its own."""
    handle = start_engine(pack, options)
    handle.wait_ready()
    try:
        return {
            (question, quality): answer_alone(handle, question, quality)
            for question in QUESTIONS
            for quality in (Quality.FAST, Quality.EXACT)
        }
    finally:
        handle.close()


def chat(
    handle: EngineHandle,
    known: Mapping[Any, Known],
    folder: Path,
    seen: Seen,
    stop: Callable[[], bool],
) -> None:
    """What the app does, without its screens; each chat is then read back from the file."""
    path = folder / "chats.sqlite3"
    conversation = Conversation(Bridge(lambda: handle), ChatStore.open(path), wishes=Wishes())
    choose = random.Random(1)
    bridge = conversation._bridge
    while bridge.poll().value != "ready":
        time.sleep(0.01)
    reader = ChatStore.open(path)
    while not stop():
        question = choose.choice(QUESTIONS)
        quality = choose.choice((Quality.FAST, Quality.EXACT))
        conversation.new()
        conversation.wish(temperature=0.0, quality=quality, max_tokens=MAX_TOKENS)
        conversation.send(question)
        counted = 0
        while conversation.busy:
            live = conversation.live
            conversation.pull()
            counted = 0 if live is None else live.n_tokens
            time.sleep(0.02)
        turn, expected = conversation.turns[-1], known[question, quality]
        seen.compare("chat", expected, turn.text, counted + expected.gap)
        kept = reader.get_chat(conversation.chat_id or 0).messages[-1]
        if (kept.content, kept.status.value) != (turn.text, "done"):
            seen.not_stored += 1
            seen.fail(f"chat: stored {kept.status.value} {kept.content[:60]!r}")
    reader.close()
    conversation._chats.close()


def client(
    address: str, known: Mapping[Any, Known], seen: Seen, stop: Callable[[], bool], seed: int
) -> None:
    """A program at the endpoint: three protocols, streams or not, sometimes gone in the middle."""
    choose = random.Random(seed)
    with httpx.Client(base_url=address, timeout=PATIENCE_S) as http:
        while not stop():
            question = choose.choice(QUESTIONS)
            quality = choose.choice((Quality.FAST, Quality.EXACT))
            kind = choose.choice(("chat", "stream", "messages", "responses", "hang up"))
            try:
                _call(http, kind, question, quality, known[question, quality], seen)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                seen.fail(f"{kind}: {type(error).__name__}: {error}")


def _call(
    http: httpx.Client, kind: str, question: str, quality: Quality, expected: Known, seen: Seen
) -> None:
    said = [{"role": "user", "content": question}]
    common = {"temperature": 0.0, "quality": quality.value}
    chat_body = {**common, "messages": said, "max_tokens": MAX_TOKENS}
    if kind in ("stream", "hang up"):
        body = {**chat_body, "stream": True, "stream_options": {"include_usage": True}}
        text, tokens = "", 0
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                seen.refused[str(answer.status_code)] += 1
                return
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if kind == "hang up" and len(text) > 10:
                    seen.answers["hung up"] += 1
                    if not expected.text.startswith(text):
                        seen.other_text += 1
                        seen.fail(f"hang up: {text!r} is no beginning of {expected.text[:60]!r}")
                    return
        seen.compare(kind, expected, text, tokens)
        return
    if kind == "messages":
        answer = http.post("/v1/messages", json=chat_body)
    elif kind == "responses":
        body = {**common, "input": said, "max_output_tokens": MAX_TOKENS}
        answer = http.post("/v1/responses", json=body)
    else:
        answer = http.post("/v1/chat/completions", json=chat_body)
    if answer.status_code != 200:
        seen.refused[str(answer.status_code)] += 1
        return
    found = answer.json()
    if kind == "messages":
        text, tokens = found["content"][0]["text"], found["usage"]["output_tokens"]
    elif kind == "responses":
        [message] = [item for item in found["output"] if item["type"] == "message"]
        text, tokens = message["content"][0]["text"], found["usage"]["output_tokens"]
    else:
        text = found["choices"][0]["message"]["content"]
        tokens = found["usage"]["completion_tokens"]
    seen.compare(kind, expected, text, tokens)


def commands(folder: Path, seen: Seen, stop: Callable[[], bool]) -> None:
    """Fetch, verify and remove a model; verify the demo's pack. Each in a process of its own, and
    the hub too: what it reads to send it is not the program's memory.
    """
    start = [sys.executable, "-m", "tests.store.hub_process", str(folder / "repo"), "test/tiny"]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdin is not None
        assert hub.stdout is not None
        environment = os.environ | {
            "HF_ENDPOINT": hub.stdout.readline().strip(), "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1", "MOET_DESK_DATA_DIR": str(folder / "data"),
        }  # fmt: skip
        _rounds(environment, seen, stop)
        hub.stdin.close()


def _rounds(environment: Mapping[str, str], seen: Seen, stop: Callable[[], bool]) -> None:
    rounds = (
        ("pull", "test/tiny", "--yes"),
        ("verify", "tiny"),
        ("verify", "demo"),
        ("rm", "tiny", "--yes"),
    )
    while not stop():
        for given in rounds:
            ended = subprocess.run(
                [sys.executable, "-m", "moet_desk", *given, "--json"],
                env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            seen.commands[given[0]] += 1
            if ended.returncode:
                seen.fail(f"{' '.join(given)}: {ended.returncode} {ended.stderr[-300:]}")
            if stop():
                break


# -- the run ----------------------------------------------------------------------------------------


def soak(minutes: float, device: str) -> dict[str, Any]:
    began_s = time.monotonic()
    seen, samples = Seen(), []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        pack = pack_source(DEMO, folder / "data" / "models" / "demo")
        options = EngineOptions(device=device, save_heat=False, pool_slots=96, fine_slots=48)
        known = answers_alone(pack, options)
        given_out = driver_vram_bytes()
        before, open_before = take_sample(began_s), open_files()
        handle = start_engine(pack, options)
        handle.wait_ready()
        name = handle.snapshot().device
        endpoint = Endpoint(handle, EndpointOptions(port=0, responses=folder / "responses.sqlite3"))
        endpoint.start()
        end_s = time.monotonic() + 60 * minutes

        def stop() -> bool:
            return time.monotonic() > end_s

        work: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (chat, (handle, known, folder, seen, stop)),
            (commands, (folder, seen, stop)),
            *((client, (endpoint.address, known, seen, stop, seed)) for seed in range(3)),
        ]
        threads = [threading.Thread(target=_guarded, args=(seen, *job)) for job in work]
        for thread in threads:
            thread.start()
        while not stop():
            samples.append(take_sample(began_s))
            time.sleep(SAMPLE_S)
        for thread in threads:
            thread.join(PATIENCE_S)
            if thread.is_alive():
                seen.fail(f"{thread.name} hangs")
        left = _left_running(handle)
        endpoint.stop()
        handle.close()
        del handle, endpoint, work, threads
    gc.collect()
    time.sleep(0.5)
    more_given_out = driver_vram_bytes() - given_out
    after = take_sample(began_s)
    record = _record(minutes, name, before, samples, after, seen, left, more_given_out)
    return record | {"files_left_open": dict(open_files() - open_before)}


def _left_running(handle: EngineHandle) -> int:
    """Requests that nobody waits for and that go on for more than a few seconds all the same."""
    for _ in range(100):
        now = handle.snapshot()
        if not now.requests_running + now.requests_waiting:
            return 0
        time.sleep(0.1)
    return now.requests_running + now.requests_waiting


def _guarded(seen: Seen, work: Callable[..., None], given: tuple[Any, ...]) -> None:
    try:
        work(*given)
    except BaseException as error:
        seen.fail(f"{work.__name__}: {type(error).__name__}: {error}")
        raise


def _record(
    minutes: float,
    device: str,
    before: Sample,
    samples: list[Sample],
    after: Sample,
    seen: Seen,
    left: int,
    more_given_out: int,
) -> dict[str, Any]:
    middle = samples[len(samples) // 2 :]
    growth = _growth(middle)
    warm = middle[0]
    leaks = {
        "fds": max(0, after.fds - before.fds - 2),  # the log of a library, the random device
        "threads_while_running": max(0, middle[-1].threads - warm.threads - 4),
        "fds_while_running": max(0, _median(middle[-10:], "fds") - _median(middle[:10], "fds")),
        "pinned_bytes": max(0, after.pinned - before.pinned),
        "pinned_bytes_while_running": max(0, middle[-1].pinned - warm.pinned),
        "vram_bytes": after.vram,
        "vram_bytes_while_running": max(
            0, _median(middle[-10:], "vram") - _median(middle[:10], "vram")
        ),
        "rss_mib_second_half": round(growth / MIB, 1),
        "vram_bytes_of_driver": max(0, more_given_out - MODULES_MIB * MIB),
    }
    is_bad = any(value for name, value in leaks.items() if not name.startswith("rss"))
    bad = left + seen.lost_tokens + seen.other_text + seen.not_stored + len(seen.failures)
    return {
        "what": "chat, endpoint, download and verification together",
        "shape": "demo",
        "minutes": minutes,
        "engine": device,
        "ok": not bad and not is_bad and growth < GROWTH_MIB * MIB,
        "answers": dict(seen.answers),
        "tokens": sum(seen.tokens.values()),
        "refused": dict(seen.refused),
        "commands": dict(seen.commands),
        "lost_tokens": seen.lost_tokens,
        "other_text": seen.other_text,
        "not_stored": seen.not_stored,
        "failures": seen.failures[:20],
        "left_running": left,
        "leaks": leaks,
        "rss_mib": {
            "first": round(samples[0].rss / MIB), "middle": round(warm.rss / MIB),
            "last": round(samples[-1].rss / MIB), "most": round(max(s.rss for s in samples) / MIB),
        },
        "fds": {"before": before.fds, "most": max(s.fds for s in samples), "after": after.fds},
        "pinned_mib": round(max(s.pinned for s in samples) / MIB),
        "vram_mib": round(max(s.vram for s in samples) / MIB),
        "vram_mib_of_driver_more_than_before": round(more_given_out / MIB, 1),
    }  # fmt: skip


def _median(samples: list[Sample], name: str) -> int:
    return int(statistics.median(getattr(sample, name) for sample in samples))


def _growth(samples: list[Sample]) -> float:
    """Bytes that resident memory grew by over the samples, along their straight line."""
    if len(samples) < 3:
        return 0.0
    slope, _ = statistics.linear_regression([s.at_s for s in samples], [s.rss for s in samples])
    return max(0.0, slope * (samples[-1].at_s - samples[0].at_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", type=Path, help="write the object there as well")
    given = parser.parse_args()
    if given.device == "cuda":
        count_pinned()
    found = soak(given.minutes, given.device)
    gpu = {"gpu": found.pop("engine"), "driver": driver()} if given.device == "cuda" else {}
    record = {**machine(), **gpu, **found}
    text = json.dumps(record, indent=1, ensure_ascii=False)
    print(text)
    if given.record is not None:
        given.record.write_text(text + "\n", "utf-8")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
