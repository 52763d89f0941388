"""The engine's interface over another server: our own endpoint, and servers that misbehave."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine import remote_wire
from moet_desk.engine.handle import (
    GenerateRequest,
    Grammar,
    GrammarKind,
    Quality,
    RequestStream,
    Sampling,
)
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat, PromptEnd
from moet_desk.engine.remote import RemoteEngine, choose, connect
from moet_desk.engine.remote_text import WRITTEN, Writer
from moet_desk.engine.remote_wire import ServedModel, Server, chat_body, read_address
from moet_desk.errors import MoetError
from moet_desk.marked_text import MarkedText
from moet_desk.telemetry import EngineState, Failed, Finished, FinishReason, TextDelta
from moet_desk.ui.thinking import Splitter
from tests.api.fakes import FakeEngine, Pause, eventually

KEY = "sk-topsecret"
HELLO = GenerateRequest(messages=[{"role": "user", "content": "Hi"}])
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def ours() -> Iterator[tuple[FakeEngine, Server]]:
    engine = FakeEngine()
    endpoint = Endpoint(engine, EndpointOptions(port=0, key=KEY, aliases=("other-name",)))
    endpoint.start()
    yield engine, replace(read_address(endpoint.address), key=KEY)
    endpoint.stop()


@pytest.fixture
def fake(ours: tuple[FakeEngine, Server]) -> FakeEngine:
    ours[0].reset()
    return ours[0]


@pytest.fixture
def remote(ours: tuple[FakeEngine, Server], fake: FakeEngine) -> Iterator[RemoteEngine]:
    handle = connect(ours[1])
    yield handle
    handle.close()


def read(stream: RequestStream) -> tuple[str, Finished | Failed]:
    events = list(stream)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    last = events[-1]
    assert isinstance(last, Finished | Failed)
    return text, last


def told(stream: RequestStream, text: str) -> tuple[str, str]:
    """Reasoning and answer, as the chat tells them apart."""
    splitter = Splitter(stream)
    parts = [splitter.feed(MarkedText(text)), splitter.finish()]
    return "".join(part for part, _ in parts), "".join(part.text for _, part in parts)


def code_of(last: Finished | Failed) -> str:
    assert isinstance(last, Failed)
    assert isinstance(last.error, MoetError)
    return last.error.code


# -- our own endpoint ------------------------------------------------------------------------


def test_answer__text_counts_and_what_was_asked(remote: RemoteEngine, fake: FakeEngine) -> None:
    wished = Sampling(temperature=0.25, seed=7)
    request = replace(
        HELLO, sampling=wished, quality=Quality.BALANCED, gate=0.5, max_tokens=9, stop=("x",)
    )
    text, last = read(remote.submit(request))
    assert text == "Hello"
    assert isinstance(last, Finished)
    assert (last.reason, last.quality) == (FinishReason.STOP, "balanced")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (7, 2)
    asked = fake.requests[0]
    assert (asked.sampling.temperature, asked.sampling.seed) == (0.25, 7)
    assert (asked.quality, asked.gate, asked.max_tokens) == (Quality.BALANCED, 0.5, 9)
    assert asked.stop == ("x",)
    info, snapshot = remote.model(), remote.snapshot()
    assert info is not None
    assert (info.name, info.context, info.has_qualities) == ("fake", 2048, True)
    assert snapshot.state is EngineState.READY
    assert snapshot.remote.startswith("http://127.0.0.1:")


def test_answer__cut_at_the_limit__says_so(remote: RemoteEngine, fake: FakeEngine) -> None:
    fake.answer("Hel", reason=FinishReason.LENGTH)
    _, last = read(remote.submit(HELLO))
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.LENGTH


def test_reasoning_and_calls__told_apart_by_who_reads(
    remote: RemoteEngine, fake: FakeEngine
) -> None:
    fake.answers = AnswerFormat(CallFormat.HERMES, THINK)
    fake.prompt_end = PromptEnd.REASONING
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    fake.answer("Let me\nsee", "</think>\n\n", "Four.", call)
    stream = remote.submit(replace(HELLO, tools=[TOOL]))
    text, _ = read(stream)
    assert text == '<think>Let me\nsee</think>Four.\n\n```call\nadd {"a": 1}\n```'
    thought, answer = told(stream, text)
    assert (thought, answer.partition("\n")[0]) == ("Let me\nsee", "Four.")


def test_stop__ends_at_once_here_and_there(remote: RemoteEngine, fake: FakeEngine) -> None:
    fake.script = [TextDelta("Once "), Pause(60), TextDelta("never")]
    stream = remote.submit(HELLO)
    assert stream.wait(5)
    assert remote.snapshot().state is EngineState.WRITING
    stream.cancel()
    text, last = read(stream)
    assert (text, isinstance(last, Finished) and last.reason) == ("Once ", FinishReason.CANCELLED)
    assert eventually(lambda: fake.busy == 0, 5)
    assert remote.snapshot().state is EngineState.READY


def test_stop__before_the_first_word(remote: RemoteEngine, fake: FakeEngine) -> None:
    fake.script = [Pause(60)]
    stream = remote.submit(HELLO)
    assert eventually(lambda: fake.busy == 1, 5)
    assert remote.snapshot().state is EngineState.READING
    stream.cancel()
    _, last = read(stream)
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED


def test_close__cuts_what_runs_and_takes_no_more(remote: RemoteEngine, fake: FakeEngine) -> None:
    fake.script = [TextDelta("a"), Pause(60)]
    stream = remote.submit(HELLO)
    remote.close()
    assert isinstance(read(stream)[1], Finished)
    with pytest.raises(MoetError, match="MD-ENG-07"):
        remote.submit(HELLO)


def test_busy__more_than_four_at_a_time_are_refused(remote: RemoteEngine, fake: FakeEngine) -> None:
    fake.script = [Pause(60)]
    streams = [remote.submit(HELLO) for _ in range(4)]
    with pytest.raises(MoetError, match="MD-ENG-06"):
        remote.submit(HELLO)
    for stream in streams:
        stream.cancel()
        read(stream)
    fake.answer("ok")
    assert read(remote.submit(HELLO))[0] == "ok"


def test_key__wrong_or_missing__the_error_says_what_to_do_and_not_the_key(
    ours: tuple[FakeEngine, Server],
) -> None:
    for key in ("", "sk-wrong"):
        with pytest.raises(MoetError, match="MD-CONN-02") as refused:
            connect(replace(ours[1], key=key))
        assert "--ask-key" in refused.value.do
        assert "sk-wrong" not in json.dumps(refused.value.to_dict())
    assert KEY not in repr(ours[1])


def test_model__wished_name_or_an_error_with_those_there_are(
    ours: tuple[FakeEngine, Server],
) -> None:
    info = connect(ours[1], "other-name").model()
    assert info is not None
    assert info.name == "other-name"
    with pytest.raises(MoetError, match=r"MD-CONN-06.*fake, other-name"):
        connect(ours[1], "nothing")


def test_choose__the_only_base_model__else_it_must_be_named() -> None:
    server = read_address("http://desk:8000")
    base, adapter = ServedModel("base"), ServedModel("lora", is_base=False)
    assert choose(server, [adapter, base], None) is base
    assert choose(server, [base, adapter], "lora") is adapter
    ours = ServedModel("ours", is_ours=True)
    assert choose(server, [ours, replace(ours, id="its alias")], None) is ours
    for offered in ([base, ServedModel("second")], [ours, base], []):
        with pytest.raises(MoetError, match="MD-CONN-06"):
            choose(server, offered, None)


# -- servers that misbehave ------------------------------------------------------------------


def receive(connection: socket.socket) -> bytes:
    """A whole request: closing with a part unread would reset the connection."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length is not None and len(body) < int(length[1]):
        body += connection.recv(65536)
    return head


@contextmanager
def server_that(*answers: Callable[[socket.socket, bytes], None]) -> Iterator[Server]:
    """Each connection in turn gets what its function writes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked: list[bytes] = []

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    asked.append(receive(connection))
                    answer(connection, asked[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield read_address(f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1/")
        thread.join(5)
        assert not thread.is_alive()
        assert all(b" /api/v1/" in head for head in asked)


def says(status: str, body: str, kind: str = "application/json") -> Callable[..., None]:
    def answer(connection: socket.socket, _head: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        connection.sendall((head + body).encode())

    return answer


def streams(*events: str) -> Callable[..., None]:
    return says("200 OK", "".join(f"{event}\n\n" for event in events), "text/event-stream")


def delta(**fields: object) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]})


END = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'
LISTED = says("200 OK", json.dumps({"data": [{"id": "m\x1b[2J", "max_model_len": 4096}]}))


def ask(answer: Callable[..., None]) -> tuple[str, Finished | Failed]:
    with server_that(LISTED, answer) as server:
        return read(connect(server).submit(HELLO))


def test_stream__of_another_kind__is_read_too() -> None:
    text, last = ask(
        streams(
            ": a comment", "event: x", delta(role="assistant", content=None),
            delta(reasoning="why"), delta(content="Because"), delta(content="."), END,
            'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}',
            "data: [DONE]", delta(content="never read"),
        )
    )  # fmt: skip
    assert text == "<think>why</think>Because."
    assert isinstance(last, Finished)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 5)
    assert last.quality == ""


def test_stream__without_counts__pieces_count() -> None:
    _, last = ask(streams(delta(content="a"), delta(content="b"), END))
    assert isinstance(last, Finished)
    assert last.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (streams(delta(content="half")), "MD-CONN-01", "cut in the middle"),
        (streams("data: {no json"), "MD-CONN-03", "no JSON"),
        (streams("data: []"), "MD-CONN-03", "no object"),
        (streams("data: " + "x" * 4_300_000), "MD-CONN-03", "too long"),
        (says("200 OK", "<html>", "text/html"), "MD-CONN-03", "text/html"),
        (streams('data: {"error": {"message": "out of memory"}}'), "MD-CONN-04", "out of memory"),
        (says("429 No", '{"error": "slow down"}'), "MD-CONN-04", "slow down"),
        (says("403 No", "{}"), "MD-CONN-02", "403"),
        (says("502 No", "<html>proxy</html>", "text/html"), "MD-CONN-04", "no reason"),
        (says("302 Away", ""), "MD-CONN-04", "302"),
        (
            says("400 No", '{"error": {"message": "m", "code": "context_length_exceeded"}}'),
            "MD-CONN-05",
            "m",
        ),
        (lambda connection, head: None, "MD-CONN-01", "connection"),
    ],
)
def test_failures__end_the_stream_with_the_right_error(
    answer: Callable[..., None], code: str, words: str
) -> None:
    _, last = ask(answer)
    assert code_of(last) == code
    assert isinstance(last, Failed)
    assert words in str(last.error)


def begins(connection: socket.socket) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    connection.sendall(f"{head}{delta(content='half')}\n\n".encode())


def test_connection__reset_in_an_answer__text_so_far_and_an_error() -> None:
    may_reset = threading.Event()

    def reset(connection: socket.socket, _head: bytes) -> None:
        begins(connection)
        may_reset.wait(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with server_that(LISTED, reset) as server:
        stream = connect(server).submit(HELLO)
        assert stream.wait(10)
        may_reset.set()
        text, last = read(stream)
    assert text == "half"
    assert code_of(last) == "MD-CONN-01"


def test_server__silent_in_an_answer__text_so_far_and_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_wire, "_SILENCE_S", 0.2)
    heard = threading.Event()

    def silent(connection: socket.socket, _head: bytes) -> None:
        begins(connection)
        heard.wait(10)

    with server_that(LISTED, silent) as server:
        text, last = read(connect(server).submit(HELLO))
        heard.set()
    assert text == "half"
    assert code_of(last) == "MD-CONN-01"


def test_refusal__a_server_that_repeats_the_key__it_is_not_shown() -> None:
    with server_that(says("401 No", '{"error": {"message": "bad key sk-topsecret!"}}')) as server:
        with pytest.raises(MoetError, match="MD-CONN-02") as refused:
            connect(replace(server, key=KEY))
        assert KEY not in json.dumps(refused.value.to_dict())
        assert "bad key •••!" in str(refused.value)


def test_name_of_a_model__cannot_steer_the_terminal() -> None:
    with server_that(LISTED) as server:
        assert connect(server).snapshot().model == "m[2J"


def test_no_list__a_named_model_is_believed() -> None:
    with server_that(says("404 No", "{}"), says("404 No", "{}")) as server:
        info = connect(server, "m").model()
        assert info is not None
        assert (info.name, info.context, info.has_qualities) == ("m", 0, False)
        with pytest.raises(MoetError, match="MD-CONN-04"):
            connect(server)


def test_nobody_there__says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(MoetError, match=r"MD-CONN-01.*refused"):
        connect(read_address(f"http://127.0.0.1:{port}"))


# -- pure parts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "origin"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://Host.example/", "https://host.example/v1", "https://host.example"),
        ("https://h:443/openai/v1/", "https://h/openai/v1", "https://h"),
        ("http://[::1]:80", "http://[::1]/v1", "http://[::1]"),
    ],
)
def test_read_address(text: str, address: str, origin: str) -> None:
    server = read_address(text)
    assert (server.address, server.origin) == (address, origin)


@pytest.mark.parametrize(
    "text",
    [
        "h:80",
        "ftp://h",
        "http://",
        "http://u:p@h",
        "http://h?x=1",
        "http://h:99999",
        "http://h/a b",
    ],
)
def test_read_address__refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_address(text)


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompt="raw"),
        replace(HELLO, top_logprobs=0),
        replace(HELLO, grammar=Grammar(GrammarKind.REGEX, "a")),
        replace(HELLO, must_call=("add",)),
        replace(HELLO, thinking_budget=5),
        replace(HELLO, template={"x": 1}),
        replace(HELLO, ignore_eos=True),
    ],
)
def test_chat_body__what_servers_may_not_know__is_refused(request_: GenerateRequest) -> None:
    with pytest.raises(MoetError, match="MD-API-04"):
        chat_body(request_, ServedModel("m"))


def test_chat_body__other_servers_get_only_what_was_asked() -> None:
    assert json.loads(chat_body(replace(HELLO, quality=Quality.EXACT), ServedModel("m"))) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


words = st.text(alphabet="ab >\n<", min_size=1, max_size=8)


@given(st.lists(words, max_size=4), st.lists(words, max_size=4))
def test_writer__read_as_a_model_s_own_text__gives_both_parts_back(
    reasons: list[str], answer: list[str]
) -> None:
    writer, stream = Writer(), RequestStream("r", lambda _: None)
    stream.answers = WRITTEN
    text = "".join([*map(writer.reasoning, reasons), *map(writer.content, answer)])
    thought, said = told(stream, text)
    assert thought == "".join(reasons).strip()
    assert said == ("".join(answer).lstrip() if reasons else "".join(answer))


def test_call__with_backticks__stays_in_its_block() -> None:
    writer = Writer()
    writer.call(1, "second", "{}")
    writer.call(0, "run", '{"text": ')
    writer.call(0, "", '"````"}')
    assert writer.end() == '`````call\nrun {"text": "````"}\n`````\n\n```call\nsecond {}\n```'
    assert writer.end() == ""
