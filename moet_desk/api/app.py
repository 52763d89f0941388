"""The endpoint's routes: chat completions, models, health. READ FIRST in this package.

Owns which address does what; `guard` decides who may call, `schemas` what may be sent, `chat` how
an answer looks on the wire. Sees the engine through its handle only. Runs in the endpoint's loop;
the one thing done elsewhere is `submit`, because encoding a long prompt takes longer than a stream
may pause.
"""

from __future__ import annotations

import time

import msgspec
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from moet_desk import __version__
from moet_desk.api.chat import ChatStream, as_moet_error, envelope, whole_answer
from moet_desk.api.guard import EndpointOptions, Guard, error_response
from moet_desk.api.schemas import model_body, read_chat, to_generate
from moet_desk.engine.handle import EngineHandle, ModelInfo
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import EngineState
from moet_desk.units import show_memory

_CLIENT_GONE = 499  # nobody reads it; the log does


def build_app(engine: EngineHandle, options: EndpointOptions) -> ASGIApp:
    """Make the ASGI application that serves `engine`."""
    routes = _Routes(engine, options)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/models", routes.list_models),
            Route("/v1/models/{name:path}", routes.show_model),
            Route("/health", routes.health),
        ],
        exception_handlers={
            MoetError: _moet_error,
            HTTPException: _http_error,
            Exception: _bug,
        },
    )
    if not options.cors:
        return Guard(app, options)
    pages = CORSMiddleware(
        app,
        allow_origins=options.cors,
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type"),
    )
    return Guard(pages, options)


class _Routes:
    """Handlers of one endpoint. All state is the engine's."""

    def __init__(self, engine: EngineHandle, options: EndpointOptions) -> None:
        self._engine = engine
        self._options = options
        self._started = int(time.time())

    async def chat_completions(self, http: Request) -> Response | ChatStream:
        try:
            body = await self._read_body(http)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        request = read_chat(body)
        model = self._model(request.model)
        client = f"{http.client.host if http.client else '?'} {http.headers.get('user-agent', '')}"
        generate = to_generate(request, model, client=client.strip())
        stream = await run_sync(self._engine.submit, generate)
        shared = envelope(model, __version__)
        if request.stream:
            keep_alive_s = self._options.keep_alive_s
            return ChatStream(request, stream, shared=shared, keep_alive_s=keep_alive_s)
        answer = await whole_answer(request, stream, receive=http.receive, shared=shared)
        if answer is None:
            return Response(status_code=_CLIENT_GONE)
        return _json(answer)

    async def list_models(self, http: Request) -> Response:
        model = self._engine.model()
        data = [] if model is None else [model_body(model, created=self._started)]
        return _json({"object": "list", "data": data})

    async def show_model(self, http: Request) -> Response:
        model = self._model(http.path_params["name"])
        return _json(model_body(model, created=self._started))

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

    def _model(self, name: str | None) -> ModelInfo:
        """The loaded model; a request may leave its name out."""
        model = self._engine.model()
        if model is None:
            now = self._engine.snapshot()
            if now.error is not None:
                raise fail("MD-ENG-03", reason=now.error.get("title", "?"), log="moet-desk.log")
            loading = now.state is EngineState.LOADING
            raise fail("MD-ENG-07", why=" yet: it is loading" if loading else "")
        if name and name != model.name:
            raise fail("MD-API-02", model=name, offered=model.name, parameter="model")
        return model

    async def _read_body(self, http: Request) -> bytes:
        """The request's body.

        Raises:
            MoetError: MD-API-08, it is larger than allowed.
            ClientDisconnect: the client hung up before its end.
        """
        limit = self._options.max_body_bytes
        body = bytearray()
        async for piece in http.stream():
            body += piece
            if len(body) > limit:
                raise fail("MD-API-08", limit=show_memory(limit))
        return bytes(body)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _moet_error(http: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, MoetError):
        raise error
    return error_response(error)


async def _http_error(http: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 404
    address = f"{http.method} {http.url.path}"
    return error_response(fail("MD-API-10", address=address), status=status)


async def _bug(http: Request, error: Exception) -> JSONResponse:
    """A client never sees a traceback; the guard logs it."""
    return error_response(as_moet_error(error))
