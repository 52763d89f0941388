"""How a model answers, in words that every part may hold: the engine, its handle, front ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CallFormat(Enum):
    """How a model writes calls."""

    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    GLM45 = "glm45"
    GLM47 = "glm47"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DSML = "dsml"
    DSML_V32 = "dsml_v32"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    LONGCAT = "longcat"
    HARMONY = "harmony"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class Think:
    """The tags around a model's reasoning."""

    open: str
    close: str


THINK = Think("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model answers: the form of its calls, and the tags of its reasoning, if it has any."""

    calls: CallFormat = CallFormat.HERMES
    think: Think | None = None


class PromptEnd(Enum):
    """What a prompt says of reasoning at its end."""

    UNSAID = "unsaid"  # the model may begin to reason
    REASONING = "reasoning"  # it is in the middle of it
    ANSWER = "answer"  # it has been closed
