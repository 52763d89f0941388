"""Coding agents and editors on the local endpoint: their settings, and an environment without keys.

Pure: what it returns is written and started elsewhere. Each agent gets settings of its own beside
the person's, never in their place. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

NO_KEY = "none"
"""What agents send where the endpoint asks for no key; most of them insist on one."""

KEY_VARIABLE = "MOETDESK_AGENT_KEY"
"""Where agents that can be told a name find the endpoint's key. Under OPENAI_API_KEY they offered
OpenAI's models as well, and would have sent our key there.
"""


_USUAL_CONTEXT = 32768  # where a number has to stand and none is known


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint and the model as an agent sees them."""

    address: str  # "http://127.0.0.1:11500", without /v1
    model: str
    key: str = NO_KEY
    context: int | None = None  # tokens; None: not known

    @property
    def openai(self) -> str:
        """Base address of OpenAI's protocols."""
        return f"{self.address}/v1"


@dataclass(frozen=True, slots=True)
class Setup:
    """What makes an agent use the endpoint: files to write, variables, and the command."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    files: Mapping[Path, str]


def _claude(target: Target, _: Path) -> Setup:
    variables = {
        "ANTHROPIC_BASE_URL": target.address,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_SMALL_FAST_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",  # a long prompt is read for minutes
    }
    return Setup(("claude",), variables, {})


def _codex(target: Target, folder: Path) -> Setup:
    lines = [
        f"model = {_quoted(target.model)}",
        'model_provider = "moet-desk"',
        *([] if target.context is None else [f"model_context_window = {target.context}"]),
        "",
        "[model_providers.moet-desk]",
        'name = "Moet Desk"',
        f"base_url = {_quoted(target.openai)}",
        f'env_key = "{KEY_VARIABLE}"',
        'wire_api = "responses"',
        "stream_idle_timeout_ms = 3600000",
    ]
    variables = {"CODEX_HOME": str(folder), KEY_VARIABLE: target.key}
    return Setup(("codex",), variables, {folder / "config.toml": "\n".join(lines) + "\n"})


def _opencode(target: Target, folder: Path) -> Setup:
    model: dict[str, object] = {"name": target.model}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": target.context // 4}
    document = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"moet-desk/{target.model}",
        "small_model": f"moet-desk/{target.model}",
        "enabled_providers": ["moet-desk"],  # it has models of its own on the network
        "provider": {
            "moet-desk": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Moet Desk",
                "options": {"baseURL": target.openai, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {target.model: model},
            }
        },
    }
    file = folder / "opencode.json"
    variables = {"OPENCODE_CONFIG": str(file), KEY_VARIABLE: target.key}
    return Setup(("opencode",), variables, {file: _json(document)})


def _aider(target: Target, folder: Path) -> Setup:
    name = f"openai/{target.model}"
    facts: dict[str, object] = {"litellm_provider": "openai", "mode": "chat"}
    if target.context is not None:
        facts |= {"max_input_tokens": target.context, "max_output_tokens": target.context // 4}
    file = folder / "models.json"
    command = ("aider", "--model", name, "--weak-model", name, "--model-metadata-file", str(file))
    variables = {
        "OPENAI_API_BASE": target.openai,
        "OPENAI_API_KEY": target.key,
        "AIDER_ANALYTICS": "false",
    }
    return Setup(command, variables, {file: _json({name: facts})})


def _continue(target: Target, folder: Path) -> Setup:
    head = "name: Moet Desk\nversion: 0.0.1\nschema: v1\n"
    file = folder / "config.yaml"
    command = ("cn", "--config", str(file))
    return Setup(command, {}, {file: f"{head}{_continue_model(target)}\n"})


def _continue_model(target: Target) -> str:
    """The model in Continue's settings, which its editor extensions and its agent share."""
    lines = [
        "models:",
        f"  - name: {_quoted(target.model)}",
        "    provider: openai",
        f"    model: {_quoted(target.model)}",
        f"    apiBase: {_quoted(target.openai)}",
        f"    apiKey: {_quoted(target.key)}",
        "    roles: [chat, edit, apply]",
    ]
    if target.context is not None:
        lines += ["    defaultCompletionOptions:", f"      contextLength: {target.context}"]
    return "\n".join(lines)


def _zed(target: Target) -> object:
    """The model in Zed's settings; the key is typed into its own settings."""
    model = {"name": target.model, "display_name": target.model}
    limits = {"max_tokens": target.context or _USUAL_CONTEXT}
    provider = {"api_url": target.openai, "available_models": [model | limits]}
    return {"language_models": {"openai_compatible": {"Moet Desk": provider}}}


def _qwen(target: Target, _: Path) -> Setup:
    variables = {
        "OPENAI_BASE_URL": target.openai,
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
    }
    return Setup(("qwen",), variables, {})


AGENTS: Mapping[str, Callable[[Target, Path], Setup]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "continue": _continue,
    "qwen": _qwen,
}
"""Name -> what makes its settings for a target, in a folder of their own."""


def snippets(target: Target) -> Mapping[str, str]:
    """Texts to copy: a first request, and what editors and libraries want to know. None of them
    holds the key; where one is needed they name a variable.
    """
    key = NO_KEY if target.key == NO_KEY else "$KEY"
    body = json.dumps({"messages": [{"role": "user", "content": "What is 17 + 25?"}]})
    python = NO_KEY if target.key == NO_KEY else "the key"
    header = "" if target.key == NO_KEY else ' -H "Authorization: Bearer $KEY"'
    return {
        "curl": f"curl {target.openai}/chat/completions{header} -d '{body}'",
        "Python": "\n".join(
            (
                "from openai import OpenAI",
                f"client = OpenAI(base_url={_quoted(target.openai)}, api_key={_quoted(python)})",
            )
        ),
        "OpenAI variables": (f"export OPENAI_BASE_URL={target.openai} OPENAI_API_KEY={key}"),
        "Anthropic variables": (
            f"export ANTHROPIC_BASE_URL={target.address} ANTHROPIC_AUTH_TOKEN={key}"
        ),
        "Zed, settings.json": _json(_zed(target)).rstrip("\n"),
        "Continue, config.yaml": _continue_model(replace(target, key=python)),
        **{f"Agent {name}": f"moet-desk launch {name} --run" for name in AGENTS},
    }


_CLOUD_PREFIXES = (
    "ANTHROPIC_", "OPENAI_", "AZURE_OPENAI_", "AZURE_API_", "AWS_BEARER_TOKEN", "CLAUDE_CODE_USE_",
    "CODEX_", "GEMINI_", "GOOGLE_API_", "GOOGLE_GENAI_", "GOOGLE_APPLICATION_CREDENTIALS",
    "VERTEX", "OPENROUTER_", "DASHSCOPE_",
)  # fmt: skip
_KEY_ENDINGS = (
    "_API_KEY", "_API_KEYS", "_API_TOKEN", "_AUTH_TOKEN", "_OAUTH_TOKEN", "_ACCESS_KEY",
    "_ACCESS_KEY_ID", "_SESSION_TOKEN", "_API_SECRET",
)  # fmt: skip
_KEY_NAMES = frozenset(
    (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "GITHUB_TOKEN",
        "GH_TOKEN",
        "MOET_DESK_ENDPOINT_KEY",
        "MOET_DESK_CONNECT_KEY",
    )
)


def is_cloud_key(name: str) -> bool:
    """Whether a variable holds a key of a service, or sends an agent to one."""
    upper = name.upper()
    return upper in _KEY_NAMES or upper.startswith(_CLOUD_PREFIXES) or upper.endswith(_KEY_ENDINGS)


def child_variables(environment: Mapping[str, str], setup: Setup) -> dict[str, str]:
    """The environment of an agent: the person's, without keys of services, with our variables."""
    kept = {name: value for name, value in environment.items() if not is_cloud_key(name)}
    return kept | dict(setup.variables)


def _quoted(text: str) -> str:
    """A string as JSON, TOML, YAML and Python all read it."""
    return json.dumps(text, ensure_ascii=False)


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
