"""A chat template for DeepSeek-V3.2 and V4, which are published with a Python script instead.

The order of a prompt's parts is written here as Jinja. The sentences that the models were trained
with (how tools are described, what asks for more effort) are theirs: they are taken out of the
script that lies beside the weights, which is read, never run. Pure, no torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

V32_SCRIPT, V4_SCRIPT = "encoding/encoding_dsv32.py", "encoding/encoding_dsv4.py"
SCRIPTS = (V32_SCRIPT, V4_SCRIPT)

_LONGEST_SCRIPT = 1 << 20
_TOOLS = "{tool_schemas}"
_MARKS: Mapping[str, str] = {
    "{dsml_token}": "｜DSML｜",
    "{thinking_start_token}": "<think>",
    "{thinking_end_token}": "</think>",
}
_FIELD = re.compile(r"\{(\w*)\}")
_EFFORT = re.compile(r"REASONING_EFFORT_(HIGH|MAX)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sentences:
    """What a model was trained to read.

    Attributes:
        tools: before and behind the tools' schemas; None: the script does not say.
        efforts: put first for a level of effort, by level.
    """

    tools: tuple[str, str] | None
    efforts: Mapping[str, str]

    @classmethod
    def of(cls, script: bytes) -> Sentences:
        """The sentences in a script's constants; none of one that cannot be read."""
        texts = _constants(script)
        tools = next((text for text in texts.values() if _TOOLS in text), None)
        efforts = {
            match[1].lower(): text
            for name, text in texts.items()
            if (match := _EFFORT.fullmatch(name)) is not None
        }
        return cls(None if tools is None else _around_schemas(tools), efforts)


def _constants(script: bytes) -> dict[str, str]:
    """Texts that a module gives names at its top level."""
    if len(script) > _LONGEST_SCRIPT:
        return {}
    try:
        tree = ast.parse(script)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found = {}
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
            ):
                found[name] = text
    return found


def _around_schemas(text: str) -> tuple[str, str] | None:
    """A format string's text on both sides of the schemas; None: it has fields nobody knows."""
    if text.count(_TOOLS) != 1:
        return None
    sides = []
    for side in text.split(_TOOLS):
        for mark, token in _MARKS.items():
            side = side.replace(mark, token)
        if _FIELD.search(side.replace("{{", "").replace("}}", "")):
            return None
        sides.append(side.replace("{{", "{").replace("}}", "}"))
    return sides[0], sides[1]


def template_of(script: bytes, name: str) -> bytes:
    """chat_template.jinja in the order of a script's model.

    Args:
        script: the file's bytes.
        name: one of `SCRIPTS`.
    """
    sentences = Sentences.of(script)
    body = _V32 if name == V32_SCRIPT else _V4
    filled = body.replace("TOOLS", _tools(sentences)).replace("EFFORT", _efforts(sentences))
    return (_HEAD + filled).replace("BLOCK", _BLOCKS[name]).encode()


def _tools(sentences: Sentences) -> str:
    if sentences.tools is None:
        reason = "how this model is told about tools is not in its files"
        return f"{{{{- raise_exception({json.dumps(reason)}) }}}}"
    before, behind = (json.dumps(side, ensure_ascii=False) for side in sentences.tools)
    return _SCHEMAS.replace("BEFORE", before).replace("BEHIND", behind)


def _efforts(sentences: Sentences) -> str:
    """Levels that have no sentence of their own are reasoning as usual."""
    when = '{{%- if effort == "{}" %}}{{{{- {} }}}}{{%- endif %}}'
    return "\n".join(
        when.format(level, json.dumps(text, ensure_ascii=False))
        for level, text in sentences.efforts.items()
    )


_BLOCKS: Mapping[str, str] = {V32_SCRIPT: "function_calls", V4_SCRIPT: "tool_calls"}

_SCHEMAS = r"""
{{- "\n\n" + BEFORE }}
{%- for tool in tools %}
{{- tool.function | tojson }}{% if not loop.last %}{{ "\n" }}{% endif %}
{%- endfor %}
{{- BEHIND }}
""".strip()

_HEAD = r"""
{%- macro calls_of(message) %}
{%- if message.tool_calls %}
{{- "\n\n<｜DSML｜BLOCK>\n" }}
{%- for call in message.tool_calls %}
{{- '<｜DSML｜invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<｜DSML｜parameter name="' + key + '" string="' }}
{{- "true" if value is string else "false" }}
{{- '">' }}{{ value if value is string else value | tojson }}{{ "</｜DSML｜parameter>\n" }}
{%- else %}
{{- "\n" }}
{%- endfor %}
{{- "</｜DSML｜invoke>\n" }}
{%- endfor %}
{{- "</｜DSML｜BLOCK>" }}
{%- endif %}
{%- endmacro %}
{%- set ends = namespace(user=-1) %}
""".lstrip()

_V32 = r"""
{%- set thinks = thinking if thinking is defined else enable_thinking | default(false) %}
{%- for message in messages %}
{%- if message.role == "user" %}{%- set ends.user = loop.index0 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- if messages[0].role == "system" %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
TOOLS
{%- endif %}
{%- for message in messages %}
{%- set answers = not loop.last or add_generation_prompt %}
{%- if message.role == "user" %}
{{- "<｜User｜>" + message.content }}
{%- if answers %}
{{- "<｜Assistant｜>" }}{{ "<think>" if thinks and loop.index0 == ends.user else "</think>" }}
{%- endif %}
{%- elif message.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}{{- "\n\n<function_results>" }}{%- endif %}
{{- "\n<result>" + message.content + "</result>" }}
{%- if loop.last or loop.nextitem.role != "tool" %}
{{- "\n</function_results>" }}
{%- if answers %}
{{- "\n\n" }}{{ "<think>" if thinks and loop.index0 >= ends.user else "</think>" }}
{%- endif %}
{%- endif %}
{%- elif message.role == "assistant" %}
{%- if thinks and loop.index0 > ends.user %}
{{- message.reasoning_content | default("") }}{{ "</think>" }}
{%- endif %}
{{- message.content | default("") }}{{ calls_of(message) }}{{ eos_token }}
{%- endif %}
{%- endfor %}
""".lstrip()

_V4 = r"""
{%- set thinks = thinking if thinking is defined else enable_thinking | default(true) %}
{%- set drops = drop_thinking if drop_thinking is defined else not tools %}
{%- set effort = "max" if reasoning_effort is defined and reasoning_effort == "max" else "high" %}
{%- for message in messages %}
{%- if message.role in ["user", "tool"] %}{%- set ends.user = loop.index0 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- if thinks %}
EFFORT
{%- endif %}
{%- if messages[0].role == "system" %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
TOOLS
{%- endif %}
{%- set run = namespace(calls=[], start=0, count=0, results=[]) %}
{%- for message in messages %}
{%- if message.role in ["user", "tool"] %}
{%- set goes_on = not loop.first and loop.previtem.role in ["user", "tool"] %}
{{- "\n\n" if goes_on else "<｜User｜>" }}
{%- if message.role == "user" %}
{{- message.content }}
{%- else %}
{%- if loop.first or loop.previtem.role != "tool" %}
{%- set run.start, run.count, run.results = loop.index0, 0, [] %}
{%- for other in messages[loop.index0:] %}
{%- if other.role != "tool" %}{%- break %}{%- endif %}
{%- set run.count = loop.index %}
{%- endfor %}
{%- set place = run.start %}
{%- for call in run.calls %}
{%- for other in messages[place:place + run.count] %}
{%- if other.tool_call_id == call.id %}
{%- set run.results = run.results + [other.content] %}
{%- endif %}
{%- endfor %}
{%- endfor %}
{%- endif %}
{%- set in_order = run.results | length == run.count %}
{{- "<tool_result>" }}
{{- run.results[loop.index0 - run.start] if in_order else message.content }}
{{- "</tool_result>" }}
{%- endif %}
{%- set answered = add_generation_prompt if loop.last else loop.nextitem.role == "assistant" %}
{%- if answered %}
{{- "<｜Assistant｜>" }}
{{- "<think>" if thinks and (not drops or loop.index0 >= ends.user) else "</think>" }}
{%- endif %}
{%- elif message.role == "assistant" %}
{%- set run.calls = message.tool_calls or [] %}
{%- if thinks and (not drops or loop.index0 > ends.user) %}
{{- message.reasoning_content | default("") }}{{ "</think>" }}
{%- endif %}
{{- message.content | default("") }}{{ calls_of(message) }}{{ eos_token }}
{%- endif %}
{%- endfor %}
""".lstrip()
