"""Chat templates of DeepSeek-V3.2 and V4: the order is ours, the sentences are their script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.engine.messages import prepare_messages, prepare_tools
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat
from moet_desk.engine.parsers.formats import choose_format
from moet_desk.engine.template import ChatTemplate
from moet_desk.errors import MoetError
from moet_desk.store.deepseek_template import V4_SCRIPT, V32_SCRIPT, Sentences, template_of
from moet_desk.store.model_source import read_small
from moet_desk.store.pack_verify import verify_pack
from tests.store.hub_server import HubServer, Repo
from tests.store.pulls import NAME, asked, line_to, planner, pull_all
from tests.store.tiny import Tiny, write_source

SCRIPT = '''
"""A script as it lies beside such a model."""
import os
raise SystemExit("nobody runs me")
GREETING: str = "hello"
TOOLS_TEMPLATE = """Say <{dsml_token}calls> within {thinking_start_token}{thinking_end_token}
{{"quoted": 1}}
{tool_schemas}
That is all — "really"."""
REASONING_EFFORT_MAX = (
    "Think long.\\n"
    "And longer.\\n\\n"
)
'''.encode()
TOLD = (
    'Say <｜DSML｜calls> within <think></think>\n{"quoted": 1}\n'
    '{"name": "tide", "parameters": {"type": "object", "properties": {}}}\n'
    'That is all — "really".'
)
TOOLS = [{"type": "function", "function": {"name": "tide"}}]
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "tide", "arguments": '{"at": "Oban"}'}},
    {
        "id": "b", "type": "function",
        "function": {"name": "tide", "arguments": '{"n": 6, "x": {"y": "\\u00e9"}}'},
    },
]  # fmt: skip
INVOKED = """<｜DSML｜invoke name="tide">
<｜DSML｜parameter name="at" string="true">Oban</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="tide">
<｜DSML｜parameter name="n" string="false">6</｜DSML｜parameter>
<｜DSML｜parameter name="x" string="false">{"y": "é"}</｜DSML｜parameter>
</｜DSML｜invoke>
"""
SYSTEM, ASKED = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
SAID = {"role": "assistant", "content": "A", "reasoning_content": "R"}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "W", "tool_calls": CALLS}
RESULTS = [
    {"role": "tool", "tool_call_id": "b", "content": "second"},
    {"role": "tool", "tool_call_id": "a", "content": "first"},
]


def rendered(
    name: str, messages: list[Any], *, tools: bool = False, script: bytes = SCRIPT,
    begins: bool = True, **switches: Any,
) -> str:  # fmt: skip
    template = ChatTemplate(
        template_of(script, name).decode(), tokens={"bos_token": "<bos>", "eos_token": "<eos>"}
    )
    return template.render(
        prepare_messages(messages), prepare_tools(TOOLS) if tools else [],
        add_generation_prompt=begins, switches=switches,
    )  # fmt: skip


def test_v32__turns__reasoning_only_behind_the_last_question() -> None:
    turns = [SYSTEM, ASKED, SAID, ASKED]
    told = "<bos>S<｜User｜>Q<｜Assistant｜></think>A<eos><｜User｜>Q<｜Assistant｜>"
    assert rendered(V32_SCRIPT, turns) == told + "</think>"
    assert rendered(V32_SCRIPT, turns, thinking=True) == told + "<think>"
    assert rendered(V32_SCRIPT, turns, enable_thinking=True) == told + "<think>"
    assert rendered(V32_SCRIPT, turns, begins=False) == told.removesuffix("<｜Assistant｜>")
    ended = rendered(V32_SCRIPT, [ASKED, SAID], thinking=True, begins=False)
    assert ended == "<bos><｜User｜>Q<｜Assistant｜><think>R</think>A<eos>"


def test_v32__calls_and_results__between_the_models_turns() -> None:
    turns = [ASKED, CALLED, *RESULTS]
    want = f"<bos>\n\n{TOLD}<｜User｜>Q<｜Assistant｜>"
    block = f"\n\n<｜DSML｜function_calls>\n{INVOKED}</｜DSML｜function_calls><eos>"
    results = (
        "\n\n<function_results>\n<result>second</result>\n<result>first</result>"
        "\n</function_results>\n\n"
    )
    plain = f"{want}</think>{block}{results}</think>"
    assert rendered(V32_SCRIPT, turns, tools=True) == plain
    thought = f"{want}<think>W</think>{block}{results}<think>"
    assert rendered(V32_SCRIPT, turns, tools=True, thinking=True) == thought


def test_v4__turns__reasons_unless_told_not_to() -> None:
    turns = [SYSTEM, ASKED, SAID, ASKED]
    told = "<bos>S<｜User｜>Q<｜Assistant｜></think>A<eos><｜User｜>Q<｜Assistant｜>"
    assert rendered(V4_SCRIPT, turns) == told + "<think>"
    assert rendered(V4_SCRIPT, turns, thinking=False) == told + "</think>"
    kept = "<bos>S<｜User｜>Q<｜Assistant｜><think>R</think>A<eos><｜User｜>Q<｜Assistant｜><think>"
    assert rendered(V4_SCRIPT, turns, drop_thinking=False) == kept
    assert rendered(V4_SCRIPT, turns, begins=False) == told.removesuffix("<｜Assistant｜>")


def test_v4__effort__its_sentences_come_first() -> None:
    assert rendered(V4_SCRIPT, [SYSTEM, ASKED], reasoning_effort="max").startswith(
        "<bos>Think long.\nAnd longer.\n\nS<｜User｜>Q"
    )
    assert rendered(V4_SCRIPT, [SYSTEM, ASKED], reasoning_effort="high").startswith("<bos>S")
    silent = rendered(V4_SCRIPT, [SYSTEM, ASKED], reasoning_effort="max", thinking=False)
    assert silent.startswith("<bos>S")
    later = SCRIPT.replace(b"REASONING_EFFORT_MAX", b"REASONING_EFFORT_HIGH")
    assert rendered(V4_SCRIPT, [ASKED], script=later).startswith("<bos>Think long.\n")
    template = ChatTemplate(template_of(SCRIPT, V4_SCRIPT).decode(), tokens={})
    assert template.efforts == ("high", "max")
    assert set(template.switches) >= {"thinking", "reasoning_effort", "drop_thinking"}


def test_v4__results__in_the_users_turn_in_the_order_of_the_calls() -> None:
    turns = [ASKED, CALLED, *RESULTS, {"role": "user", "content": "Go on"}]
    block = f"\n\n<｜DSML｜tool_calls>\n{INVOKED}</｜DSML｜tool_calls><eos>"
    results = "<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>"
    want = (
        f"<bos>\n\n{TOLD}<｜User｜>Q<｜Assistant｜><think>W</think>{block}"
        f"<｜User｜>{results}\n\nGo on<｜Assistant｜><think>"
    )
    assert rendered(V4_SCRIPT, turns, tools=True) == want  # with tools reasoning is kept
    unknown = [{**RESULTS[0], "tool_call_id": "z"}, RESULTS[1]]
    text = rendered(V4_SCRIPT, [ASKED, CALLED, *unknown], tools=True)
    assert text.index("second") < text.index("first")  # as they came


@pytest.mark.parametrize("name", [V32_SCRIPT, V4_SCRIPT])
@pytest.mark.parametrize(
    "script",
    [
        b"", b"this is no Python (", b"\x00", b"\xff\xfe", b"(" * 5000, b"#" * (2 << 20),
        b"X = '{other}{tool_schemas}'", b"X = 'two {tool_schemas} {tool_schemas}'",
    ],
)  # fmt: skip
def test_script_without_sentences__chats_but_takes_no_tools(name: str, script: bytes) -> None:
    assert Sentences.of(script) == Sentences(None, {})
    assert rendered(name, [ASKED], script=script).startswith("<bos><｜User｜>Q<｜Assistant｜>")
    with pytest.raises(MoetError, match="about tools") as caught:
        rendered(name, [ASKED], script=script, tools=True)
    assert caught.value.code == "MD-CHAT-01"


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.booleans())
def test_sentences__any_text__come_out_as_they_went_in(text: str, is_effort: bool) -> None:
    name = "REASONING_EFFORT_MAX" if is_effort else "TOOLS"
    value = text if is_effort else text.replace("{", "{{").replace("}", "}}") + "{tool_schemas}"
    script = f"{name} = {value!r}".encode()
    want = Sentences(None, {"max": text}) if is_effort else Sentences((text, ""), {})
    assert Sentences.of(script) == want
    found = rendered(V4_SCRIPT, [ASKED], script=script, tools=not is_effort, reasoning_effort="max")
    assert found.startswith(f"<bos>{text}<｜User｜>" if is_effort else f"<bos>\n\n{text}{{")


def test_formats__of_the_template__as_the_model_calls(tmp_path: Path) -> None:
    for name, calls in ((V32_SCRIPT, CallFormat.DSML_V32), (V4_SCRIPT, CallFormat.DSML)):
        text = template_of(SCRIPT, name).decode()
        assert choose_format("deepseek_v3", text) == AnswerFormat(calls, THINK)


def test_small_files__a_script_and_no_template__one_is_made(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    (tmp_path / V4_SCRIPT).write_bytes(SCRIPT)
    assert read_small(tmp_path)["chat_template.jinja"] == template_of(SCRIPT, V4_SCRIPT)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert "chat_template.jinja" not in read_small(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("theirs")
    assert read_small(tmp_path)["chat_template.jinja"] == b"theirs"


def test_pull__script_in_a_folder__the_pack_has_the_template_and_the_folder_goes(
    tmp_path: Path,
) -> None:
    source, tiny = tmp_path / "origin", Tiny(hidden=64, inter=64, n_experts=4, layers=(1,))
    write_source(source, tiny, "bf16", seed=3)
    (source / "chat_template.jinja").unlink()
    (source / "encoding").mkdir()
    (source / V4_SCRIPT).write_bytes(SCRIPT)
    (source / "encoding" / "readme.md").write_text("not wanted")
    hub = HubServer()
    try:
        hub.repos[NAME] = Repo(source)
        wanted = asked(tmp_path, reclaim=True)
        meta = pull_all(wanted, line_to(hub.url), planner(tiny, source))
    finally:
        hub.close()
    assert (wanted.dest / "chat_template.jinja").read_bytes() == template_of(SCRIPT, V4_SCRIPT)
    assert verify_pack(wanted.dest).ok
    assert not wanted.work.exists()
    (source / V4_SCRIPT).write_bytes(SCRIPT + b"\nTOOLS_TEMPLATE = 'other {tool_schemas}'")
    hub = HubServer()
    try:
        hub.repos[NAME] = Repo(source)
        again = asked(tmp_path / "again")
        assert pull_all(again, line_to(hub.url), planner(tiny, source)).identity != meta.identity
    finally:
        hub.close()
