"""The endpoint's routes. READ FIRST in this package.

Owns which address does what. `guard` decides who may call; `schemas`, `completions`, `messages` and
`responses` say what may be sent in each protocol, and all make the same request of the engine;
`relay` runs the answers, and a writer of each protocol says how they look. Sees the engine through
its handle only. Runs in the endpoint's loop; what takes longer than a stream may pause (encoding a
long prompt, the file of responses) is done in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from moet_desk import __version__
from moet_desk.api import messages, responses, tokens
from moet_desk.api.bodies import model_body, models_body
from moet_desk.api.calls import Calls, call_of
from moet_desk.api.chat import ChatDeltas, ChatWriter, Envelope, envelope
from moet_desk.api.completions import (
    CompletionRequest,
    CompletionWriter,
    Echo,
    PlainDeltas,
    completion_requests,
    read_completion,
)
from moet_desk.api.guard import EndpointOptions, Guard, error_response
from moet_desk.api.messages_wire import MessagesWriter
from moet_desk.api.metrics import CONTENT_TYPE, metrics_text
from moet_desk.api.relay import Answer, Deltas, Relay, Writer, as_moet_error, whole
from moet_desk.api.responses_wire import ResponsesWriter
from moet_desk.api.schemas import ChatRequest, each_answer, read_chat, to_generate
from moet_desk.engine.handle import EngineHandle, GenerateRequest, ModelInfo, RequestStream
from moet_desk.engine.reloading import Reloadable
from moet_desk.errors import MoetError, fail, from_record
from moet_desk.store.responses import Kept, ResponseStore
from moet_desk.telemetry import EngineState
from moet_desk.units import show_memory

_T = TypeVar("_T")

# Each thread that wants the interpreter may hold up the loop by its switch interval (5 ms).
_WORKERS = 3
_CLIENT_GONE = 499  # nobody reads it; the log does


def build_app(
    engine: EngineHandle, options: EndpointOptions, kept: ResponseStore, calls: Calls
) -> ASGIApp:
    """Make the ASGI application that serves `engine`, with the responses that were kept; who calls
    it is noted in `calls`.
    """
    routes = _Routes(engine, options, kept)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/messages", routes.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/v1/responses/{id}", routes.kept_response, methods=["GET", "DELETE"]),
            Route("/v1/models", routes.list_models),
            Route("/v1/models/{name:path}/load", routes.load_model, methods=["POST"]),
            Route("/v1/models/{name:path}/unload", routes.unload_model, methods=["POST"]),
            Route("/v1/models/{name:path}", routes.show_model),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/metrics", routes.metrics),
            Route("/health", routes.health),
        ],
        exception_handlers={
            MoetError: _moet_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _bug,
        },
    )
    if not options.cors:
        return Guard(app, options, calls)
    pages = CORSMiddleware(
        app,
        allow_origins=options.cors,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("authorization", "content-type", "x-api-key", "anthropic-version"),
    )
    return Guard(pages, options, calls)


class _Routes:
    """Handlers of one endpoint. All state is the engine's, but for responses that are kept."""

    def __init__(self, engine: EngineHandle, options: EndpointOptions, kept: ResponseStore) -> None:
        self._engine = engine
        self._options = options
        self._started = int(time.time())
        self._kept = kept
        self._workers = CapacityLimiter(_WORKERS)

    # -- answers -----------------------------------------------------------------------------

    async def chat_completions(self, http: Request) -> Response | Relay:
        request = read_chat(await self._read_body(http))
        model = self._model(request.model)
        generate = to_generate(request, model, client=_client(http))
        writer = ChatWriter(request, _envelope(model, request.model, "chatcmpl"))
        make = partial(_chat_deltas, request)
        return await self._answer(
            http, each_answer(generate, request.n), make, writer, stream=request.stream
        )

    async def completions(self, http: Request) -> Response | Relay:
        request = read_completion(await self._read_body(http))
        model = self._model(request.model)
        generate = completion_requests(request, model, client=_client(http))
        echoes = await self._in_thread(self._echoes, request, generate) if request.echo else []
        writer = CompletionWriter(request, _envelope(model, request.model, "cmpl"), echoes)
        return await self._answer(
            http, generate, lambda _: PlainDeltas(), writer, stream=request.stream
        )

    async def messages(self, http: Request) -> Response | Relay:
        body = await self._read_body(http)
        model = self._model(messages.model_of(body))
        request = messages.read_messages(body, model)
        generate = to_generate(request, model, client=_client(http))
        writer = MessagesWriter(request.model or model.name)
        make = partial(_chat_deltas, request)
        return await self._answer(http, [generate], make, writer, stream=request.stream)

    async def count_tokens(self, http: Request) -> Response:
        body = await self._read_body(http)
        model = self._model(messages.model_of(body))
        request = messages.read_count(body, model)
        generate = to_generate(request, model, client=_client(http))
        return _json({"input_tokens": await self._in_thread(self._engine.count_tokens, generate)})

    async def responses(self, http: Request) -> Response | Relay:
        request = responses.read_responses(await self._read_body(http))
        model = self._model(request.model)
        before = await self._conversation_of(request.previous_response_id)
        said = responses.conversation(request, before)
        chat = responses.to_chat(request, said)
        generate = to_generate(chat, model, client=_client(http))

        def keep(body: dict[str, Any], message: dict[str, Any]) -> None:
            if request.is_kept:
                self._kept.put(writer.id, Kept([*said, message], body))

        writer = ResponsesWriter(request, request.model or model.name, keep=keep)
        make = partial(_chat_deltas, chat)
        return await self._answer(http, [generate], make, writer, stream=request.stream)

    async def kept_response(self, http: Request) -> Response:
        name = http.path_params["id"]
        if http.method == "DELETE":
            if not await self._in_thread(self._kept.delete, name):
                raise fail("MD-API-11", response=name)
            return _json({"id": name, "object": "response", "deleted": True})
        kept = await self._in_thread(self._kept.get, name)
        if kept is None:
            raise fail("MD-API-11", response=name)
        return _json(kept.body)

    # -- tokens ------------------------------------------------------------------------------

    async def tokenize(self, http: Request) -> Response:
        request = tokens.read_tokenize(await self._read_body(http))
        model = self._model(request.model)
        ids = await self._in_thread(self._engine.encode, tokens.as_generate(request))
        return _json(tokens.tokenize_body(ids, model))

    async def detokenize(self, http: Request) -> Response:
        request = tokens.read_detokenize(await self._read_body(http))
        self._model(request.model)
        return _json({"prompt": await self._in_thread(self._engine.decode, request.tokens)})

    # -- what is here ------------------------------------------------------------------------

    async def list_models(self, http: Request) -> Response:
        model = self._engine.model()
        names = [] if model is None else [model.name, *self._options.aliases]
        return _json(models_body(model, names, created=self._started))

    async def show_model(self, http: Request) -> Response:
        name = http.path_params["name"]
        return _json(model_body(self._model(name), name, created=self._started))

    async def load_model(self, http: Request) -> Response:
        engine = self._reloadable(http)
        await self._in_thread(engine.load)
        return self._state(http)

    async def unload_model(self, http: Request) -> Response:
        engine = self._reloadable(http)
        await self._in_thread(engine.unload)
        return self._state(http)

    async def metrics(self, http: Request) -> Response:
        text = metrics_text(self._engine.snapshot())
        return Response(text, media_type=CONTENT_TYPE)

    async def health(self, http: Request) -> Response:
        now = self._engine.snapshot()
        ready = now.state in (EngineState.READY, EngineState.READING, EngineState.WRITING)
        body = {
            "status": "ok" if ready else "unavailable",
            "state": now.state.value,
            "model": now.model or None,
            "requests_running": now.requests_running,
            "requests_waiting": now.requests_waiting,
            "version": __version__,
        }
        return _json(body, status=200 if ready else 503)

    # -- inside ------------------------------------------------------------------------------

    async def _answer(
        self,
        http: Request,
        requests: Sequence[GenerateRequest],
        make_deltas: Callable[[RequestStream], Deltas],
        writer: Writer,
        *,
        stream: bool | None,
    ) -> Response | Relay:
        """Have the engine answer, and hand what it says to the writer."""
        streams = await self._in_thread(self._submit_all, requests)
        call = call_of(http.scope)
        call.answered_by(streams, model=self._engine.snapshot().model, streamed=bool(stream))
        answers = [
            Answer(i, make_deltas(s), s.prompt_tokens, call.note) for i, s in enumerate(streams)
        ]
        if stream:
            return Relay(streams, answers, writer, keep_alive_s=self._options.keep_alive_s)
        body = await whole(streams, answers, writer, http.receive)
        return Response(status_code=_CLIENT_GONE) if body is None else _json(body)

    async def _in_thread(self, work: Callable[..., _T], *given: Any) -> _T:
        return await run_sync(work, *given, limiter=self._workers)

    def _submit_all(self, requests: Sequence[GenerateRequest]) -> list[RequestStream]:
        """All of them, or none if one is refused."""
        streams: list[RequestStream] = []
        try:
            streams.extend(self._engine.submit(request) for request in requests)
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def _echoes(
        self, request: CompletionRequest, requests: Sequence[GenerateRequest]
    ) -> list[Echo]:
        echoes = []
        for one in requests:
            ids = self._engine.encode(one) if request.wants_prompt_logprobs else one.prompt_ids
            text = self._engine.decode(ids or ()) if one.prompt is None else one.prompt
            echoes.append(Echo(text, self._engine.decode(ids[:1]) if ids else ""))
        return echoes

    async def _conversation_of(self, response_id: str | None) -> Sequence[Mapping[str, Any]]:
        if response_id is None:
            return ()
        kept = await self._in_thread(self._kept.get, response_id)
        if kept is None:
            raise fail("MD-API-11", response=response_id, parameter="previous_response_id")
        return kept.messages

    def _reloadable(self, http: Request) -> Reloadable:
        """The engine, if it can put its model away and this is the model's name."""
        engine, name = self._engine, http.path_params["name"]
        if not isinstance(engine, Reloadable):
            raise fail("MD-API-10", address=f"{http.method} {http.url.path}")
        offered = [engine.name, *self._options.aliases]
        if name not in offered:
            raise fail("MD-API-02", model=name, offered=", ".join(offered), parameter="model")
        return engine

    def _state(self, http: Request) -> Response:
        state = self._engine.snapshot().state.value
        return _json({"id": http.path_params["name"], "object": "model", "state": state})

    def _model(self, name: str | None) -> ModelInfo:
        """The loaded model; a request may leave its name out."""
        model = self._engine.model()
        if model is None:
            now = self._engine.snapshot()
            if now.error is not None:
                unnamed = fail("MD-ENG-03", reason="It gave no reason", log="moet-desk.log")
                raise from_record(now.error) or unnamed
            loading = now.state is EngineState.LOADING
            raise fail("MD-ENG-07", why=" yet: it is loading" if loading else "")
        if name and name != model.name and name not in self._options.aliases:
            offered = ", ".join([model.name, *self._options.aliases])
            raise fail("MD-API-02", model=name, offered=offered, parameter="model")
        return model

    async def _read_body(self, http: Request) -> bytes:
        """The request's body.

        Raises:
            MoetError: MD-API-08, it is larger than allowed; MD-API-05, it does not come.
            ClientDisconnect: the client hung up before its end.
        """
        limit, wait_s = self._options.max_body_bytes, self._options.body_timeout_s
        body = bytearray()
        try:
            async with asyncio.timeout(wait_s):
                async for piece in http.stream():
                    body += piece
                    if len(body) > limit:
                        raise fail("MD-API-08", limit=show_memory(limit))
        except TimeoutError as error:
            raise fail("MD-API-05", reason=f"The body did not come within {wait_s:g} s") from error
        return bytes(body)


def _envelope(model: ModelInfo, name: str | None, prefix: str) -> Envelope:
    return envelope(model, __version__, name=name, prefix=prefix)


def _chat_deltas(request: ChatRequest, stream: RequestStream) -> ChatDeltas:
    return ChatDeltas(request, stream)


def _client(http: Request) -> str:
    """Who asks, for the log."""
    host = http.client.host if http.client else "?"
    return f"{host} {http.headers.get('user-agent', '')}".strip()


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _moet_error(http: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, MoetError):
        raise error
    call_of(http.scope).failed(error)
    return error_response(error, http.url.path)


async def _http_error(http: Request, error: Exception) -> JSONResponse:
    status, headers = 404, None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers  # a 405 says what is allowed
    problem = fail("MD-API-10", address=f"{http.method} {http.url.path}")
    call_of(http.scope).failed(problem)
    return error_response(problem, http.url.path, status, headers)


async def _client_gone(http: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _bug(http: Request, error: Exception) -> JSONResponse:
    """A client never sees a traceback; the guard logs it."""
    return error_response(as_moet_error(error), http.url.path)
