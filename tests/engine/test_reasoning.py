"""Which switches a chat template has, and what an effort sets them to."""

from __future__ import annotations

from typing import Any

import pytest

from moet_desk.engine.handle import ModelInfo
from moet_desk.engine.reasoning import effort_switches, levels_of
from moet_desk.engine.template import ChatTemplate
from tests.engine.test_template import MESSAGES

ON_OFF = (
    "{% if enable_thinking is defined and not enable_thinking %}quiet{% else %}think{% endif %}"
)
LEVELS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}"
)
TWO = "{% if reasoning_effort == 'max' %}MAX{% elif reasoning_effort == 'high' %}HIGH{% endif %}"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, tokens={"bos_token": "<s>"})


def model(source: str) -> ModelInfo:
    made = template(source)
    return ModelInfo(
        "m", "f", 1, 1, 1, 1, 1, 1, 1, "i", switches=made.switches, efforts=made.efforts
    )


def rendered(source: str, effort: str) -> str:
    values = effort_switches(effort, model(source))
    return template(source).render(MESSAGES, [], add_generation_prompt=True, switches=values)


@pytest.mark.parametrize(
    ("source", "effort", "text"),
    [
        (ON_OFF, "none", "quiet"),
        (ON_OFF, "low", "think"),
        (LEVELS, "low", "Reasoning: low"),
        (LEVELS, "minimal", "Reasoning: low"),
        (LEVELS, "max", "Reasoning: high"),
        (TWO, "low", "HIGH"),
        (TWO, "high", "HIGH"),
        (TWO, "xhigh", "MAX"),
        (ON_OFF + TWO, "none", "quiet"),
        (ON_OFF + TWO, "max", "thinkMAX"),
        ("{{ thinking_mode }}", "none", "disabled"),
        ("{{ thinking_mode }} {{ thinking }}", "high", "enabled True"),
    ],
)
def test_effort__as_the_template_tells_it_apart(source: str, effort: str, text: str) -> None:
    assert rendered(source, effort) == text


@pytest.mark.parametrize(
    ("source", "effort", "words"),
    [
        ("{{ messages }}", "low", "does not reason"),
        (LEVELS, "none", "always reasons; low"),
        (ON_OFF, "a lot", "must be one of none, minimal"),
    ],
)
def test_effort__that_cannot_be__says_why(source: str, effort: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        effort_switches(effort, model(source))


def test_none__of_a_model_that_does_not_reason__changes_nothing() -> None:
    assert effort_switches("none", model("{{ messages }}")) == {}


def test_render__other_variables__cannot_be_set() -> None:
    values: dict[str, Any] = {"messages": "forged", "bos_token": "x", "thinking": 1, "other": 2}
    made = template("{{ bos_token }}{{ messages | length }}{{ thinking }}{{ other }}")
    assert made.render(MESSAGES, [], add_generation_prompt=True, switches=values) == (
        f"<s>{len(MESSAGES)}1"
    )


def test_levels__one_word_alone__is_a_default_not_a_list() -> None:
    assert levels_of(["medium", "user"]) == ("low", "medium", "high")
    assert levels_of(["max", "x", "high"]) == ("high", "max")
