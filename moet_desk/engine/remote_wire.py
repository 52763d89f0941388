"""HTTP and OpenAI's chat protocol from the client's side: a connection per request, events by line.

Owns what is sent and what counts as an answer, and turns every failure into a catalogue error with
the server's words but without the key. Redirects are not followed, so a key reaches the named host
only. Any thread; a `Reply` belongs to the thread that opened it, but for `cut`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from moet_desk import __version__
from moet_desk.engine.handle import GenerateRequest
from moet_desk.errors import MoetError, fail

_CONNECT_S = 10.0
_SILENCE_S = 600.0  # servers without keep-alives read long prompts in silence
_LINE_BYTES = 4 * 2**20
_BODY_BYTES = 4 * 2**20
_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Server:
    """Where an OpenAI-compatible server is. `key` is in no representation of this."""

    scheme: str  # http | https
    host: str
    port: int
    path: str  # "/v1"
    key: str = field(default="", repr=False)

    @property
    def origin(self) -> str:
        """The part of the address that a key belongs to."""
        usual = {"http": 80, "https": 443}[self.scheme]
        port = "" if self.port == usual else f":{self.port}"
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}{port}"

    @property
    def address(self) -> str:
        """The base address, as clients take it."""
        return self.origin + self.path

    @property
    def name(self) -> str:
        """The host and port, for narrow places."""
        return self.origin.partition("://")[2]


def read_address(text: str) -> Server:
    """The server of a base address; "/v1" is added to one without a path.

    Raises:
        ValueError: it is no address of this kind; the words say why.
    """
    parts = urlsplit(text.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and name a host")
    if parts.username or parts.password:
        raise ValueError("a key does not belong into the address; use --ask-key")
    if parts.query or parts.fragment:
        raise ValueError("it must end with its path")
    path = parts.path.rstrip("/")
    if not all(char.isascii() and char.isprintable() and char != " " for char in path):
        raise ValueError("its path has characters that must be escaped")
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return Server(parts.scheme, parts.hostname, port, path or "/v1")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server offers. `context` 0: it does not say."""

    id: str
    context: int = 0
    is_ours: bool = False  # served by moet-desk
    is_base: bool = True  # no adapter of another


class Reply:
    """An open answer. `cut` may be called from any thread and ends a read that waits."""

    def __init__(self, server: Server, method: str, path: str, body: bytes | None) -> None:
        self._server = server
        self._connection = _connection(server)
        self._response: http.client.HTTPResponse | None = None
        headers = {"User-Agent": f"moet-desk/{__version__}", "Accept": "application/json"}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if server.key:
            headers["Authorization"] = f"Bearer {server.key}"
        try:
            with failures_of(server):
                self._connection.connect()
                self._socket: socket.socket = self._connection.sock
                self._socket.settimeout(_SILENCE_S)
                self._connection.request(method, server.path + path, body, headers)
        except BaseException:
            self._connection.close()
            raise

    def start(self) -> None:
        """Wait for the head of the answer.

        Raises:
            MoetError: MD-CONN-01, 02, 04 or 05.
        """
        with failures_of(self._server):
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                body = self._response.read(_BODY_BYTES)
                raise refusal(self._server, self._response.status, body)

    def document(self) -> Any:
        """The answer as JSON.

        Raises:
            MoetError: MD-CONN-01 or 03.
        """
        with failures_of(self._server):
            data = self._opened().read(_BODY_BYTES)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.unusable("it is no JSON") from error

    def events(self) -> Iterator[Mapping[str, Any]]:
        """The bodies of a stream's events, up to [DONE] or the end.

        Raises:
            MoetError: MD-CONN-01 or 03.
        """
        kind = self._opened().headers.get_content_type()
        if kind != "text/event-stream":
            raise self.unusable(f"it is {kind}, not a stream of events")
        while True:
            with failures_of(self._server):
                line = self._opened().readline(_LINE_BYTES)
            if not line:
                return
            if not line.endswith(b"\n") and len(line) == _LINE_BYTES:
                raise self.unusable("a line is too long")
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield self._event(data)

    def _event(self, data: bytes) -> Mapping[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.unusable("an event of its stream is no JSON") from error
        if not isinstance(event, dict):
            raise self.unusable("an event of its stream is no object")
        if event.get("error"):
            raise refusal(self._server, "with an error", data)
        return event

    def _opened(self) -> http.client.HTTPResponse:
        if self._response is None:
            raise RuntimeError("the answer was not started")
        return self._response

    def unusable(self, reason: str) -> MoetError:
        """MD-CONN-03 of this server."""
        return fail("MD-CONN-03", address=self._server.address, reason=reason)

    def cut(self) -> None:
        """End the connection below whoever reads from it."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own, which takes its state away from under the reader.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection back; by the thread that reads."""
        with contextlib.suppress(OSError):
            if self._response is not None:
                self._response.close()
            self._connection.close()


def _connection(server: Server) -> http.client.HTTPConnection:
    if server.scheme == "http":
        return http.client.HTTPConnection(server.host, server.port, timeout=_CONNECT_S)
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(
        server.host, server.port, timeout=_CONNECT_S, context=context
    )


@contextlib.contextmanager
def failures_of(server: Server) -> Iterator[None]:
    """Failures of a connection as catalogue errors."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise fail("MD-NET-03", host=server.name, reason=error.verify_message) from error
    except TimeoutError as error:
        reason = "no word came in time"
        raise fail("MD-CONN-01", address=server.address, reason=reason) from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise fail("MD-CONN-01", address=server.address, reason=reason) from error
    except (http.client.HTTPException, ValueError) as error:
        # ValueError: a response that was closed while it was read
        reason = f"the connection broke ({type(error).__name__})"
        raise fail("MD-CONN-01", address=server.address, reason=reason) from error


# -- what a server says ----------------------------------------------------------------------


def refusal(server: Server, status: int | str, body: bytes) -> MoetError:
    """The catalogue error of an answer that is a refusal, in the server's words."""
    words, code = _words(body)
    if server.key:
        words = words.replace(server.key, "•••")
    reason = words[:_REASON_CHARS].rstrip(". \n") or "it gave no reason"
    facts = {"address": server.address, "status": status, "reason": reason}
    if status in (401, 403):
        return fail("MD-CONN-02", **facts)
    too_long = code == "context_length_exceeded" or "maximum context length" in words
    return fail("MD-CONN-05" if too_long else "MD-CONN-04", **facts)


def _words(body: bytes) -> tuple[str, str]:
    """Message and code of an error body, of OpenAI's shape or others."""
    text = body.decode("utf-8", "replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""  # a page of a proxy says nothing to a person
    if not isinstance(document, dict):
        return "", ""
    inner = document.get("error", document)
    if isinstance(inner, str):
        return inner, ""
    if not isinstance(inner, dict):
        return "", ""
    words = next((inner[key] for key in ("message", "detail") if inner.get(key)), "")
    return words if isinstance(words, str) else json.dumps(words), str(inner.get("code") or "")


def served_models(document: Any) -> tuple[ServedModel, ...]:
    """The models of a /models answer; what cannot be read is left out."""
    data = document.get("data") if isinstance(document, dict) else None
    found = []
    for row in data if isinstance(data, list) else ():
        if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not row["id"]:
            continue
        context = row.get("max_model_len") or row.get("context_length")
        found.append(
            ServedModel(
                row["id"],
                context if isinstance(context, int) and context > 0 else 0,
                is_ours=row.get("owned_by") == "moet-desk",
                is_base=not row.get("parent"),
            )
        )
    return tuple(found)


# -- what is asked ---------------------------------------------------------------------------


def chat_body(request: GenerateRequest, model: ServedModel) -> bytes:
    """The body of POST /chat/completions. Quality and gate go to servers of ours only.

    Raises:
        MoetError: MD-API-04, a part of the request cannot be asked of another server.
    """
    if request.messages is None:
        reason = "another server is asked with messages"
        raise fail("MD-API-04", parameter="prompt", reason=reason)
    kept = {
        "logprobs": request.top_logprobs is not None or request.prompt_logprobs,
        "grammar": request.grammar is not None,
        "tool_choice": bool(request.must_call),
        "thinking_budget": request.thinking_budget is not None,
        "template": bool(request.template),
        "ignore_eos": request.ignore_eos,
    }
    for parameter, given in kept.items():
        if given:
            raise fail(
                "MD-API-04", parameter=parameter, reason="another server is not asked for it"
            )
    body: dict[str, Any] = {
        "model": model.id,
        "messages": [dict(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    wished = request.sampling
    optional: dict[str, Any] = {
        "temperature": wished.temperature,
        "top_p": wished.top_p,
        "top_k": wished.top_k,
        "min_p": wished.min_p,
        "presence_penalty": wished.presence_penalty or None,
        "frequency_penalty": wished.frequency_penalty or None,
        "repetition_penalty": None
        if wished.repetition_penalty == 1.0
        else wished.repetition_penalty,
        "seed": wished.seed,
        "logit_bias": {str(key): bias for key, bias in wished.logit_bias.items()} or None,
        "max_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "tools": list(request.tools) or None,
        "parallel_tool_calls": False if request.one_call else None,
    }
    if model.is_ours:
        optional |= {"quality": request.quality.value, "gate": request.gate}
    body |= {name: value for name, value in optional.items() if value is not None}
    return json.dumps(body).encode()
