"""Forced calls and JSON schemas through the OpenAI client, by the demo model's own weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from tests.engine.json_forms import fits
from tests.engine.test_promise import engine

pytestmark = pytest.mark.slow

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "harbour": {"type": "string", "maxLength": 12},
        "hours": {"type": "integer", "minimum": 1, "maximum": 24},
    },
    "required": ["harbour", "hours"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "fetch_tide", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "tide", "schema": SCHEMA}}
ASKED: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def demo(demo_pack: Path) -> Iterator[openai.OpenAI]:
    with engine(demo_pack) as handle:
        endpoint = Endpoint(handle, EndpointOptions(port=0))
        endpoint.start()
        with openai.OpenAI(
            base_url=f"{endpoint.address}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            yield client
        endpoint.stop()


def test_response_format__whole_and_stream__the_same_json(demo: openai.OpenAI) -> None:
    whole = demo.chat.completions.create(**ASKED, response_format=FORM).choices[0]
    assert fits(json.loads(whole.message.content), SCHEMA)
    assert whole.finish_reason == "stop"
    chunks = demo.chat.completions.create(**ASKED, response_format=FORM, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content


def test_tool_choice__a_function__is_called_once(demo: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "fetch_tide"}}
    answer = demo.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "fetch_tide"
    assert fits(json.loads(call.function.arguments), SCHEMA)
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)


def test_response_format__cannot_be_enforced__400_with_the_reason(demo: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        demo.chat.completions.create(**ASKED, response_format=form)
    body: Any = caught.value.body
    assert (body["moet_code"], body["param"]) == ("MD-GRAM-01", "response_format")
    assert 'Unimplemented keys: ["not"]' in body["message"]
