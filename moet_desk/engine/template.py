"""Chat templates: a model's own Jinja template run in a sandbox with limits.

A template is code from a download, so it gets no attribute of Python objects that the sandbox does
not allow, a short list of filters, a budget of loop steps, and limits on the text it may make.
Whatever goes wrong in it is MD-CHAT-01. Rendering is pure but for the clock; any thread may render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moet_desk.engine.reasoning import SWITCHES, levels_of
from moet_desk.errors import MoetError, fail

MAX_OUTPUT_CHARS = 16_000_000  # 1M tokens of context are about 4M characters
MAX_LOOP_STEPS = 1_000_000  # 10,000 messages with 100 steps each
_MAX_PADDING = 10_000

# Only filters that make no more text than they are given, or that are checked below.
_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float forceescape groupby int items
    join last length list lower map max min reject rejectattr replace reverse round safe select
    selectattr sort string sum title trim unique upper
"""
_PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
# Large field widths in a format string, and widths that come as arguments.
_WIDTH = re.compile(r"\d{5,}|\{[^{}]*:[^{}]*\{|%[-#0 +.\d]*\*")
_STEP, _CONCATENATE = " step", " concatenate"  # names of filters that a template cannot spell
# Read from the context's parent, which assignments in a template do not reach.
_BUDGET = "__budget__"


class _LimitReached(Exception):
    """The template used more loop steps or text than it may."""


class _Budget:
    """What one rendering may still use; owned by that call."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = MAX_LOOP_STEPS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _LimitReached(f"it runs more than {MAX_LOOP_STEPS:,} loop steps")


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a budget for loops and macros, and a limit on what operators may build."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            step = nodes.Filter(nodes.Const(None), _STEP, [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step))  # type: ignore[attr-defined]
        _replace_concatenations(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_repeat(left, right)
        elif operator == "**" and not (abs(left) < 1e6 and abs(right) < 64):
            raise _LimitReached("it raises a large number to a power")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, str | list | tuple):
            _check_size(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        _check_format(value.__self__)
        return wrapped

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, getattr(function, "__name__", ""), args)
        return super().call(context, function, *args, **kwargs)


class ChatTemplate:
    """One compiled chat template. Immutable; safe to use from any thread."""

    __slots__ = ("_now", "_reads_thinking", "_template", "_tokens", "efforts", "switches")

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template.

        Args:
            source: the Jinja text.
            tokens: names that templates use for special tokens, e.g. {"bos_token": "<s>"}.
            now: the clock behind `strftime_now`.

        Raises:
            MoetError: MD-CHAT-01, the template is not valid.
        """
        self._tokens = dict(tokens)
        self._now = now
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as problem:
            raise _refused(problem) from problem
        names = {node.name for node in tree.find_all(nodes.Name)}
        fields = {node.attr for node in tree.find_all(nodes.Getattr)}
        # gpt-oss's name for what the others call reasoning_content
        self._reads_thinking = "thinking" in fields and "reasoning_content" not in fields
        self.switches = tuple(name for name in SWITCHES if name in names)
        self.efforts = levels_of({str(node.value) for node in tree.find_all(nodes.Const)})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        switches: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Args:
            messages: prepared messages (see `engine.messages`).
            tools: prepared tools, empty for none.
            add_generation_prompt: end with the opening of an assistant turn.
            switches: further variables; only those of `SWITCHES` count.

        Raises:
            MoetError: MD-CHAT-01, the template raised an error or went over a limit.
        """
        variables = {
            **{name: value for name, value in (switches or {}).items() if name in SWITCHES},
            **self._tokens,
            "messages": [_with_thinking(m) for m in messages] if self._reads_thinking else messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": lambda layout: self._now().strftime(layout),
            _BUDGET: _Budget(),
        }
        try:
            return _join_limited_output(self._template.generate(variables))
        except MoetError:
            raise
        except Exception as problem:  # a template is foreign code and may raise anything
            raise _refused(problem) from problem


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning as `thinking`; beside a call the template takes that or text."""
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message.get("content")):
        return message
    return {"thinking": reasoning, **message}


def _environment() -> _Sandbox:
    sandbox = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlock],
    )
    originals = sandbox.filters
    sandbox.filters = {name: originals[name] for name in _FILTERS.split()}
    sandbox.filters |= {
        _STEP: _take_step,
        _CONCATENATE: _concatenate,
        "tojson": _to_json,
        "from_json": json.loads,
        "indent": _indent_filter(originals["indent"]),
        "join": _join_filter,
        "replace": _replace_filter,
    }
    return sandbox


def _refused(problem: BaseException) -> MoetError:
    reason = str(problem).strip().rstrip(".") or type(problem).__name__
    line = getattr(problem, "lineno", None)
    return fail("MD-CHAT-01", reason=f"line {line}: {reason}" if line else reason)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _join_limited_output(chunks: Iterable[str]) -> str:
    kept: list[str] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        _check_size(size)
        kept.append(chunk)
    return "".join(kept)


def _replace_concatenations(tree: nodes.Template) -> None:
    """Turn `a ~ b` into a filter, since the sandbox cannot intercept that operator."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, _concatenation(value))
            elif isinstance(value, list):
                value[:] = [_concatenation(v) if isinstance(v, nodes.Concat) else v for v in value]


def _concatenation(node: nodes.Concat) -> nodes.Filter:
    first, *others = node.nodes
    return nodes.Filter(first, _CONCATENATE, others, [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _take_step(context: Context, _: None) -> None:
    """Count one loop step or macro call."""
    budget: _Budget = context.parent[_BUDGET]
    budget.step()


def _concatenate(*parts: object) -> str:
    """Join text as the `~` operator does, with a limit."""
    return _limited_join("", parts)


def _check_size(n_items: int) -> None:
    if n_items > MAX_OUTPUT_CHARS:
        raise _LimitReached(f"it makes more than {MAX_OUTPUT_CHARS:,} characters")


def _check_repeat(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            _check_size(len(sequence) * times)


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise _LimitReached("it formats text to a large width")


def _check_text_method(owner: str, method: str, args: tuple[Any, ...]) -> None:
    """Refuse calls of str methods whose result could be much larger than what goes in."""
    if method in _PADDING_METHODS:
        if any(isinstance(arg, int) and arg > _MAX_PADDING for arg in args):
            raise _LimitReached("it pads text to a large width")
    elif method == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif method == "join" and args and isinstance(args[0], Sequence):
        _limited_join(owner, args[0])


def _check_replace(text: str, old: object, new: object) -> None:
    _check_size(len(text) + (text.count(str(old)) + 1) * len(str(new)))


def _limited_join(separator: str, parts: Iterable[object]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _join_filter(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        value = (item[attribute] for item in value)
    return _limited_join(str(d), value)


def _replace_filter(s: object, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(s), old, new)
    return str(s).replace(str(old), str(new), -1 if count is None else count)


def _indent_filter(original: Callable[..., str]) -> Callable[..., str]:
    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = len(width) if isinstance(width, str) else width
        _check_size(len(s) + (s.count("\n") + 1) * size)
        return original(s, width, first, blank)

    return indent


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    if isinstance(indent, int) and indent > 16:
        raise _LimitReached("it indents JSON by more than 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
