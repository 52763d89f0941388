"""Who may call: host names, web pages, the key; and the last catch for failures of a handler.

Owns the checks that come before any route. A browser can be made to call a server on this computer
(DNS rebinding, forms on foreign pages), so names that are not this computer's and foreign origins
are turned away even without a key. Runs in the endpoint's loop.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moet_desk.api.bodies import anthropic_error_body, error_body
from moet_desk.api.calls import Calls
from moet_desk.errors import MoetError, fail

log = logging.getLogger(__name__)

_OPEN_PATHS = ("/health",)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Where and for whom the endpoint listens.

    `port` 0 takes a free one. `hosts` are further names clients may use for this computer, `cors`
    the origins of web pages that may call it. Without a `key` only loopback addresses are served.
    `aliases` are further names of the loaded model. `responses` is the file of responses that can
    be gone on from; None keeps them in memory. `note` is a file that says where it listens while it
    does so.
    """

    host: str = "127.0.0.1"
    port: int = 11500
    key: str | None = None
    hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    responses: Path | None = None
    note: Path | None = None
    keep_alive_s: float = 10.0
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0

    @property
    def is_loopback(self) -> bool:
        """Whether only this computer can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this computer only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """The name in a Host header or origin's authority, without port, brackets and final dot."""
    try:
        return (urlsplit(f"//{header.strip()}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def is_served(host: str, options: EndpointOptions) -> bool:
    """Whether a client may call this computer by this name.

    Addresses are safe when we listen on the network: rebinding needs a name.
    """
    if not host:
        return False
    if is_loopback(host) or host in (options.host.lower(), *map(str.lower, options.hosts)):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not options.is_loopback


def check_caller(headers: Headers, options: EndpointOptions) -> None:
    """Let a request's host and web page through or refuse them.

    Raises:
        MoetError: MD-API-07 host name, MD-API-09 foreign web page.
    """
    host = headers.get("host", "")
    if not is_served(host_of(host), options):
        raise fail("MD-API-07", host=host, port=options.port)
    origin = headers.get("origin")
    if origin is None or origin in options.cors:
        return
    if not is_served(host_of(origin.partition("://")[2]), options):
        raise fail("MD-API-09", origin=origin)


def check_key(headers: Headers, options: EndpointOptions) -> None:
    """Want the server's key if it has one.

    Raises:
        MoetError: MD-API-06.
    """
    if options.key is None:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    hint = "Send the header Authorization: Bearer KEY (or x-api-key: KEY) with this server's key."
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")  # how Anthropic's clients send it
    if not given:
        raise fail("MD-API-06", reason="This server wants a key", hint=hint)
    # Header text is Latin-1; its bytes are what the client sent.
    if not hmac.compare_digest(given.strip().encode("latin-1"), options.key.encode()):
        raise fail("MD-API-06", reason="The key is not this server's", hint=hint)


_RETRY_AFTER_S = {"MD-ENG-06": 1, "MD-ENG-07": 5}  # full now; loading takes longer


def error_response(
    error: MoetError,
    path: str,
    status: int | None = None,
    more_headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error as HTTP response, in the words of the protocol that `path` belongs to."""
    headers = dict(more_headers or {})
    if error.spec.http == 401:
        headers["www-authenticate"] = "Bearer"
    if error.code in _RETRY_AFTER_S:
        headers["retry-after"] = str(_RETRY_AFTER_S[error.code])
    is_anthropic = path.startswith("/v1/messages")
    body = anthropic_error_body(error) if is_anthropic else error_body(error)
    return JSONResponse(body, status or error.spec.http, headers)


class Guard:
    """Checks every request before the routes see it, notes it in `calls`, and logs what broke
    behind it.
    """

    def __init__(self, app: ASGIApp, options: EndpointOptions, calls: Calls) -> None:
        self._app = app
        self._options = options
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        call = self._calls.begin(scope)

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            call.status = message.get("status", call.status)
            await send(message)

        try:
            headers = Headers(scope=scope)
            check_caller(headers, self._options)
            # Browsers ask with OPTIONS whether they may send the key; no route answers to it.
            if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
                check_key(headers, self._options)
            await self._app(scope, receive, send_noted)
        except MoetError as error:
            call.failed(error)
            await error_response(error, scope["path"])(scope, receive, send_noted)
        except Exception as error:
            call.failed(error)
            log.exception("request failed: %s %r", scope["method"], scope["path"])
            if not started:
                bug = fail("MD-BUG-01", reason=type(error).__name__, log="moet-desk.log")
                await error_response(bug, scope["path"])(scope, receive, send_noted)
        finally:
            call.end()
