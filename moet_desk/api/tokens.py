"""Text to token ids and back, for clients that count or cut. Pure; the engine does the work."""

from __future__ import annotations

from typing import Any

import msgspec

from moet_desk.api.schemas import ChatRequest, chat_request, read_struct, refuse
from moet_desk.engine.handle import GenerateRequest, ModelInfo

MAX_IDS = 2_000_000


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt as it is, or messages as the model would read them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def read_tokenize(body: bytes) -> TokenizeRequest:
    """Decode a body. Raises MD-API-04, MD-API-05."""
    request = read_struct(body, TokenizeRequest, refused={})
    if (request.prompt is None) is (request.messages is None):
        raise refuse("prompt", "give either prompt or messages")
    return request


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """Decode a body. Raises MD-API-04, MD-API-05."""
    request = read_struct(body, DetokenizeRequest, refused={})
    if not 1 <= len(request.tokens) <= MAX_IDS:
        raise refuse("tokens", f"1 to {MAX_IDS} ids can be turned into text at once")
    return request


def as_generate(request: TokenizeRequest) -> GenerateRequest:
    """The engine's request with this prompt. Raises MD-API-04."""
    if request.messages is None:
        return GenerateRequest(prompt=request.prompt)
    chat: ChatRequest = chat_request(messages=request.messages, tools=request.tools)
    return GenerateRequest(messages=chat.messages, tools=chat.tools or ())


def tokenize_body(ids: list[int], model: ModelInfo) -> dict[str, Any]:
    """The ids, how many, and how many a request may use."""
    return {"count": len(ids), "max_model_len": model.context, "tokens": ids}
