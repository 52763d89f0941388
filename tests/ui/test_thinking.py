"""Reasoning and answer told apart, with the marks of the answer, however the text was cut."""

from __future__ import annotations

import pytest

from moet_desk.engine.handle import RequestStream
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat, PromptEnd
from moet_desk.marked_text import MarkedText, join
from moet_desk.ui.thinking import Splitter


def stream_of(answers: AnswerFormat, end: PromptEnd = PromptEnd.UNSAID) -> RequestStream:
    stream = RequestStream("r", lambda _: None)
    stream.answers, stream.prompt_end = answers, end
    return stream


HARMONY = AnswerFormat(CallFormat.HARMONY)
THINKS = AnswerFormat(think=THINK)
CASES = [
    (THINKS, PromptEnd.UNSAID, "<think>\nHm, t.\n</think>\n\nthe end", "Hm, t.", "the end"),
    (THINKS, PromptEnd.REASONING, "so it is</think>it is", "so it is", "it is"),
    (THINKS, PromptEnd.UNSAID, "no thought at all", "", "no thought at all"),
    (THINKS, PromptEnd.UNSAID, "<think>never ends", "never ends", ""),
    (THINKS, PromptEnd.UNSAID, "a <think> b </think> c", "", "a <think> b </think> c"),
    (AnswerFormat(), PromptEnd.UNSAID, "<think>a</think>b", "", "<think>a</think>b"),
    (
        HARMONY, PromptEnd.UNSAID,
        "<|channel|>analysis<|message|>an answer<|end|><|start|>assistant"
        "<|channel|>final<|message|>an answer<|return|>",
        "an answer", "an answer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "end", "text", "thought", "answer"), CASES)
def test_splitter__any_cut__thought_answer_and_marks(
    answers: AnswerFormat, end: PromptEnd, text: str, thought: str, answer: str
) -> None:
    at = text.rfind(answer) if answer else 0
    marked = MarkedText(text, ((at, at + 2), (at + 4, at + 5)) if len(answer) > 5 else ())
    expected = MarkedText(answer, ((0, 2), (4, 5)) if len(answer) > 5 else ())
    for cut in range(1, len(text)):
        splitter = Splitter(stream_of(answers, end))
        told = [splitter.feed(marked.cut(0, cut)), splitter.feed(marked.cut(cut))]
        told.append(splitter.finish())
        assert "".join(piece for piece, _ in told) == thought, cut
        assert join(piece for _, piece in told) == expected, cut
