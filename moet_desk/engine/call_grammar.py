"""Grammars (llguidance's Lark) of answers with a given form: calls in a model's own syntax, JSON.

Pure text work. Tags that are control tokens of the model are asked for as those tokens; the text
of a value can therefore never hold one. What the parsers of `engine/parsers` read is what is
written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moet_desk.engine.parsers.answers import CallFormat
from moet_desk.engine.parsers.arguments import Schema, ToolBook, schema_types

MAX_CALLS = 32
"""Calls in one answer."""

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """Rules of a grammar as they are added; every method returns an expression that uses them.

    Args:
        controls: the model's control tokens, text -> id.
    """

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        self._rules: list[str] = []
        ordered = sorted(controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")

    def whole(self, start: str) -> str:
        """The grammar whose answers are `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def named(self, expression: str, attributes: str = "") -> str:
        """A rule of its own."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def terminal(self, pattern: str) -> str:
        """Text that matches a pattern, written with its slashes."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {pattern}")
        return name

    def literal(self, text: str) -> str:
        """This text, with its control tokens as such."""
        parts: list[str] = []
        at = 0
        for match in self._pattern.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self._controls[match[0]]}]>"]
            at = match.end()
        parts.append(_quoted(text[at:]))
        return " ".join(part for part in parts if part) or '""'

    def json(self, schema: Schema, *, strict: bool) -> str:
        """JSON that a schema allows, on one line."""
        text = json.dumps(json_schema(schema, strict=strict))
        return self.named(f"%json {text}")

    def until(self, closer: str) -> str:
        """Any text, then `closer` at its first place."""
        control = self._pattern.search(closer)
        if control is None:
            return self.named("/(?s:.*)/", f"[suffix={_quoted(closer)}]")
        head, rest = closer[: control.start()].strip(), self.literal(closer[control.start() :])
        if not head:
            return f"{self.terminal('/(?s:.*)/')} {rest}"
        # What begins the closer may also be text of the value: then no control token follows.
        part = self.named("/(?s:.*)/", f"[suffix={_quoted(head)}]")
        return f"{part}+ {rest}"


def json_schema(schema: Schema, *, strict: bool) -> Schema:
    """A schema with how its JSON is written; not strict: what cannot be enforced is left out."""
    return {**schema, "x-guidance": {**_JSON_STYLE, "lenient": not strict}}


@dataclass(frozen=True, slots=True)
class _Shape:
    """How calls of one format are written. Where two ways go on, the texts must part at once: the
    lexer takes the longest and never goes back.

    Attributes:
        head: what comes before the arguments; `{name}` is the tool's.
        tail: what comes behind them.
        parameter: head, and tail behind a value, for formats with a tag per parameter; `{key}`,
            and `{text}` is true or false. None: the arguments are one JSON object.
        prefix, between, suffix: around all calls.
    """

    head: str
    tail: str
    parameter: tuple[str, str] | None = None
    prefix: str = ""
    between: str = "\n"
    suffix: str = ""


_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DSML = "｜DSML｜"


def _dsml(block: str) -> _Shape:
    return _Shape(
        f'<{_DSML}invoke name="{{name}}">\n', f"</{_DSML}invoke>\n",
        (
            f'<{_DSML}parameter name="{{key}}" string="{{text}}">',
            f"</{_DSML}parameter>\n",
        ),
        prefix=f"<{_DSML}{block}>\n", between="", suffix=f"</{_DSML}{block}>",
    )  # fmt: skip


_SHAPES: Mapping[CallFormat, _Shape] = {
    CallFormat.HERMES: _Shape(
        '<tool_call>{newline}{{"name": {quoted}, "arguments": ', "}{newline}</tool_call>"
    ),
    CallFormat.QWEN3_CODER: _Shape(
        "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>",
        ("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    CallFormat.GLM45: _Shape(
        "<tool_call>{name}\n", "</tool_call>",
        ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    CallFormat.GLM47: _Shape(
        "<tool_call>{name}", "</tool_call>",
        ("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"), between="",
    ),
    CallFormat.LONGCAT: _Shape(
        "<longcat_tool_call>{name}\n", "</longcat_tool_call>",
        ("<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
    ),
    CallFormat.DEEPSEEK_V3: _Shape(
        f"{_BEGIN}function{_SEPARATOR}{{name}}\n```json\n", f"\n```{_END}",
        prefix=_SECTION, suffix=_SECTION_END,
    ),
    CallFormat.DEEPSEEK_V31: _Shape(
        f"{_BEGIN}{{name}}{_SEPARATOR}", _END, prefix=_SECTION, between="", suffix=_SECTION_END
    ),
    CallFormat.DSML: _dsml("tool_calls"),
    CallFormat.DSML_V32: _dsml("function_calls"),
    CallFormat.KIMI_K2: _Shape(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        prefix="<|tool_calls_section_begin|>", between="", suffix="<|tool_calls_section_end|>",
    ),
    CallFormat.MINIMAX_M2: _Shape(
        '<invoke name="{name}">\n', "</invoke>\n",
        ('<parameter name="{key}">', "</parameter>\n"),
        prefix="<minimax:tool_call>\n", between="", suffix="</minimax:tool_call>",
    ),
    CallFormat.HARMONY: _Shape(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""
    ),
    CallFormat.MISTRAL: _Shape("[TOOL_CALLS]{name}[ARGS]", "", between=""),
}  # fmt: skip

_MISTRAL_LIST = _Shape(
    '{{"name": {quoted}, "arguments": ', "}", prefix="[TOOL_CALLS] [", between=", ", suffix="]"
)

_HARMONY_ANALYSIS = "<|channel|>analysis<|message|>"
_HARMONY_NEXT = "<|end|><|start|>assistant"
_HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class CallRules:
    """Calls as rules of a grammar.

    Attributes:
        lark: where the rules go.
        calls: the model's format.
        tools: what may be called.
        strict: names of tools whose schema must be enforced as a whole.
    """

    lark: Lark
    calls: CallFormat
    tools: ToolBook
    strict: frozenset[str] = field(default_factory=frozenset)

    def one_of(self, names: Sequence[str], *, most: int) -> str:
        """One to `most` calls of these tools."""
        shape = self._shape()
        most = 1 if self.calls is CallFormat.HARMONY else most  # an end token closes each call
        calls = self.lark.named(" | ".join(self._call(shape, name) for name in names))
        more = f" ({self.lark.literal(shape.between)} {calls}){{0,{most - 1}}}" if most > 1 else ""
        parts = [self.lark.literal(shape.prefix), calls + more, self.lark.literal(shape.suffix)]
        return self.lark.named(" ".join(part for part in parts if part != '""'))

    def _shape(self) -> _Shape:
        # Without [ARGS] among its tokens, a Mistral model writes a list.
        is_list = self.calls is CallFormat.MISTRAL and self.lark.literal("[ARGS]").startswith('"')
        return _MISTRAL_LIST if is_list else _SHAPES[self.calls]

    def _call(self, shape: _Shape, name: str) -> str:
        schema = self.tools.schemas[name]
        if shape.parameter is None:
            arguments = {"type": "object", **schema}
            body = self.lark.json(arguments, strict=name in self.strict)
        else:
            body = self._parameters(shape.parameter, name, schema)
        return self.lark.named(f"{self._head(shape.head, name)} {body} {self._tail(shape.tail)}")

    def _head(self, head: str, name: str) -> str:
        if self.calls is CallFormat.KIMI_K2:
            before, _, behind = head.partition("{number}")
            number = self.lark.terminal("/[0-9]{1,4}/")
            before = self.lark.literal(before.format(name=name))
            return f"{before} {number} {self.lark.literal(behind)}"
        quoted = json.dumps(name, ensure_ascii=False)
        if "{newline}" not in head:
            return self.lark.literal(head.format(name=name, quoted=quoted))
        before, behind = head.format(name=name, quoted=quoted, newline="\0").split("\0")
        return f'{self.lark.literal(before)} "\\n"? {self.lark.literal(behind)}'

    def _tail(self, tail: str) -> str:
        before, newline, behind = tail.partition("{newline}")
        if not newline:
            return self.lark.literal(tail)
        return f'{self.lark.literal(before)} "\\n"? {self.lark.literal(behind)}'

    def _parameters(self, form: tuple[str, str], name: str, schema: Schema) -> str:
        properties = schema.get("properties")
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        parts: list[str] = []
        for key, its in properties.items() if isinstance(properties, Mapping) else ():
            one = self.lark.named(self._parameter(form, name, key, its, schema))
            parts.append(one if key in required else f"{one}?")
        return " ".join(parts) or '""'

    def _parameter(
        self, form: tuple[str, str], name: str, key: str, schema: object, root: Schema
    ) -> str:
        its: Schema = schema if isinstance(schema, Mapping) else {}
        types = schema_types(its, root)
        if "string" not in types:
            shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
            return self._json_value(form, key, {**shared, **its}, strict=name in self.strict)
        head = self.lark.literal(form[0].format(key=key, text="true"))
        choices = its.get("enum", [its["const"]] if "const" in its else None)
        if isinstance(choices, list) and choices:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in choices)
            known = self.lark.named(" | ".join(self.lark.literal(text) for text in texts))
            return f"{head} {known} {self.lark.literal(form[1])}"
        value = f"{head} {self._text(form[1])}"
        if types == {"string"} or "{text}" not in form[0]:
            return value
        others = {"type": sorted(types - {"string"})}
        return f"{value} | {self._json_value(form, key, others, strict=True)}"

    def _json_value(self, form: tuple[str, str], key: str, schema: Schema, *, strict: bool) -> str:
        head = self.lark.literal(form[0].format(key=key, text="false"))
        return f"{head} {self.lark.json(schema, strict=strict)} {self.lark.literal(form[1])}"

    def _text(self, closer: str) -> str:
        """Text up to its closing tag, and what follows that."""
        tag = closer.rstrip("\n")
        behind = closer[len(tag) :]
        return self.lark.until(tag) + (f" {self.lark.literal(behind)}" if behind else "")


def writes_json(calls: CallFormat) -> bool:
    """Whether a format writes the arguments of a call as one JSON object."""
    return _SHAPES[calls].parameter is None


def on_channels(lark: Lark, answer: str | None, calls: str | None) -> str:
    """A harmony answer: maybe reasoning, then text of a form on the final channel, or a call."""
    analysis = lark.named(f"{lark.literal(_HARMONY_ANALYSIS)} {lark.until(_HARMONY_NEXT)}")
    parts = [] if calls is None else [calls]
    if answer is not None:
        parts.append(lark.named(f"{lark.literal(_HARMONY_FINAL)} {answer}"))
    return f"{analysis}? ({' | '.join(parts)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
