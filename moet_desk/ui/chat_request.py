"""From a chat to the request for its next answer, and from usage to what is kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moet_desk.engine.handle import GenerateRequest, ModelInfo
from moet_desk.engine.reasoning import effort_switches
from moet_desk.telemetry import Usage
from moet_desk.ui.attachments import message_text
from moet_desk.ui.chat_records import Turn, Wishes


def request_of(turns: Sequence[Turn], wishes: Wishes, model: ModelInfo | None) -> GenerateRequest:
    """The request for an answer to some turns. Answers without text are left out."""
    messages = [{"role": "system", "content": wishes.system}] if wishes.system else []
    messages += [
        {"role": turn.role, "content": message_text(turn.text, turn.files)}
        for turn in turns
        if turn.role == "user" or turn.text
    ]
    return GenerateRequest(
        messages=messages,
        sampling=wishes.sampling,
        template=_switches(wishes.effort, model),
        max_tokens=wishes.max_tokens,
        quality=wishes.quality,
        gate=wishes.gate,
        client="chat",
    )


def _switches(effort: str, model: ModelInfo | None) -> dict[str, Any]:
    """Variables of the model's template for an effort; none if it knows none."""
    if model is None or not effort:
        return {}
    try:
        return effort_switches(effort, model)
    except ValueError:  # it was wished for another model
        return {}


def figures_of(usage: Usage) -> dict[str, Any]:
    """The figures of the closing line, as they are stored with a message."""
    return {
        "tokens": usage.completion_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "first_token_s": usage.first_token_s,
        "decode_s": usage.decode_s,
        "wait_s": usage.wait_s,
        "rerun_tokens": usage.rerun_tokens,
        "rerun_s": usage.rerun_s,
        "opportunistic": usage.opportunistic,
    }
