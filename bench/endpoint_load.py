"""What the endpoint does under many clients that behave badly.

    python bench/endpoint_load.py [--seconds 90] [--connections 200]

Starts the endpoint in a process of its own, over an engine that plays answers (four at a time, 32
waiting, as the real one), and keeps connections open to it on loopback:

* one running chat that reads its stream as it comes, again and again; its longest silence counts,
* slow readers that take 10 KB a second of an answer of half a megabyte,
* clients that hang up, before the answer, inside it, or in the middle of their own request,
* short chats, streamed and whole, in all four protocols; a full queue (503) makes them wait.

Prints one JSON object: memory, open files and threads of the server's process over time, statuses,
what is left running a second after the last client has gone, and the running chat's silences.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moet_desk.cli.bench_record import machine
from moet_desk.units import MIB

TOKENS = 8000  # of the longest answer
TOKENS_PER_S = 2000.0
SLOW_BYTES_PER_S = 10_000


def serve() -> None:
    """The server's process: prints its port and serves until its input is closed."""
    from moet_desk.api.guard import EndpointOptions
    from moet_desk.api.server import Endpoint
    from moet_desk.engine.scripted import Script, ScriptedEngine

    script = Script(
        answers=("word " * TOKENS,), tokens_per_s=TOKENS_PER_S, prompt_tok_per_s=1e5, running=4,
        n_layers=1, n_experts=4, top_k=1, context=32768, model="load",
    )  # fmt: skip
    engine = ScriptedEngine(script).start()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "responses.sqlite3"
        endpoint = Endpoint(engine, EndpointOptions(port=0, responses=kept))
        endpoint.start()
        print(endpoint.options.port, flush=True)
        sys.stdin.read()
        endpoint.stop()
        engine.close()


@dataclass
class Seen:
    """What the clients saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    silences_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    top = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{top}Content-Length: {len(data)}\r\n\r\n".encode() + data


def chat(max_tokens: int, *, stream: bool = True) -> bytes:
    said = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
    return request(
        "/v1/chat/completions", {"messages": said, "max_tokens": max_tokens, "stream": stream}
    )


def any_call(choose: random.Random) -> bytes:
    n, stream = choose.randrange(5, 60), choose.random() < 0.7
    said = [{"role": "user", "content": "hi " * choose.randrange(1, 400)}]
    kind = choose.randrange(4)
    if kind == 0:
        return request("/v1/messages", {"messages": said, "max_tokens": n, "stream": stream})
    if kind == 1:
        return request("/v1/responses", {"input": said, "max_output_tokens": n, "stream": stream})
    if kind == 2:
        return request("/v1/completions", {"prompt": "hi", "max_tokens": n, "stream": stream})
    return chat(n, stream=stream)


@contextlib.asynccontextmanager
async def connected(port: int, *, buffer: int | None = None) -> Any:
    link = socket.socket()
    link.setblocking(False)
    if buffer is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=link, limit=buffer or 2**16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(reader: asyncio.StreamReader) -> tuple[int, float]:
    """The status, and how long to wait before trying again."""
    top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    _, _, after = top.partition("retry-after: ")
    return int(top.split()[1]), float(after.split("\r\n")[0]) if after else 0.0


async def running_chat(port: int, seen: Seen) -> None:
    """Streams; the queue is fair, so only silence after the first piece counts."""
    while True:
        async with connected(port) as (reader, writer):
            writer.write(chat(TOKENS))
            status, wait_s = await status_of(reader)
            seen.statuses[f"running chat {status}"] += 1
            if status != 200:
                await asyncio.sleep(wait_s)
                continue
            last, tail = None, b""
            while b"[DONE]" not in tail:
                piece = await reader.read(65536)
                if not piece:
                    seen.ends["running chat was cut"] += 1
                    break
                tail = tail[-20:] + piece
                if b'"content":"w' in piece or b'"content":" ' in piece:
                    now = time.monotonic()
                    if last is not None:
                        seen.silences_s.append(now - last)
                    last = now
            seen.ends["running chat"] += 1


async def slow_reader(port: int, seen: Seen, choose: random.Random) -> None:
    while True:
        async with connected(port, buffer=4096) as (reader, writer):
            writer.write(chat(2000))
            status, wait_s = await status_of(reader)
            seen.statuses[f"slow {status}"] += 1
            if status != 200:
                await asyncio.sleep(wait_s + choose.random())
                continue
            ends, n_read = time.monotonic() + choose.uniform(5, 30), 0
            while time.monotonic() < ends and (piece := await reader.read(1000)):
                n_read += len(piece)
                await asyncio.sleep(1000 / SLOW_BYTES_PER_S)
            seen.ends["slow reader left" if time.monotonic() >= ends else "slow reader done"] += 1


async def rude(port: int, seen: Seen, choose: random.Random) -> None:
    while True:
        async with connected(port) as (reader, writer):
            data, kind = chat(2000), choose.randrange(3)
            if kind == 0:
                writer.write(data[: choose.randrange(1, len(data))])
                await asyncio.sleep(choose.uniform(0, 0.2))
            else:
                writer.write(data)
                if kind == 1:
                    await asyncio.sleep(choose.uniform(0, 0.3))
                else:
                    with contextlib.suppress(asyncio.IncompleteReadError):
                        status, _ = await status_of(reader)
                        seen.statuses[f"rude {status}"] += 1
                        await reader.read(100)
            seen.ends["hung up"] += 1
        await asyncio.sleep(choose.uniform(0, 0.2))


async def short(port: int, seen: Seen, choose: random.Random) -> None:
    while True:
        async with connected(port) as (reader, writer):
            writer.write(any_call(choose))
            status, wait_s = await status_of(reader)
            seen.statuses[f"short {status}"] += 1
            await reader.read()
            seen.ends["short"] += status == 200
        await asyncio.sleep(wait_s * choose.uniform(0.5, 2) + choose.uniform(0, 0.5))


async def health(port: int, seen: Seen) -> dict[str, Any]:
    began = time.monotonic()
    async with connected(port) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await status_of(reader)
        body: dict[str, Any] = json.loads(await reader.read())
    seen.health_s.append(time.monotonic() - began)
    return body


def sample(process: psutil.Process, began: float) -> dict[str, float]:
    return {
        "s": round(time.monotonic() - began, 1),
        "rss_mib": round(process.memory_info().rss / MIB, 1),
        "files": process.num_fds(),
        "threads": process.num_threads(),
    }


async def retried(client: Any, *given: Any) -> None:
    """A client goes on if the server closes its connection."""
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await client(*given)
        await asyncio.sleep(0.05)


async def load(port: int, process: psutil.Process, seconds: float, n: int) -> dict[str, Any]:
    seen, began = Seen(), time.monotonic()
    before = sample(process, began)
    n_slow, n_rude = n // 5, n // 4
    clients = [asyncio.create_task(retried(running_chat, port, seen))]
    kinds = [slow_reader] * n_slow + [rude] * n_rude + [short] * (n - 1 - n_slow - n_rude)
    for i, kind in enumerate(kinds):
        clients.append(asyncio.create_task(retried(kind, port, seen, random.Random(i))))
    samples = []
    while time.monotonic() - began < seconds:
        await asyncio.sleep(1)
        now = await health(port, seen)
        samples.append({**sample(process, began), "running": now["requests_running"]})
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await asyncio.sleep(1)
    left = await health(port, seen)
    await asyncio.sleep(0.2)
    settled = [s for s in samples if s["s"] >= seconds / 4]
    silences = sorted(seen.silences_s)
    return {
        "before": before,
        "rss_mib": {
            "after a quarter": settled[0]["rss_mib"],
            "highest after that": max(s["rss_mib"] for s in settled),
            "last": settled[-1]["rss_mib"],
        },
        "files_highest": max(s["files"] for s in samples),
        "threads_highest": max(s["threads"] for s in samples),
        "after": {**sample(process, began), "running": left["requests_running"],
                  "waiting": left["requests_waiting"]},
        "running_chat": {
            "pieces": len(silences),
            "silence_p50_ms": round(silences[len(silences) // 2] * 1000, 1),
            "silence_p99_ms": round(silences[len(silences) * 99 // 100] * 1000, 1),
            "silence_longest_ms": round(silences[-1] * 1000, 1),
        },
        "health_longest_ms": round(max(seen.health_s) * 1000, 1),
        "statuses": dict(sorted(seen.statuses.items())),
        "ends": dict(sorted(seen.ends.items())),
        "samples": samples[:: max(1, len(samples) // 12)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        measured = asyncio.run(
            load(port, psutil.Process(child.pid), given.seconds, given.connections)
        )
        assert child.stdin is not None
        child.stdin.close()
        child.wait(10)
    here = machine()
    record = {
        **{name: here[name] for name in ("cpu", "cores", "commit", "date")},
        "command": f"python bench/endpoint_load.py --seconds {given.seconds:g}"
        f" --connections {given.connections}",
        "what": "the endpoint over an engine that plays answers; clients on loopback, same computer",
        "measured": measured,
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
