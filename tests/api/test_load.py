"""Putting the model away and loading it again over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.reloading import Reloadable
from tests.api.fakes import MODEL, FakeEngine


@pytest.fixture
def engines() -> list[FakeEngine]:
    return []


@pytest.fixture
def http(engines: list[FakeEngine]) -> Iterator[httpx.Client]:
    def start() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    endpoint = Endpoint(Reloadable("fake", start), EndpointOptions(port=0, aliases=("gpt-4",)))
    endpoint.start()
    with httpx.Client(base_url=endpoint.address, timeout=10) as client:
        yield client
    endpoint.stop()


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_unload_and_load__by_name_or_alias__once_each(
    http: httpx.Client, engines: list[FakeEngine]
) -> None:
    assert http.post("/v1/models/fake/load").json()["state"] == "ready"
    for name in ("fake", "gpt-4"):
        gone = http.post(f"/v1/models/{name}/unload").json()
        assert gone == {"id": name, "object": "model", "state": "no model"}
    for path in ("/v1/chat/completions", "/v1/messages"):
        refused = http.post(path, json={**CHAT, "max_tokens": 5})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert http.get("/health").status_code == 503
    assert len(engines) == 1
    assert http.post("/v1/models/gpt-4/load").json()["state"] == "ready"
    assert len(engines) == 2
    answer = http.post("/v1/chat/completions", json={**CHAT, "model": MODEL.name})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert (len(engines[0].requests), len(engines[1].requests)) == (0, 1)


@pytest.mark.parametrize("word", ["load", "unload"])
def test_load__another_model_or_a_get__is_refused(
    http: httpx.Client, engines: list[FakeEngine], word: str
) -> None:
    other = http.post(f"/v1/models/other/{word}")
    assert (other.status_code, other.json()["error"]["moet_code"]) == (404, "MD-API-02")
    assert http.get(f"/v1/models/fake/{word}").status_code == 404
    assert http.get("/health").status_code == 200
    assert len(engines) == 1


def test_unload__from_a_page_elsewhere__is_refused(http: httpx.Client) -> None:
    foreign = http.post("/v1/models/fake/unload", headers={"origin": "https://example.com"})
    assert foreign.status_code == 403
    assert http.get("/health").status_code == 200


def test_load__an_engine_that_cannot__is_no_address(engine: FakeEngine, endpoint: Endpoint) -> None:
    refused = httpx.post(f"{endpoint.address}/v1/models/fake/unload")
    assert (refused.status_code, refused.json()["error"]["moet_code"]) == (404, "MD-API-10")
    assert engine.info is MODEL
