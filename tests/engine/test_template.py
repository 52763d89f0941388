"""Chat templates: what the engine offers them, and what it does not let them do."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from moet_desk.engine.template import ChatTemplate
from moet_desk.errors import MoetError

MESSAGES = [{"role": "user", "content": "hello"}]


def _render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    template = ChatTemplate(
        source, tokens={"bos_token": "<s>"}, now=lambda: datetime(2026, 5, 4, tzinfo=UTC)
    )
    return template.render(messages or MESSAGES, [], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% if tools is none %}-{% endif %}", "<s>-"),
        ("{% if true %}\n  x\n{% endif %}\n", "  x\n"),
        ("{% for m in messages %}{{ m['role'] }}{% break %}{% endfor %}", "user"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahellob"),
        ("{{ {'a': '<é\"'} | tojson }}", '{"a": "<é\\""}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}", '{"b":1,"a":2}'),
        ("{{ ('{\"a\": 1}' | from_json).a }}", "1"),
        ("{{ strftime_now('%d %B %Y') }}", "04 May 2026"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ '%s=%05.2f' % ('a', 1.5) }}{{ '{}:{:>3}'.format(1, 2) }}", "a=01.501:  2"),
        ("{% set ns = namespace(n=0) %}{% for _ in range(3) %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ f(2) | trim }}", "[1][2]"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ 'a-b' | replace('-', '+') }}{{ 'x,y'.split(',')[1] }}", "a+by"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{% for m in messages if m.role %}{{ loop.index }}{% endfor %}", "1"),
        # Qwen3's: the last question from behind, thoughts cut off, neighbours of a message
        ("{% for m in messages[::-1] %}{{ (messages | length - 1) - loop.index0 }}{% endfor %}",
         "0"),
        ("{{ 'why</think>\n\nso'.split('</think>')[-1].lstrip('\n') }}", "so"),
        ("{% set m = messages[0] %}{{ m.content is string and not m.content.startswith('<') }}",
         "True"),
        ("{% for m in messages %}{{ loop.first or loop.previtem.role != 'tool' }}{% endfor %}",
         "True"),
        ("{% if enable_thinking is defined and enable_thinking is false %}-{% endif %}x", "x"),
    ],
)  # fmt: skip
def test_render__features_templates_use__work(source: str, expected: str) -> None:
    assert _render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 5 }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 10 ** 1000000 }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"
        "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"
        "{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ 'x'.rjust(1000000000) }}",
        "{{ 'x' | indent(1000000000, true) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
    ],
)
def test_render__failing_or_exploding_template__refused_soon(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(MoetError) as caught:
        _render(source)
    assert caught.value.code == "MD-CHAT-01"
    assert time.perf_counter() - start < 5


def test_compile__invalid_template__refused_with_the_line() -> None:
    with pytest.raises(MoetError) as caught:
        _render("a\n{% if %}")
    assert "line 2" in caught.value.cause


def test_render__template_shadows_the_budget__limits_still_hold() -> None:
    with pytest.raises(MoetError, match="loop steps"):
        _render(
            "{% set __budget__ = 1 %}{% for i in range(90000) %}{% for j in range(90000) %}"
            "{% endfor %}{% endfor %}"
        )


def test_render__the_message_of_the_template__is_the_cause() -> None:
    with pytest.raises(MoetError, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")
