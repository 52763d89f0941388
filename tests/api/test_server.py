from __future__ import annotations

import asyncio
import errno
import socket

import httpx
import pytest
from starlette.datastructures import Headers

from moet_desk.api.guard import EndpointOptions, check_key, host_of, is_served
from moet_desk.api.server import Endpoint
from moet_desk.errors import CATALOGUE, MoetError, fail
from moet_desk.telemetry import EngineState
from tests.api.fakes import FakeEngine


def test_start__port_in_use__names_the_next_free_one(
    engine: FakeEngine, endpoint: Endpoint
) -> None:
    taken = endpoint.options.port
    with pytest.raises(MoetError) as caught:
        Endpoint(engine, EndpointOptions(port=taken)).start()
    assert caught.value.code == "MD-API-01"
    second = Endpoint(engine, EndpointOptions(port=caught.value.facts["next_port"]))
    second.start()
    assert second.options.port > taken
    second.stop()


def test_accept__no_descriptors_left__goes_on_when_there_are(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, refused = socket.socket.accept, [0]

    def full(listener: socket.socket) -> object:
        if listener.getsockname()[1] == endpoint.options.port and refused[0] < 2:
            refused[0] += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.02)
    monkeypatch.setattr(socket.socket, "accept", full)
    assert httpx.get(f"{endpoint.address}/health", timeout=10).status_code == 200
    assert refused == [2]


def test_engine__did_not_load__its_own_error_and_status(
    engine: FakeEngine, endpoint: Endpoint
) -> None:
    engine.info, engine.state = None, EngineState.FAULT
    engine.fault = fail("MD-RAM-01", need="9 GiB", have="3 GiB")
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{endpoint.address}/v1/chat/completions", json=body)
    assert answer.status_code == CATALOGUE["MD-RAM-01"].http
    assert answer.json()["error"]["moet_code"] == "MD-RAM-01"
    assert "9 GiB" in answer.text


def test_stop__then_start__same_port_again(engine: FakeEngine) -> None:
    endpoint = Endpoint(engine, EndpointOptions(port=0))
    endpoint.start()
    address = endpoint.address
    endpoint.start()
    endpoint.stop()
    endpoint.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    endpoint.start()
    assert httpx.get(f"{address}/health").status_code == 200
    endpoint.stop()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_start__impossible_address__is_a_wrong_setting(engine: FakeEngine, host: str) -> None:
    with pytest.raises(MoetError) as caught:
        Endpoint(engine, EndpointOptions(host=host, port=0, key="k")).start()
    assert caught.value.code == "MD-CFG-03"


def test_start__network_address_without_key__refused(engine: FakeEngine) -> None:
    with pytest.raises(MoetError) as caught:
        Endpoint(engine, EndpointOptions(host="0.0.0.0", port=0)).start()
    assert caught.value.code == "MD-API-06"


def test_key__wrong_or_missing__401(engine: FakeEngine) -> None:
    endpoint = Endpoint(engine, EndpointOptions(host="0.0.0.0", port=0, key="s3cret"))
    endpoint.start()
    try:
        url = f"{endpoint.address}/v1/models"
        assert url.startswith("http://127.0.0.1:")
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic s3cret"}):
            refused = httpx.get(url, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(url, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(f"{endpoint.address}/health").status_code == 200
    finally:
        endpoint.stop()


@pytest.mark.parametrize("key", ["s3cret", "schlüssel ☂"])
def test_key__any_text__is_compared_by_its_bytes(key: str) -> None:
    options = EndpointOptions(key=key)
    for name, value in (("authorization", f"bearer  {key}"), ("x-api-key", key)):
        check_key(Headers(raw=[(name.encode(), value.encode())]), options)
        wrong = Headers(raw=[(name.encode(), value[:-1].encode())])
        with pytest.raises(MoetError, match="MD-API-06"):
            check_key(wrong, options)


def test_cors__allowed_page_only(engine: FakeEngine) -> None:
    page, other = "https://app.example", "https://evil.example"
    endpoint = Endpoint(engine, EndpointOptions(port=0, key="s3cret", cors=(page,)))
    endpoint.start()
    try:
        url = f"{endpoint.address}/v1/models"
        asked = {"Origin": page, "Access-Control-Request-Method": "GET"}
        preflight = httpx.options(url, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        headers = {"Origin": page, "Authorization": "Bearer s3cret"}
        answer = httpx.get(url, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
        assert httpx.get(url, headers={"Origin": page}).status_code == 401
        assert httpx.get(url, headers={**headers, "Origin": other}).status_code == 403
    finally:
        endpoint.stop()


def test_start__ipv6(engine: FakeEngine) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    endpoint = Endpoint(engine, EndpointOptions(host="::1", port=0))
    try:
        endpoint.start()
    except MoetError:
        pytest.skip("no IPv6 loopback here")
    try:
        assert endpoint.address.startswith("http://[::1]:")
        assert httpx.get(f"{endpoint.address}/health").status_code == 200
    finally:
        endpoint.stop()


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost", "localhost"),
        ("LOCALHOST:80", "localhost"),
        ("[::1]:80", "::1"),
        ("name.", "name"),
        ("", ""),
        ("[", ""),
        ("a@localhost", "localhost"),
    ],
)
def test_host_of(header: str, host: str) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize(
    ("listening", "hosts", "called", "served"),
    [
        ("127.0.0.1", (), "192.168.1.5", False),
        ("0.0.0.0", (), "192.168.1.5", True),
        ("0.0.0.0", (), "desk.lan", False),
        ("0.0.0.0", ("Desk.lan",), "desk.lan", True),
        ("desk.lan", (), "desk.lan", True),
        ("127.0.0.1", (), "", False),
    ],
)
def test_is_served(listening: str, hosts: tuple[str, ...], called: str, served: bool) -> None:
    options = EndpointOptions(host=listening, hosts=hosts, key="k")
    assert is_served(called, options) is served
