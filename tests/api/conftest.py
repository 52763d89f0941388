"""A server around a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from tests.api.fakes import FakeEngine


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[FakeEngine, Endpoint]]:
    """One server for all tests: starting and stopping one takes longer than most tests."""
    engine = FakeEngine()
    endpoint = Endpoint(engine, EndpointOptions(port=0, keep_alive_s=0.1))
    endpoint.start()
    yield engine, endpoint
    endpoint.stop()


@pytest.fixture
def engine(served: tuple[FakeEngine, Endpoint]) -> FakeEngine:
    served[0].reset()
    return served[0]


@pytest.fixture
def endpoint(served: tuple[FakeEngine, Endpoint], engine: FakeEngine) -> Endpoint:
    return served[1]


@pytest.fixture
def claude(endpoint: Endpoint) -> Iterator[anthropic.Anthropic]:
    base = endpoint.address
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=10) as client:
        yield client


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    base = f"{endpoint.address}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=10) as client:
        yield client
