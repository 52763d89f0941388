"""Answers of a given form: masks, calls in every format's own syntax, and the real engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.grammar import Constraint, Grammars
from moet_desk.engine.handle import (
    EngineHandle,
    GenerateRequest,
    Grammar,
    GrammarKind,
    Quality,
    Sampling,
)
from moet_desk.engine.json_numbers import DigitCount
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat, PromptEnd
from moet_desk.engine.parsers.events import Call
from moet_desk.engine.parsers.formats import make_parser
from moet_desk.engine.sampling import Sampler
from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from moet_desk.telemetry import Failed, Finished, FinishReason, TextDelta
from tests.conftest import DEMO
from tests.engine.json_forms import fits, odd_schema, random_schema
from tests.engine.test_parsers import TOOLS
from tests.engine.test_promise import engine

HOT = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
ANSWER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tides": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                  "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tides"],
    "additionalProperties": False,
}  # fmt: skip

TAGS = {
    CallFormat.GLM45: "<arg_key> </arg_key> <arg_value> </arg_value>",
    CallFormat.GLM47: "<arg_key> </arg_key> <arg_value> </arg_value>",
    CallFormat.DEEPSEEK_V3: "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
    " <｜tool▁call▁end｜> <｜tool▁sep｜>",
    CallFormat.DEEPSEEK_V31: "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
    " <｜tool▁call▁end｜> <｜tool▁sep｜>",
    CallFormat.DSML: "｜DSML｜",
    CallFormat.DSML_V32: "｜DSML｜",
    CallFormat.KIMI_K2: "<|tool_calls_section_begin|> <|tool_calls_section_end|>"
    " <|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|>",
    CallFormat.MINIMAX_M2: "<minimax:tool_call> </minimax:tool_call>",
    CallFormat.LONGCAT: "<longcat_tool_call> </longcat_tool_call>",
    CallFormat.HARMONY: "<|start|> <|channel|> <|message|> <|constrain|>",
    CallFormat.MISTRAL: "[TOOL_CALLS] [ARGS]",
}


TYPED: list[Any] = [
    {"type": "function", "function": {"name": "move", "parameters": {
        "type": "object", "required": ["to", "fast"], "properties": {
            "to": {"type": "string", "enum": ["pier", "the sea"]},
            "fast": {"type": "boolean"},
            "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": 2},
        }, "additionalProperties": False,
        "$defs": {"Step": {"enum": [1, 2, None]}}}}},
    {"type": "function", "function": {"name": "rest", "parameters": {}}},
]  # fmt: skip


@cache
def text_of(calls: CallFormat, *, with_tags: bool) -> Text:
    """The demo's vocabulary, with the format's tags as control tokens or as plain text."""
    spec = json.loads((DEMO / "tokenizer.json").read_text())
    tags = TAGS.get(calls, "").split() if with_tags else []
    first = 8192
    for i, tag in enumerate(tags):
        spec["added_tokens"].append({
            "id": first + i, "content": tag, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": i % 2 == 0,
        })  # fmt: skip
    config = {"model_type": "x", "vocab_size": first + len(tags), "eos_token_id": 1}
    text = Text(spec, template=None, special={}, config=config, generation={}, adds_bos=False)
    text.answers = AnswerFormat(calls, None if calls is CallFormat.HARMONY else THINK)
    return text


def constraint(
    text: Text, request: GenerateRequest, end: PromptEnd = PromptEnd.ANSWER
) -> Constraint:
    made = grammars_of(text).constraint(request, end)
    assert made is not None
    return made


@cache
def grammars_of(text: Text) -> Grammars:
    return Grammars(text)


@cache
def demo_text() -> Text:
    return Text.load(DEMO)


def allowed(made: Constraint, text: Text) -> set[int]:
    scores = made.apply(torch.zeros(text.vocab_size))
    return set((scores > -1).nonzero().flatten().tolist())


def goes_through(made: Constraint, text: Text, written: str) -> bool:
    """Whether an answer may be this text and then end."""
    for token in text.encode(written):
        if made.apply(torch.zeros(text.vocab_size))[token] < 0:
            return False
        made.take(token)
    return bool(made.apply(torch.zeros(text.vocab_size))[1] == 0)


def json_request(schema: Any, **more: Any) -> GenerateRequest:
    return GenerateRequest(grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), **more)


def called(*names: str, **more: Any) -> GenerateRequest:
    return GenerateRequest(tools=TOOLS, must_call=names, **more)


# -- masks -----------------------------------------------------------------------------------


def test_apply__json_schema__only_what_may_come_and_end_only_at_the_end() -> None:
    text = demo_text()
    made = constraint(text, json_request({"type": "integer", "minimum": 10, "maximum": 12}))
    assert 1 not in allowed(made, text)
    for token in text.encode("1"):
        made.take(token)
    assert {text.decode([i]) for i in allowed(made, text)} == {"0", "1", "2"}
    made.take(text.encode("2")[0])
    assert allowed(made, text) == {1}


def test_choose__constraint__the_likeliest_of_what_may_come_and_raw_logprobs() -> None:
    text = demo_text()
    logits = torch.randn(text.vocab_size, generator=torch.Generator().manual_seed(1))
    made = constraint(text, json_request({"enum": ["red", "rose"]}))
    greedy = Sampling(temperature=0)
    sampler = Sampler(
        greedy, text.defaults, prompt_ids=[], vocab=text.vocab_size, top_logprobs=1, constraint=made
    )
    best = max(allowed(constraint(text, json_request({"enum": ["red", "rose"]})), text),
               key=lambda i: float(logits[i]))  # fmt: skip
    before = logits.clone()
    chosen = sampler.choose(logits)
    assert chosen.token_id == best
    assert chosen.logprob == pytest.approx(float(logits.log_softmax(0)[best]), abs=1e-5)
    assert chosen.top[0][0] == int(logits.argmax())
    assert torch.equal(logits, before)
    assert sampler.draw() is None  # a device cannot choose for it
    assert Sampler(greedy, text.defaults, prompt_ids=[], vocab=9).draw() is not None


def test_choose__invalid_logits__are_not_hidden_by_the_mask() -> None:
    text = demo_text()
    logits = torch.zeros(text.vocab_size)
    logits[5000] = float("nan")
    made = constraint(text, json_request({"type": "null"}))
    sampler = Sampler(Sampling(temperature=0), text.defaults, prompt_ids=[], vocab=text.vocab_size,
                      constraint=made)  # fmt: skip
    with pytest.raises(MoetError) as caught:
        sampler.choose(logits)
    assert caught.value.code == "MD-ENG-04"


def test_take__token_that_may_not_come__error() -> None:
    text = demo_text()
    made = constraint(text, json_request({"type": "null"}))
    with pytest.raises(MoetError) as caught:
        made.take(text.encode("x")[0])
    assert caught.value.code == "MD-GRAM-02"
    with pytest.raises(MoetError):
        made.apply(torch.zeros(text.vocab_size))


def test_constraint__free_answer__none() -> None:
    made = grammars_of(demo_text()).constraint(GenerateRequest(tools=TOOLS), PromptEnd.UNSAID)
    assert made is None


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "intege"}'), "response_format: Invalid type"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'), 'Unimplemented keys: ["not"]'),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "http://x.y/z"}'), "does not fetch"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "the schema is not an object"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "the schema is not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'), "no answer has this form"),
        (Grammar(GrammarKind.JSON_SCHEMA, f'{{"const": {-(2**63)}}}'), "beyond 2**53"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"anyOf": [{"enum": [1e300]}]}'), "beyond 2**53"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"const": NaN}'), "beyond 2**53"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"multipleOf": 1000003}'), "multipleOf above 100000"),
        (Grammar(GrammarKind.REGEX, "a(?=b)"), "look-around"),
        (Grammar(GrammarKind.LARK, "start: x"), 'unknown name: "x"'),
    ],
)
def test_constraint__cannot_be_enforced__says_why(grammar: Grammar, words: str) -> None:
    with pytest.raises(MoetError) as caught:
        grammars_of(demo_text()).constraint(GenerateRequest(grammar=grammar), PromptEnd.UNSAID)
    assert (caught.value.code, caught.value.spec.http) == ("MD-GRAM-01", 400)
    assert words in caught.value.cause
    assert "|" not in caught.value.cause


@pytest.mark.parametrize(
    "function",
    [
        {"name": "a\ud800", "parameters": {}},
        {"name": "f", "parameters": {"properties": {"a\ud800": {"type": "string"}}}},
        {"name": "f", "parameters": {"properties": []}},
        {"name": "f", "parameters": {"required": 3, "properties": {"a": {"type": "strin"}}}},
        {"name": "f", "parameters": {"properties": {"a": 3}}},
        {"name": "f", "parameters": {"$defs": 7, "properties": {"a": {"$ref": "#/$defs/x/y"}}}},
    ],
)
@pytest.mark.parametrize("calls", [CallFormat.HERMES, CallFormat.DSML, CallFormat.GLM45])
def test_constraint__odd_tools__work_or_are_refused(calls: CallFormat, function: Any) -> None:
    text = text_of(calls, with_tags=False)
    tools = [{"type": "function", "function": function}]
    request = GenerateRequest(tools=tools, must_call=(function["name"],))
    try:
        made = grammars_of(text).constraint(request, PromptEnd.ANSWER)
    except MoetError as error:
        refusal = error.code
    else:
        refusal = "none" if made is not None and allowed(made, text) else "nothing may come"
    assert refusal in ("none", "MD-GRAM-01")


@pytest.mark.slow
def test_constraint__schemas_without_sense__work_or_are_refused() -> None:
    text, n_worked, refusals = demo_text(), 0, set()
    for seed in range(250):
        rng = random.Random(seed)
        form = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(odd_schema(rng)), strict=seed % 2 == 0)
        try:
            made = constraint(text, GenerateRequest(grammar=form))
        except MoetError as error:
            refusals.add(error.code)
            continue
        n_worked += 1
        for _ in range(12):
            token = rng.choice(sorted(allowed(made, text)))
            if token == 1:
                break
            made.take(token)
    assert n_worked > 25
    assert refusals == {"MD-GRAM-01"}


def test_constraint__pattern_that_explodes__is_ready_soon() -> None:
    text, request = demo_text(), json_request({"type": "string", "pattern": "^(a{1000}){1000}$"})
    grammars_of(text)._tokenizer()
    began = time.process_time()
    allowed(constraint(text, request), text)
    assert time.process_time() - began < 2


def test_constraint__not_strict__leaves_out_what_cannot_be_enforced() -> None:
    text = demo_text()
    schema = json.dumps({"type": "integer", "not": {"const": 3}})
    form = Grammar(GrammarKind.JSON_SCHEMA, schema, strict=False)
    assert goes_through(constraint(text, GenerateRequest(grammar=form)), text, "3")


def test_constraint__ignore_eos__refused() -> None:
    request = json_request({}, ignore_eos=True)
    with pytest.raises(MoetError) as caught:
        grammars_of(demo_text()).constraint(request, PromptEnd.UNSAID)
    assert caught.value.facts["parameter"] == "ignore_eos"


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (Grammar(GrammarKind.REGEX, "[a-c]+/[0-9]"), "cab/7", "cab/x"),
        (Grammar(GrammarKind.LARK, 'start: "x" n\nn: /[0-9]{2}/'), "x12", "x1"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), '{"a": [1, {"b": null}]}', "[1]"),
    ],
)
def test_constraint__kinds(form: Grammar, good: str, bad: str) -> None:
    text = demo_text()
    assert goes_through(constraint(text, GenerateRequest(grammar=form)), text, good)
    assert not goes_through(constraint(text, GenerateRequest(grammar=form)), text, bad)


# -- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        ("12345678901234567890", True),
        ("1234567890123456789", False),
        ("123456789012.3456789012", False),  # each part by itself
        ("0.12345678901234567890", True),
        ("-1e99", True),
        ("1e-99", True),
        ("1e+9", False),
        ("1e9, 12", False),
        ('["12345678901234567890123', False),  # text
        ('["\\"12345678901234567890123', False),
        ('["\\\\", 12345678901234567890', True),
    ],
)
def test_digit_count(text: str, is_full: bool) -> None:
    count = DigitCount()
    for byte in text.encode():
        count.read(bytes([byte]))
    whole = DigitCount()
    whole.read(text.encode())
    assert count.is_full == whole.is_full == is_full


def test_numbers__enough_digits__must_end() -> None:
    text = demo_text()
    made = constraint(text, json_request({"type": "number"}))
    for token in text.encode("0." + "7" * 25):
        made.take(token)
    assert {text.token_bytes(i)[:1] for i in allowed(made, text)} == {b"e", b"E", b"<"}
    long = "1" * 30
    for number in (-(2**53), 2**53, -0.12345678901234568):
        request = json_request({"const": number})
        assert goes_through(constraint(text, request), text, json.dumps(number))
    assert goes_through(constraint(text, json_request({"type": "string"})), text, f'"{long}"')


# -- reasoning -------------------------------------------------------------------------------

OPEN, CLOSE = 8, 9


def test_reasoning__prompt_opened_it__free_until_its_end_but_may_not_end_the_answer() -> None:
    text = text_of(CallFormat.HERMES, with_tags=False)
    made = constraint(text, json_request({"type": "null"}), PromptEnd.REASONING)
    assert set(range(text.vocab_size)) - allowed(made, text) == {1}
    for token in (*text.encode("so { it goes"), CLOSE):
        made.take(token)
    assert goes_through(made, text, "null")


def test_reasoning__prompt_says_nothing__may_come_first_and_only_then() -> None:
    text = text_of(CallFormat.HERMES, with_tags=False)
    made = constraint(text, json_request({"type": "null"}), PromptEnd.UNSAID)
    assert OPEN in allowed(made, text)
    made.take(OPEN)
    assert len(allowed(made, text)) == text.vocab_size - 1
    made.take(CLOSE)
    assert OPEN not in allowed(made, text)
    assert goes_through(made, text, "null")
    direct = constraint(text, json_request({"enum": [12]}), PromptEnd.UNSAID)
    direct.take(text.encode("1")[0])
    assert OPEN not in allowed(direct, text)


def test_reasoning__prompt_closed_it__does_not_come() -> None:
    text = text_of(CallFormat.HERMES, with_tags=False)
    made = constraint(text, json_request({"type": "null"}), PromptEnd.ANSWER)
    assert OPEN not in allowed(made, text)


@pytest.mark.parametrize("with_tags", [True, False])
def test_harmony__reasoning_then_the_final_channel(with_tags: bool) -> None:
    text = text_of(CallFormat.HARMONY, with_tags=with_tags)
    final = "<|channel|>final<|message|>{}"
    analysis = "<|channel|>analysis<|message|>hm { <|end|><|start|>assistant"
    request = json_request({"type": "object"})
    assert goes_through(constraint(text, request), text, final)
    assert goes_through(constraint(text, request), text, analysis + final)
    assert not goes_through(constraint(text, request), text, "{}")


# -- the real engine -------------------------------------------------------------------------


def made_by(handle: EngineHandle, request: GenerateRequest) -> tuple[str, Finished]:
    text = ""
    for event in handle.submit(request):
        assert not isinstance(event, Failed), event
        if isinstance(event, TextDelta):
            text += event.text
        last = event
    assert isinstance(last, Finished)
    return text, last


def hot(seed: int, schema: Any, **more: Any) -> GenerateRequest:
    message = {"role": "user", "content": "Tell me about the harbour, as JSON."}
    return json_request(schema, messages=[message], max_tokens=600,
                        sampling=replace(HOT, seed=seed), **more)  # fmt: skip


@pytest.fixture(scope="module")
def demo(demo_pack: Path) -> Iterator[EngineHandle]:
    with engine(demo_pack) as handle:
        yield handle


@pytest.mark.slow
def test_engine__random_schemas_at_temperature_one__every_answer_fits(demo: EngineHandle) -> None:
    for seed in range(25):
        schema = random_schema(seed)
        text, last = made_by(demo, hot(seed, schema))
        assert last.reason is FinishReason.STOP, text
        assert fits(json.loads(text), schema), (schema, text)


ECHO = {"type": "array", "items": {"enum": ["tide", "boat"]}, "minItems": 4, "maxItems": 5}


@pytest.mark.parametrize(
    "options",
    [
        {"drafts": "lookup", "draft_depth": 3},
        pytest.param({"drafts": "mtp", "draft_depth": 2}, marks=pytest.mark.slow),
    ],
    ids=["lookup", "mtp"],
)
def test_engine__drafts_and_the_gate__the_same_answer_in_its_form(
    demo: EngineHandle, demo_pack: Path, options: dict[str, Any]
) -> None:
    request = hot(5, ECHO, quality=Quality.BALANCED, gate=0.3)
    want, _ = made_by(demo, request)
    with engine(demo_pack, **options) as handle:
        text, last = made_by(handle, request)
    assert text == want
    assert fits(json.loads(text), ECHO)
    assert 0 < last.usage.accepted_tokens < last.usage.draft_tokens
    assert last.usage.rerun_tokens


def test_engine__beside_another__the_same_answer(demo: EngineHandle) -> None:
    request = hot(6, ANSWER)
    want, _ = made_by(demo, request)
    other = demo.submit(GenerateRequest(prompt="Once upon a time", max_tokens=20, sampling=HOT))
    assert made_by(demo, request)[0] == want
    assert fits(json.loads(want), ANSWER)
    assert isinstance(list(other)[-1], Finished)


def test_engine__forced_call__is_one_of_that_tool(demo: EngineHandle) -> None:
    message = {"role": "user", "content": "What time is it?"}
    request = GenerateRequest(
        messages=[message], tools=TYPED, must_call=("move",), one_call=True, max_tokens=120,
        sampling=replace(HOT, seed=2),
    )  # fmt: skip
    text, last = made_by(demo, request)
    parser = make_parser(AnswerFormat(), TYPED)
    (call,) = parser.feed(text) + parser.finish()
    assert isinstance(call, Call)
    assert fits(json.loads(call.arguments), TYPED[0]["function"]["parameters"])
    assert last.reason is FinishReason.STOP


def test_engine__form_that_cannot_be_enforced__refused_at_once(demo: EngineHandle) -> None:
    with pytest.raises(MoetError) as caught:
        demo.submit(hot(1, {"type": "intege"}))
    assert caught.value.code == "MD-GRAM-01"


def test_fits__what_a_schema_forbids__is_found() -> None:
    for value in ({}, {"name": "x"}, {"name": "x", "tides": []}, {"name": "x", "tides": [1, 100]},
                  {"name": "x" * 13, "tides": [1]}, {"name": "x", "tides": [True]},
                  {"name": "x", "tides": [1], "y": 1}, [], None):  # fmt: skip
        assert not fits(value, ANSWER)
    assert fits({"name": "x", "tides": [1, 99]}, ANSWER)
