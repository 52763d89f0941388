"""The contract as the official client sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.handle import Quality
from moet_desk.errors import fail
from moet_desk.telemetry import (
    EngineState,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    TextDelta,
    TokenLogprob,
    Usage,
)
from tests.api.fakes import MODEL, FakeEngine, Pause, eventually

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "fetch_tide", "parameters": None}}]
CALL = '<tool_call>\n{"name": "fetch_tide", "arguments": {"harbour": "Oban"}}\n</tool_call>'


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=more.pop("messages", HI), **more)


def test_whole_answer__text__has_usage_and_reason(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 9)
    assert answer.object == "chat.completion"


def test_stream__text__equals_the_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer(*"한국어 글자 😀 done")
    chunks = list(ask(client, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == ask(client).choices[0].message.content == "한국어 글자 😀 done"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream__usage_asked_for__last_chunk_has_no_choices(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_request__all_parameters__reach_the_engine(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        seed=42,
        max_completion_tokens=33,
        stop=["END", ""],
        logit_bias={"7": -100},
        logprobs=True,
        top_logprobs=2,
        user="someone",
        extra_body={"top_k": -1, "min_p": 0.05, "repetition_penalty": 1.1, "quality": "exact"},
    )
    got = engine.requests[0]
    sampling = got.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5, 0.9, 0, 0.05,
    )  # fmt: skip
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 42)
    assert sampling.logit_bias == {7: -100.0}
    assert (got.stop, got.max_tokens, got.quality) == (("END",), 33, Quality.EXACT)
    assert got.top_logprobs == 2
    assert got.messages == HI


def test_request__balanced__gate_goes_in_and_reruns_come_out(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    usage = Usage(7, 5, rerun_tokens=2, rerun_s=0.25)
    engine.script = [TextDelta("a"), Finished(FinishReason.STOP, usage, "balanced")]
    answer = ask(client, extra_body={"quality": "balanced", "gate": 0.75})
    got = engine.requests[0]
    assert (got.quality, got.gate) == (Quality.BALANCED, 0.75)
    details = answer.usage.completion_tokens_details
    assert (details.rerun_tokens, details.rerun_s) == (2, 0.25)
    assert not hasattr(answer.usage.completion_tokens_details, "opportunistic")


def test_opportunistic__model_fingerprint_and_usage__say_so(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    plain = ask(client).system_fingerprint
    assert client.models.retrieve(MODEL.name).opportunistic is False
    engine.info = replace(MODEL, opportunistic=True)
    engine.script = [
        TextDelta("a"), Finished(FinishReason.STOP, Usage(7, 5, opportunistic=True), "fast"),
    ]  # fmt: skip
    answer = ask(client)
    assert answer.usage.completion_tokens_details.opportunistic is True
    assert answer.system_fingerprint == plain + "_opportunistic"
    assert client.models.retrieve(MODEL.name).opportunistic is True


def test_request__nothing_set__leaves_the_choice_to_the_model(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    ask(client)
    got = engine.requests[0]
    assert got.sampling.temperature is None
    assert got.max_tokens is None
    assert got.top_logprobs is None
    assert (got.quality, got.gate) == (MODEL.default_quality, None)
    assert got.tools == ()


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers__numbered_and_counted(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask(client, n=3, seed=5, stream=stream, **options)
    assert [got.sampling.seed for got in engine.requests] == [5, 6, 7]
    if not stream:
        assert [choice.message.content for choice in answer.choices] == ["Hello"] * 3
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 6)
        return
    *chunks, last = answer
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (7, 6)
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant", *[None] * (len(mine) - 1)]
        assert "".join(choice.delta.content or "" for choice in mine) == "Hello"
        assert mine[-1].finish_reason == "stop"


def test_several_answers__the_queue_takes_only_some__none_runs(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = [Pause(30), Finished(FinishReason.STOP, Usage(7, 1), "fast")]
    engine.most = 2
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, n=3)
    assert caught.value.response.headers["retry-after"] == "1"
    assert eventually(lambda: engine.busy == 0)
    assert engine.cancelled == 2


def test_several_answers__one_fails__all_end(client: openai.OpenAI, engine: FakeEngine) -> None:
    error = Failed(fail("MD-ENG-04", reason="NaN", model="fake"))
    engine.script = [TextDelta("a"), Pause(0.05), error]
    with pytest.raises(openai.InternalServerError, match="NaN"):
        ask(client, n=2)
    assert eventually(lambda: engine.busy == 0)


def test_several_answers__one_call_each__ends_only_that_answer(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 3), "fast")
    engine.script = [TextDelta(CALL), Pause(0.2), TextDelta("more"), end]
    answer = ask(client, n=2, tools=TOOLS, parallel_tool_calls=False)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 2
    assert all(len(choice.message.tool_calls) == 1 for choice in answer.choices)


def test_alias__is_the_model_by_another_name(engine: FakeEngine) -> None:
    endpoint = Endpoint(engine, EndpointOptions(port=0, aliases=("claude-opus", "org/x")))
    endpoint.start()
    try:
        with openai.OpenAI(base_url=f"{endpoint.address}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["fake", "claude-opus", "org/x"]
            assert client.models.retrieve("org/x").id == "org/x"
            answer = client.chat.completions.create(model="claude-opus", messages=HI)
            assert answer.model == "claude-opus"
            with pytest.raises(openai.NotFoundError, match="claude-opus"):
                client.models.retrieve("gpt-4")
    finally:
        endpoint.stop()


def test_effort_and_template_switches__go_to_the_template(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.info = replace(MODEL, switches=("enable_thinking", "clear_thinking"))
    ask(client, reasoning_effort="none", extra_body={"chat_template_kwargs": {}})
    assert engine.requests[-1].template == {"enable_thinking": False}
    switches = {"enable_thinking": True, "clear_thinking": False}
    ask(client, extra_body={"chat_template_kwargs": switches})
    assert engine.requests[-1].template == switches
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt"):
        ask(client, extra_body={"chat_template_kwargs": {"add_generation_prompt": False}})


def test_finish_reason__length(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer("cut", reason=FinishReason.LENGTH)
    assert ask(client).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs__of_each_token(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    token = TokenLogprob(1, b"\xf0\x9f", -0.5, ((1, b"\xf0\x9f", -0.5), (2, b"a", float("-inf"))))
    engine.script = [
        TextDelta("", logprobs=(token,)),
        TextDelta("x", logprobs=(token,)),
        Finished(FinishReason.STOP, Usage(7, 2), "fast"),
    ]
    answer = ask(client, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        found = [chunk.choices[0].logprobs for chunk in answer]
        content = [entry for logprobs in found if logprobs for entry in logprobs.content]
    else:
        content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xF0, 0x9F]] * 2
    assert content[0].top_logprobs[1].logprob == -9999.0


def test_tool_call__whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer("Let me look.\n", CALL)
    answer = ask(client, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "Let me look."
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("fetch_tide", '{"harbour": "Oban"}')
    assert engine.requests[0].tools == TOOLS


def test_tool_call__stream__name_and_id_in_the_first_delta_only(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.answer("Let me look.\n", *CALL, *CALL)
    chunks = list(ask(client, tools=TOOLS, stream=True))
    calls: dict[int, list[Any]] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or ():
            calls.setdefault(piece.index, []).append(piece)
    assert sorted(calls) == [0, 1]
    for first, *rest in calls.values():
        assert first.id.startswith("call_")
        assert first.function.name == "fetch_tide"
        for piece in rest:
            assert piece.id is None
            assert "name" not in piece.function.model_fields_set
        arguments = "".join(piece.function.arguments for piece in (first, *rest))
        assert arguments == '{"harbour": "Oban"}'
    assert calls[0][0].id != calls[1][0].id
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "Let me look."


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call__one_at_a_time__ends_the_answer(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 3), "fast")
    engine.script = [TextDelta(CALL), Pause(5), TextDelta(CALL), end]
    answer = ask(client, tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        calls = [piece for choice in choices for piece in choice.delta.tool_calls or () if piece.id]
        assert choices[-1].finish_reason == "tool_calls"
    else:
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    assert len(calls) == 1
    assert engine.cancelled == 1


def test_tool_choice_none__template_sees_no_tools_and_text_stays(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.answer(CALL)
    answer = ask(client, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.content == CALL
    assert answer.message.tool_calls is None
    assert engine.requests[0].tools == ()


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long__both_numbers_and_the_code_clients_know(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.refusal = fail(
        "MD-API-03", prompt_tokens=163840, context=32768, reserve=256, model_context=65536
    )
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "163840" in caught.value.message
    assert "32768" in caught.value.message


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (fail("MD-CHAT-01", reason="bad role order"), openai.BadRequestError),
        (fail("MD-ENG-06", n_waiting=32), openai.InternalServerError),
        (fail("MD-ENG-03", reason="out of memory", log="x"), openai.InternalServerError),
        (ZeroDivisionError("secret detail"), openai.InternalServerError),
    ],
)
def test_refusal__is_an_error_object_without_traceback(
    client: openai.OpenAI, engine: FakeEngine, refusal: Exception, raised: type[openai.APIError]
) -> None:
    engine.refusal = refusal
    with pytest.raises(raised) as caught:
        ask(client)
    body: Any = caught.value.body
    assert body["moet_code"].startswith("MD-")
    assert "Traceback" not in str(body)
    assert "secret" not in str(body)


def test_unknown_model__not_found_and_names_the_offer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="fake") as caught:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_failure_in_mid_answer__raises_in_the_client(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    error = fail("MD-NVME-04", layer=3, expert=7, path="p", reason="EIO", model="fake")
    engine.script = [TextDelta("Hel"), Failed(error)]
    with pytest.raises(openai.APIError, match="layer 3, expert 7"):
        for _ in ask(client, stream=True) if stream else ask(client):
            pass


@pytest.mark.parametrize("stream", [False, True])
def test_engine_gives_up__is_an_error_not_a_finished_text(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    engine.answer("Hel", reason=FinishReason.CANCELLED)
    with pytest.raises(openai.APIError, match="stopped this answer"):
        for _ in ask(client, stream=True) if stream else ask(client):
            pass


def test_stream_closed_by_the_client__cancels(client: openai.OpenAI, engine: FakeEngine) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 1), "fast")
    engine.script = [PrefillProgress(1, 2), TextDelta("a"), Pause(30), end]
    with ask(client, stream=True) as stream:
        next(iter(stream))
        assert engine.busy == 1
    assert eventually(lambda: engine.busy == 0)


def test_models__publish_the_real_window(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    shown: Any = client.models.retrieve("fake")
    assert listed.id == shown.id == "fake"
    assert shown.max_model_len == shown.context_length == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_no_model_yet__503(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.info, engine.state = None, EngineState.LOADING
    with pytest.raises(openai.InternalServerError, match="loading") as caught:
        ask(client)
    assert caught.value.status_code == 503
    assert client.models.list().data == []
