"""What a hub, or what stands in its place, may answer instead of a listing."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moet_desk.errors import MoetError
from moet_desk.store.hub import Hub, Passing

SELF_SIGNED = Path(__file__).parents[1] / "data" / "nobody-trusts-this.pem"


@contextmanager
def answering(status: int, body: bytes, *, tls: bool = False) -> Iterator[str]:
    """A server that gives one answer to everything; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(SELF_SIGNED)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"{'https' if tls else 'http'}://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


def test_listing__an_answer_that_no_hub_gives__named_with_the_host() -> None:
    with answering(418, b"tea") as address, pytest.raises(MoetError) as caught:
        Hub(address).listing("nobody/nothing", None)
    assert caught.value.code == "MD-HUB-04"
    assert address.removeprefix("http://") in str(caught.value)
    assert "418" in str(caught.value)


def test_listing__without_files__named() -> None:
    body = b'{"id": "nobody/nothing", "sha": "0123", "siblings": []}'
    with answering(200, body) as address, pytest.raises(MoetError) as caught:
        Hub(address).listing("nobody/nothing", None)
    assert caught.value.code == "MD-HUB-04"
    assert "lists no files" in str(caught.value)


def test_listing__cut_short__tried_again_then_named() -> None:
    with answering(200, b"[1, 2]") as address, pytest.raises(Passing) as caught:
        Hub(address).listing("nobody/nothing", None)
    assert caught.value.error.code == "MD-HUB-04"


def test_listing__a_certificate_that_nobody_trusts__named_at_once() -> None:
    with answering(200, b"{}", tls=True) as address, pytest.raises(MoetError) as caught:
        Hub(address).listing("nobody/nothing", None)
    assert caught.value.code == "MD-NET-03"
    assert "certificate" in str(caught.value).lower()
