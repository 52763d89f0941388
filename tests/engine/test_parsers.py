"""The corpus of answers in all formats: text in, events out, however the text is cut."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.engine.parsers.answers import (
    THINK,
    AnswerFormat,
    CallFormat,
    PromptEnd,
    Think,
)
from moet_desk.engine.parsers.events import Call, Content, Parsed, Reasoning, joined
from moet_desk.engine.parsers.formats import choose_format, make_parser, prompt_end
from moet_desk.engine.parsers.mistral import MISTRAL_THINK

DATA = Path(__file__).parent.parent / "data" / "parsers"
TOOLS = json.loads((DATA / "tools.json").read_text("utf-8"))
THINKS = {
    CallFormat.MISTRAL: MISTRAL_THINK,
    CallFormat.LONGCAT: Think("<longcat_think>", "</longcat_think>"),
}


@cache
def corpus(calls: CallFormat) -> list[dict[str, Any]]:
    text = (DATA / f"{calls.value.removesuffix('_v32')}.jsonl").read_text("utf-8")
    if calls is CallFormat.DSML_V32:  # the same marks but for the block's name
        text = text.replace("DSML｜tool_calls", "DSML｜function_calls")
    lines = text.splitlines()
    return [json.loads(line) for line in lines]


def parse(calls: CallFormat, pieces: list[str], *, opened: bool = False) -> list[Parsed]:
    answers = AnswerFormat(calls, THINKS.get(calls, THINK))
    parser = make_parser(answers, TOOLS, in_reasoning=opened)
    parsed = [event for piece in pieces for event in parser.feed(piece)]
    return joined(parsed + parser.finish())


def as_written(parsed: list[Parsed]) -> list[Any]:
    """Events as the corpus has them."""
    written: list[Any] = []
    for item in parsed:
        if isinstance(item, Call):
            own_id = [] if item.id is None else [item.id]
            written.append(["call", item.name, json.loads(item.arguments), *own_id])
        else:
            written.append(["reasoning" if isinstance(item, Reasoning) else "text", item.text])
    return written


def exactly(events: list[Any]) -> str:
    """Events as text: there 1, 1.0 and true differ."""
    return json.dumps(events, ensure_ascii=False, sort_keys=True)


@pytest.mark.parametrize("calls", CallFormat, ids=lambda calls: calls.value)
def test_corpus__whole_and_by_characters__the_written_events(calls: CallFormat) -> None:
    for case in corpus(calls):
        opened = case.get("opened", False)
        want = exactly(case["events"])
        whole = parse(calls, [case["text"]], opened=opened)
        assert exactly(as_written(whole)) == want, case["name"]
        assert parse(calls, list(case["text"]), opened=opened) == whole, case["name"]


def test_corpus__size() -> None:
    names = [(calls, case["name"]) for calls in CallFormat for case in corpus(calls)]
    assert len(names) >= 300
    assert len(set(names)) == len(names)


ALL_CASES = [(calls, case) for calls in CallFormat for case in corpus(calls)]


@given(st.sampled_from(ALL_CASES), st.data())
@settings(max_examples=150, deadline=None)
def test_corpus__any_cut__the_same_events(
    picked: tuple[CallFormat, dict[str, Any]], data: st.DataObject
) -> None:
    calls, case = picked
    text, opened = case["text"], case.get("opened", False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(calls, pieces, opened=opened) == parse(calls, [text], opened=opened)


@pytest.mark.slow
@pytest.mark.parametrize("calls", CallFormat, ids=lambda calls: calls.value)
def test_corpus__pieces_of_every_length_and_every_end__the_same_events(calls: CallFormat) -> None:
    for case in corpus(calls):
        text, opened = case["text"], case.get("opened", False)
        whole = parse(calls, [text], opened=opened)
        for size in range(2, len(text), 1 + len(text) // 8):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert parse(calls, pieces, opened=opened) == whole, case["name"]
        for end in range(0, len(text), 1 + len(text) // 8):  # an answer that was cut off
            cut = text[:end]
            assert parse(calls, list(cut), opened=opened) == parse(calls, [cut], opened=opened)


_TAGS = {
    CallFormat.HERMES: '<tool_call>|</tool_call>|{"name": "now"}',
    CallFormat.QWEN3_CODER: "<tool_call>|</tool_call>|<function=now>|</function>|"
    "<parameter=path>|</parameter>",
    CallFormat.GLM45: "<tool_call>|</tool_call>|now|<arg_key>|</arg_key>|<arg_value>|</arg_value>",
    CallFormat.DEEPSEEK_V3: "<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>|<｜tool▁call▁begin｜>|"
    "<｜tool▁call▁end｜>|<｜tool▁sep｜>|function|now|{}|```json",
    CallFormat.DSML: "<｜DSML｜tool_calls>|</｜DSML｜tool_calls>|<｜DSML｜invoke|/>|"
    '</｜DSML｜invoke>| name="now"|>|<｜DSML｜parameter name="a" string="true">|'
    "</｜DSML｜parameter>",
    CallFormat.KIMI_K2: "<|tool_calls_section_begin|>|<|tool_calls_section_end|>|"
    "<|tool_call_begin|>|<|tool_call_end|>|<|tool_call_argument_begin|>|functions.now:0|{}",
    CallFormat.MINIMAX_M2: '<minimax:tool_call>|</minimax:tool_call>|<invoke name="now">|'
    '</invoke>|<parameter name="a">|</parameter>',
    CallFormat.LONGCAT: "<longcat_tool_call>|</longcat_tool_call>|now|<longcat_arg_key>|"
    "</longcat_arg_key>|<longcat_arg_value>|</longcat_arg_value>|<longcat_think>",
    CallFormat.HARMONY: "<|start|>|assistant|<|channel|>|<|message|>|<|end|>|<|call|>|final|"
    "analysis|commentary| to=functions.now|{}",
    CallFormat.MISTRAL: "[TOOL_CALLS]|[ARGS]|now|{}|[|]|[THINK]|[/THINK]",
}


@given(st.sampled_from(sorted(_TAGS, key=lambda calls: calls.value)), st.data())
@settings(max_examples=300, deadline=None)
def test_parse__tags_in_any_order__never_raises_and_any_cut_is_the_same(
    calls: CallFormat, data: st.DataObject
) -> None:
    marks = _TAGS[calls].replace("|>", "\0").replace("<|", "\1").split("|")
    marks = [mark.replace("\0", "|>").replace("\1", "<|") for mark in marks]
    common = ["<think>", "</think>", '"', "\\", " ", "\n", "x", "<", "{", "}", "é🦀"]
    text = "".join(data.draw(st.lists(st.sampled_from(marks * 2 + common), max_size=14)))
    opened = data.draw(st.booleans())
    whole = parse(calls, [text], opened=opened)
    assert parse(calls, list(text), opened=opened) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(calls, pieces, opened=opened) == whole
    assert all(isinstance(item, Call) or item.text for item in whole)


@given(st.sampled_from(sorted(_TAGS, key=lambda calls: calls.value)), st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_parse__text_without_tags__comes_out_as_it_is(calls: CallFormat, text: str) -> None:
    assert parse(calls, list(text)) == ([Content(text)] if text else [])


@pytest.mark.parametrize(
    ("model_type", "template", "want"),
    [
        ("qwen3_moe", "<think> <tool_call>\n{...}", AnswerFormat(CallFormat.HERMES, THINK)),
        ("qwen3_moe", "<tool_call>\n<function=f>", AnswerFormat(CallFormat.QWEN3_CODER)),
        ("deepseek_v3", "<｜tool▁call▁begin｜>a", AnswerFormat(CallFormat.DEEPSEEK_V31)),
        ("deepseek_v3", "<｜tool▁call▁begin｜>a\n```json", AnswerFormat(CallFormat.DEEPSEEK_V3)),
        ("deepseek_v3", None, AnswerFormat(CallFormat.DEEPSEEK_V3)),
        ("deepseek_v3", "<|tool_call_begin|></think>", AnswerFormat(CallFormat.KIMI_K2, THINK)),
        ("deepseek_v32", None, AnswerFormat(CallFormat.DSML_V32, THINK)),
        ("deepseek_v4", None, AnswerFormat(CallFormat.DSML, THINK)),
        ("glm4_moe", "<arg_key>k</arg_key>\n<arg_value>", AnswerFormat(CallFormat.GLM45)),
        ("glm4_moe", "<arg_key>k</arg_key><arg_value>", AnswerFormat(CallFormat.GLM47)),
        ("glm_moe_dsa", "", AnswerFormat(CallFormat.GLM47)),
        ("minimax_m2", "<minimax:tool_call><think>", AnswerFormat(CallFormat.MINIMAX_M2, THINK)),
        (
            "longcat_flash",
            "<longcat_tool_call><longcat_think>",
            AnswerFormat(CallFormat.LONGCAT, THINKS[CallFormat.LONGCAT]),
        ),
        ("gpt_oss", "<|channel|>analysis <think>", AnswerFormat(CallFormat.HARMONY)),
        ("mixtral", "[TOOL_CALLS][THINK]", AnswerFormat(CallFormat.MISTRAL, MISTRAL_THINK)),
        ("something", None, AnswerFormat(CallFormat.HERMES)),
    ],
)
def test_choose_format(model_type: str, template: str | None, want: AnswerFormat) -> None:
    assert choose_format(model_type, template) == want


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("<|assistant|><think>\n", PromptEnd.REASONING),
        ("<|assistant|><think>\n\n</think>\n\n", PromptEnd.ANSWER),
        ("<|assistant|></think>", PromptEnd.ANSWER),
        ("<think> is a tag.<|assistant|>", PromptEnd.UNSAID),
    ],
)
def test_prompt_end(prompt: str, want: PromptEnd) -> None:
    assert prompt_end(prompt, AnswerFormat(CallFormat.HERMES, THINK)) is want
    assert prompt_end(prompt, AnswerFormat(CallFormat.HERMES)) is PromptEnd.UNSAID


@pytest.mark.parametrize("calls", CallFormat, ids=lambda calls: calls.value)
def test_parse__no_tools_offered__calls_are_text(calls: CallFormat) -> None:
    text = next(c["text"] for c in corpus(calls) if c["name"] == "one call")
    parser = make_parser(AnswerFormat(calls, THINK), ())
    parsed = joined(parser.feed(text) + parser.finish())
    assert all(isinstance(item, Content) for item in parsed)
    if calls is not CallFormat.HARMONY:
        assert parsed == [Content(text)]


def test_parse__deep_nesting_and_long_blocks__no_error() -> None:
    for calls in CallFormat:
        for text in ("<tool_call>" + "[" * 100_000, "[TOOL_CALLS]" + '{"a":' * 50_000 + "}"):
            assert parse(calls, [text, "</tool_call>"]) != []
