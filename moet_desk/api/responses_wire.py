"""OpenAI's responses, going out: an answer as one body or as a stream of numbered events.

Owns this protocol's words and framing; the loop is `relay`'s. Runs in the endpoint's loop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moet_desk.api.bodies import error_body, logprob_body
from moet_desk.api.chat import KEEP_ALIVE, chat_message
from moet_desk.api.parts import Change, Delta, Kind, Part, Verb
from moet_desk.api.relay import Answer, sse
from moet_desk.api.responses import ResponsesRequest
from moet_desk.errors import MoetError
from moet_desk.telemetry import Usage

_PREFIX: Mapping[Kind, str] = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}


class ResponsesWriter:
    """The `relay.Writer` of responses.

    `keep` is called with the body and the answer's chat message before the client has its last
    byte, so that it can go on from there at once.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        *,
        keep: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._request = request
        self._model = model
        self._keep = keep
        self._created = time.time()
        self._n_events = 0
        self._item_ids: dict[int, str] = {}
        self._logprobs: list[dict[str, Any]] = []

    # -- relay.Writer ------------------------------------------------------------------------

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `relay.Writer`."""
        (answer,) = answers
        self._take_logprobs(answer)
        return self._finish(answer)

    def start(self, answers: Sequence[Answer]) -> bytes:
        """See `relay.Writer`."""
        body = self._body("in_progress", [])
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def add(self, answer: Answer, deltas: list[Delta]) -> bytes:
        """See `relay.Writer`."""
        new = self._take_logprobs(answer)
        frames = []
        for change in answer.changes:
            is_text = change.verb is Verb.GREW and change.part.kind is Kind.TEXT
            frames.append(self._change(change, new if is_text else []))
            new = [] if is_text else new
        return b"".join(frames)

    def close(self, answers: Sequence[Answer]) -> bytes:
        """See `relay.Writer`."""
        body = self._finish(answers[0])
        return self._event(f"response.{body['status']}", response=body)

    def failed(self, error: MoetError) -> bytes:
        """See `relay.Writer`."""
        body = self._body("failed", [])
        words = error_body(error)["error"]
        body["error"] = {"code": "server_error", "message": words["message"]}
        return self._event("response.failed", response=body)

    # -- inside ------------------------------------------------------------------------------

    def _finish(self, answer: Answer) -> dict[str, Any]:
        cut = answer.reason == "length"
        output = [self._item(part, done=True) for part in answer.parts.all]
        body = self._body("incomplete" if cut else "completed", output)
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        if answer.finished is not None:
            body["usage"] = _usage(answer.finished.usage, answer.reasoning_tokens)
        self._keep(body, chat_message(answer))
        return body

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self._request
        effort = None if asked.reasoning is None else asked.reasoning.effort
        kept_format = None if asked.text is None else asked.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": asked.is_kept,
            "temperature": asked.temperature,
            "text": {"format": kept_format or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    def _take_logprobs(self, answer: Answer) -> list[dict[str, Any]]:
        if not self._request.wants_logprobs:
            return []
        new = [logprob_body(token) for token in answer.take_logprobs()]
        self._logprobs += new
        return new

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return sse(body, kind)

    def _change(self, change: Change, logprobs: list[dict[str, Any]]) -> bytes:
        part = change.part
        at: dict[str, Any] = {"output_index": part.index, "item_id": self._item_id(part)}
        if change.verb is Verb.OPENED:
            return self._opened(part, at)
        if change.verb is Verb.CLOSED:
            return self._closed(part, at)
        if part.kind is Kind.CALL:
            return self._event("response.function_call_arguments.delta", **at, delta=change.piece)
        at["content_index"] = 0
        if part.kind is Kind.REASONING:
            return self._event("response.reasoning_text.delta", **at, delta=change.piece)
        more = {"delta": change.piece, "logprobs": logprobs}
        return self._event("response.output_text.delta", **at, **more)

    def _opened(self, part: Part, at: Mapping[str, Any]) -> bytes:
        item = self._item(part, done=False)
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind is not Kind.TEXT:
            return added
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return added + self._event("response.content_part.added", **at, content_index=0, part=empty)

    def _closed(self, part: Part, at: Mapping[str, Any]) -> bytes:
        item = self._item(part, done=True)
        if part.kind is Kind.CALL:
            ended = self._event(
                "response.function_call_arguments.done", **at, arguments=part.text, name=part.name
            )
        elif part.kind is Kind.REASONING:
            ended = self._event(
                "response.reasoning_text.done", **at, content_index=0, text=part.text
            )
        else:
            (content,) = item["content"]
            words = {"text": part.text, "logprobs": content["logprobs"]}
            ended = self._event("response.output_text.done", **at, content_index=0, **words)
            ended += self._event("response.content_part.done", **at, content_index=0, part=content)
        return ended + self._event("response.output_item.done", output_index=part.index, item=item)

    def _item_id(self, part: Part) -> str:
        return self._item_ids.setdefault(part.index, f"{_PREFIX[part.kind]}_{uuid.uuid4().hex}")

    def _item(self, part: Part, *, done: bool) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part)}
        if part.kind is Kind.CALL:
            arguments = part.text if done else ""
            item |= {"type": "function_call", "call_id": part.id, "name": part.name}
            item |= {"arguments": arguments}
        elif part.kind is Kind.REASONING:
            thought = {"type": "reasoning_text", "text": part.text}
            item |= {"type": "reasoning", "summary": [], "content": [thought] if done else []}
        else:
            text = {"type": "output_text", "text": part.text, "annotations": []}
            content = [{**text, "logprobs": self._logprobs}] if done else []
            item |= {"type": "message", "role": "assistant", "content": content}
        return {**item, "status": "completed" if done else "in_progress"}


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
