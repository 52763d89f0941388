"""Answers of a given form: which tokens may come next, by llguidance's masks.

`Grammars` belongs to a model and compiles in the thread that submits a request. A `Constraint`
belongs to one answer and to the engine thread; the sampler asks it before each choice and tells it
the token, in order, so guesses (drafts) that were not taken never reach it. What it allows depends
on the tokens so far alone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from moet_desk.engine.call_grammar import (
    MAX_CALLS,
    CallRules,
    Lark,
    json_schema,
    on_channels,
    writes_json,
)
from moet_desk.engine.handle import GenerateRequest, Grammar, GrammarKind
from moet_desk.engine.json_numbers import DigitCount, begins_with_digit
from moet_desk.engine.parsers.answers import CallFormat, PromptEnd
from moet_desk.engine.parsers.arguments import ToolBook
from moet_desk.engine.text import Text
from moet_desk.errors import MoetError, fail

# With the library's own limit a pattern like (a{1000}){1000} takes 12 s at its first mask, and a
# running answer would wait for it; with this one 0.2 s. A schema of 1000 strings stays far below.
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=50_000)


_PLACE = re.compile(r"^at \d+\(\d+\): |\n\s*\d+ \|.*", re.DOTALL)
"""Where in our own grammar a problem is: nothing to the reader."""


_LARGEST, _LARGEST_STEP = 2**53, 100_000
_NO_DETAILS = "\n<non-verbose/>"


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a vocabulary has for numbers.

    Attributes:
        bytes_of: of a token.
        digits: [V] bool, the tokens that begin with a digit.
    """

    bytes_of: Callable[[int], bytes]
    digits: Tensor


class Constraint:
    """Which tokens one answer may go on with."""

    __slots__ = ("_close", "_count", "_eos", "_matcher", "_numbers", "_open", "_reasons")

    def __init__(
        self, matcher: Any, *, eos: frozenset[int], opens: int | None, closes: int | None,
        reasons: bool, numbers: Numbers | None = None,
    ) -> None:  # fmt: skip
        """Begin an answer.

        Args:
            matcher: of llguidance, at its beginning.
            eos: end tokens.
            opens: the token that begins reasoning, if the answer may begin with it.
            closes: the token that ends reasoning.
            reasons: the prompt ends inside of reasoning; that is free text up to `closes`.
            numbers: limits the digits of numbers, for answers in JSON.
        """
        self._numbers, self._count = numbers, DigitCount()
        self._matcher, self._eos = matcher, eos
        self._open, self._close, self._reasons = opens, closes, reasons

    def apply(self, logits: Tensor) -> Tensor:
        """The logits with -inf for what may not come.

        Shapes:
            logits [V] float32, left unchanged

        Raises:
            MoetError: MD-GRAM-02, nothing may come, or the grammar grew too large.
        """
        vocab = logits.shape[0]
        if self._reasons:
            barred = torch.zeros(vocab, dtype=torch.bool)
            barred[sorted(self._eos)] = True
            return logits.masked_fill(barred, -torch.inf)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=vocab, bitorder="little").astype(bool))
        if self._numbers is not None and self._count.is_full:
            shorter = allowed & ~self._numbers.digits[:vocab]
            allowed = shorter if bool(shorter.any()) else allowed
        if self._open is not None:
            allowed[self._open] = True
        if self._matcher.is_error() or not bool(allowed.any()):
            raise _broken(self._matcher)
        return logits.masked_fill(~allowed, -torch.inf)

    def take(self, token_id: int) -> None:
        """The answer goes on with this token.

        Raises:
            MoetError: MD-GRAM-02, the grammar cannot go on with it.
        """
        if self._reasons:
            self._reasons = token_id != self._close
            return
        self._reasons, self._open = token_id == self._open, None
        if self._reasons:
            return
        if not self._matcher.consume_token(token_id):
            raise _broken(self._matcher)
        if self._numbers is not None:
            self._count.read(self._numbers.bytes_of(token_id))


class Grammars:
    """Compiles the grammars of a model's requests."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._made: Any = None
        self._numbers: Numbers | None = None

    def constraint(self, request: GenerateRequest, end: PromptEnd) -> Constraint | None:
        """The constraint of a request; None if its answer is free.

        Args:
            request: may ask for a form, for calls, or both: then either will do.
            end: what its prompt says of reasoning.

        Raises:
            MoetError: MD-GRAM-01, it cannot be enforced; MD-API-04, a parameter rules it out.
        """
        if request.grammar is None and not request.must_call:
            return None
        if request.ignore_eos:
            raise fail("MD-API-04", parameter="ignore_eos", reason="this answer has a set form")
        tokenizer = self._tokenizer()
        try:
            grammar = self._grammar(request)
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        except (ValueError, TypeError, RecursionError) as problem:  # half characters and the like
            raise _refused(_parameter(request), str(problem)) from problem
        if not matcher.is_error():
            matcher.compute_bitmask()  # the dearest one; here it holds up no running answer
        if matcher.is_error():
            reason = matcher.get_error().removesuffix(_NO_DETAILS)
            if reason.startswith("NoExtension"):
                reason = "no answer has this form"
            raise _refused(_parameter(request), reason)
        is_json = request.grammar is None or request.grammar.kind is GrammarKind.JSON_SCHEMA
        has_json = is_json and (not request.tools or writes_json(self._text.answers.calls))
        return self._begin(matcher, end, self._numbers if has_json else None)

    def _begin(self, matcher: Any, end: PromptEnd, numbers: Numbers | None) -> Constraint:
        answers, controls = self._text.answers, self._text.controls
        opens = closes = None
        if answers.think is not None:
            opens, closes = controls.get(answers.think.open), controls.get(answers.think.close)
        if end is PromptEnd.REASONING and closes is None:
            raise _refused("messages", "the end of this model's reasoning is no token of its own")
        may_open = end is PromptEnd.UNSAID and closes is not None
        return Constraint(
            matcher, eos=self._text.eos_ids, opens=opens if may_open else None, closes=closes,
            reasons=end is PromptEnd.REASONING, numbers=numbers,
        )  # fmt: skip

    def _grammar(self, request: GenerateRequest) -> str:
        lark, calls = Lark(self._text.controls), self._text.answers.calls
        answer, extra = None, ""
        if request.grammar is not None and not request.must_call:
            answer, extra = _answer(lark, request.grammar)
        called = self._calls(lark, request) if request.tools else None
        if calls is CallFormat.HARMONY:
            start = on_channels(lark, answer, called)
        else:
            start = " | ".join(part for part in (answer, called) if part is not None)
        whole = lark.whole(start)
        if not extra:
            return whole
        parts = [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": extra}]
        return json.dumps({"grammars": parts})

    def _calls(self, lark: Lark, request: GenerateRequest) -> str:
        tools = ToolBook.of(request.tools)
        strict = frozenset(filter(None, map(_strict_name, request.tools)))
        names = request.must_call or tuple(tools.schemas)
        for name in names:
            if name not in tools.schemas:
                raise _refused("tool_choice", f"there is no tool {name!r}")
            _check_schema("tools", tools.schemas[name], f"{name}: ", strict=name in strict)
        rules = CallRules(lark, self._text.answers.calls, tools, strict)
        return rules.one_of(names, most=1 if request.one_call else MAX_CALLS)

    def _tokenizer(self) -> Any:
        """The model's vocabulary for llguidance; made when a request first needs it."""
        with self._lock:
            if self._made is None:
                text = self._text
                if not text.eos_ids:
                    raise _refused("model", "it has no end token")
                spelt = [text.token_bytes(i) for i in range(text.vocab_size)]
                digits = torch.tensor([begins_with_digit(one) for one in spelt])
                self._numbers = Numbers(text.token_bytes, digits)
                try:
                    self._made = llguidance.LLTokenizer(
                        text.control_spec(), n_vocab=text.vocab_size, eos_token=sorted(text.eos_ids)
                    )
                except Exception as problem:  # the library raises what it likes
                    raise _refused("model", f"its tokenizer: {problem}") from problem
            return self._made


def _answer(lark: Lark, grammar: Grammar) -> tuple[str, str]:
    """An expression for the answer's text, and a grammar that it uses as "answer"."""
    if grammar.kind is GrammarKind.LARK:
        return lark.named("@answer"), grammar.text
    if grammar.kind is GrammarKind.REGEX:
        return lark.named("/" + llguidance.regex_to_lark(grammar.text, "d") + "/"), ""
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as problem:
        raise _refused("response_format", f"the schema is not JSON: {problem}") from problem
    if not isinstance(schema, dict):
        raise _refused("response_format", "the schema is not an object")
    _check_schema("response_format", schema, strict=grammar.strict)
    return lark.json(schema, strict=grammar.strict), ""


def _check_schema(
    parameter: str, schema: Mapping[str, Any], where: str = "", *, strict: bool
) -> None:
    """Refuse a schema by itself: the reason is clearer than that of the grammar around it."""
    reason = _too_large(schema)
    if reason is not None:
        raise _refused(parameter, where + reason)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(json_schema(schema, strict=strict))
    )
    problem = llguidance.LLMatcher.validate_grammar(grammar, None, limits=_LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise _refused(parameter, where + problem)


def _too_large(value: object) -> str | None:
    """What a schema must not ask of the library (seen with 1.9.1): `{"const": -2**63}` ends the
    process by a stack overflow, and a `multipleOf` takes 10 us for each one it counts up to.
    """
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest += one.values()
            step = one.get("multipleOf")
            if isinstance(step, int | float) and step > _LARGEST_STEP:
                return f"multipleOf above {_LARGEST_STEP} cannot be enforced"
        elif isinstance(one, list):
            rest += one
        elif isinstance(one, int | float) and not abs(one) <= _LARGEST:
            return "numbers beyond 2**53 cannot be enforced"
    return None


def _strict_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function", tool)
    is_strict = isinstance(function, Mapping) and function.get("strict") is True
    return str(function.get("name")) if is_strict else None


def _parameter(request: GenerateRequest) -> str:
    return "tool_choice" if request.must_call else "response_format"


def _refused(parameter: str, reason: str) -> MoetError:
    words = " ".join(_PLACE.sub("", reason).split()).removesuffix(".")
    return fail("MD-GRAM-01", parameter=parameter, reason=words)


def _broken(matcher: Any) -> MoetError:
    reason = matcher.get_error().partition("\n")[0] or "no token may come next"
    return fail("MD-GRAM-02", reason=reason)
