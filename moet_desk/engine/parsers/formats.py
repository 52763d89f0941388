"""Which format a model answers in, and a parser for one answer.

Decided once, when a model is loaded, from what its chat template writes, else from its model_type.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moet_desk.engine.parsers.answers import (
    THINK,
    AnswerFormat,
    CallFormat,
    PromptEnd,
    Think,
)
from moet_desk.engine.parsers.arguments import ToolBook
from moet_desk.engine.parsers.base import Syntax, TagParser
from moet_desk.engine.parsers.deepseek import DEEPSEEK
from moet_desk.engine.parsers.events import Parser
from moet_desk.engine.parsers.glm import GLM, LONGCAT
from moet_desk.engine.parsers.harmony import HarmonyParser
from moet_desk.engine.parsers.hermes import HERMES
from moet_desk.engine.parsers.kimi import KIMI_K2
from moet_desk.engine.parsers.mistral import MISTRAL, MISTRAL_THINK
from moet_desk.engine.parsers.xml_calls import DSML, MINIMAX_M2, QWEN3_CODER

_SYNTAX: Mapping[CallFormat, Syntax] = {
    CallFormat.HERMES: HERMES,
    CallFormat.QWEN3_CODER: QWEN3_CODER,
    CallFormat.GLM45: GLM,
    CallFormat.GLM47: GLM,
    CallFormat.DEEPSEEK_V3: DEEPSEEK,
    CallFormat.DEEPSEEK_V31: DEEPSEEK,
    CallFormat.DSML: DSML,
    CallFormat.DSML_V32: DSML,
    CallFormat.KIMI_K2: KIMI_K2,
    CallFormat.MINIMAX_M2: MINIMAX_M2,
    CallFormat.LONGCAT: LONGCAT,
    CallFormat.MISTRAL: MISTRAL,
}

# The first whose pattern is in the template. Formats that share tags come from the special case to
# the general one.
_MARKS: Sequence[tuple[str, CallFormat]] = (
    (r"｜DSML｜function_calls", CallFormat.DSML_V32),
    (r"｜DSML｜", CallFormat.DSML),
    (r"<｜tool▁call▁begin｜>(?s:.*)```json", CallFormat.DEEPSEEK_V3),
    (r"<｜tool▁call▁begin｜>", CallFormat.DEEPSEEK_V31),
    (r"<\|tool_call_begin\|>", CallFormat.KIMI_K2),
    (r"<minimax:tool_call>", CallFormat.MINIMAX_M2),
    (r"<longcat_tool_call>", CallFormat.LONGCAT),
    (r"<\|channel\|>", CallFormat.HARMONY),
    (r"\[TOOL_CALLS\]", CallFormat.MISTRAL),
    (r"<function=", CallFormat.QWEN3_CODER),
    (r"</arg_key><arg_value>", CallFormat.GLM47),
    (r"<arg_key>", CallFormat.GLM45),
    (r"<tool_call>", CallFormat.HERMES),
)

_OF_TYPE: Mapping[str, CallFormat] = {
    "deepseek_v3": CallFormat.DEEPSEEK_V3,
    "deepseek_v32": CallFormat.DSML_V32,
    "deepseek_v4": CallFormat.DSML,
    "glm4_moe": CallFormat.GLM45,
    "glm4_moe_lite": CallFormat.GLM47,
    "glm_moe_dsa": CallFormat.GLM47,
    "gpt_oss": CallFormat.HARMONY,
    "kimi_k2": CallFormat.KIMI_K2,
    "kimi_k25": CallFormat.KIMI_K2,
    "kimi_linear": CallFormat.KIMI_K2,
    "longcat_flash": CallFormat.LONGCAT,
    "longcat_flash_ngram": CallFormat.LONGCAT,
    "minimax_m2": CallFormat.MINIMAX_M2,
    "mixtral": CallFormat.MISTRAL,
    "qwen3_moe": CallFormat.HERMES,
    "qwen3_next": CallFormat.HERMES,
    "qwen3_5_moe": CallFormat.QWEN3_CODER,
}

_THINKS: Sequence[Think] = (Think("<longcat_think>", "</longcat_think>"), MISTRAL_THINK, THINK)
_THINKING_TYPES = frozenset(("deepseek_v32", "deepseek_v4"))  # they have no template


def choose_format(model_type: str, template: str | None) -> AnswerFormat:
    """The format of a model.

    Args:
        model_type: of its config.json.
        template: its chat template, None if it has none.
    """
    text = template or ""
    by_type = _OF_TYPE.get(model_type, CallFormat.HERMES)
    calls = next((calls for mark, calls in _MARKS if re.search(mark, text)), by_type)
    if calls is CallFormat.HARMONY:
        return AnswerFormat(calls)
    think = next((think for think in _THINKS if think.close in text or think.open in text), None)
    if think is None and model_type in _THINKING_TYPES:
        think = THINK
    return AnswerFormat(calls, think)


def prompt_end(prompt: str, answers: AnswerFormat) -> PromptEnd:
    """What the end of a rendered prompt says of reasoning."""
    end = prompt.rstrip()
    if answers.think is None:
        return PromptEnd.UNSAID
    if end.endswith(answers.think.open):
        return PromptEnd.REASONING
    return PromptEnd.ANSWER if end.endswith(answers.think.close) else PromptEnd.UNSAID


def reasoning_ends(answers: AnswerFormat, *, calls: bool) -> tuple[str, ...]:
    """Texts behind which an answer does not reason any more, as its parser sees it.

    `calls`: whether the request offers tools.
    """
    if answers.think is None:
        return ()
    syntax = _SYNTAX[answers.calls] if calls else None
    opens = syntax.opens if syntax is not None and syntax.in_reasoning else ()
    return (answers.think.close, *opens)


def make_parser(
    answers: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    in_reasoning: bool = False,
) -> Parser:
    """The parser of one answer.

    Args:
        answers: the model's format.
        tools: what the request offers; without any, calls are text.
        in_reasoning: the prompt ends inside of reasoning.
    """
    book = ToolBook.of(tools)
    if answers.calls is CallFormat.HARMONY:
        return HarmonyParser(book, calls=bool(tools))
    syntax = _SYNTAX[answers.calls] if tools else None
    return TagParser(syntax, book, think=answers.think, in_reasoning=in_reasoning)
