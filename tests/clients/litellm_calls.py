"""litellm against a running endpoint: python litellm_calls.py ADDRESS. Needs litellm only."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"harbour": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "fetch_tide", "parameters": PARAMETERS}}]


def main() -> None:
    address = sys.argv[1]
    as_openai: Any = {"model": "openai/played", "api_base": f"{address}/v1", "api_key": "none"}
    as_claude: Any = {"model": "anthropic/played", "api_base": address, "api_key": "none"}
    for asked in (as_openai, as_claude):
        whole = litellm.completion(messages=MESSAGES, **asked)
        words = whole.choices[0].message.content
        assert words, whole
        assert whole.usage.total_tokens > 0
        chunks = litellm.completion(messages=MESSAGES, stream=True, **asked)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == words, (streamed, words)
        called = litellm.completion(messages=MESSAGES, tools=TOOLS, **asked).choices[0]
        (call,) = called.message.tool_calls
        assert called.finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"harbour": "Oban"}
    try:
        litellm.completion(messages=MESSAGES, **{**as_openai, "model": "openai/other"})
    except litellm.NotFoundError:
        print("litellm: ok")
    else:
        raise SystemExit("litellm took another model's name")


if __name__ == "__main__":
    main()
