from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moet_desk.agents import (
    AGENTS,
    KEY_VARIABLE,
    NO_KEY,
    Target,
    child_variables,
    is_cloud_key,
    snippets,
)
from moet_desk.cli import launch as launching
from moet_desk.cli.launch import address_of
from moet_desk.errors import ExitCode
from moet_desk.settings import Endpoint
from tests.cli.conftest import Command

KEYS = (
    "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_ORG_ID", "AWS_BEARER_TOKEN_BEDROCK", "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY", "GEMINI_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "groq_api_key",
    "CLAUDE_CODE_OAUTH_TOKEN", "MOET_DESK_ENDPOINT_KEY", "GITHUB_TOKEN", "MOET_DESK_CONNECT_KEY",
)  # fmt: skip
SERVED = {"id": "flash", "max_model_len": 32768}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What would have been executed, on a computer that has every agent and an open endpoint."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []

    def become(program: str, command: list[str], environment: dict[str, str]) -> int:
        calls.append((program, command, environment))
        return 0

    monkeypatch.setattr(launching, "_become", become)
    monkeypatch.setattr(launching, "_served", lambda _address, _key: SERVED)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return calls


@pytest.mark.parametrize("agent", AGENTS)
def test_launch__dry__shows_everything_and_writes_nothing(
    moet: Command, data_dir: Path, agent: str, started: list[Any]
) -> None:
    shown = moet("launch", agent, "--json", "--", "--help").document
    assert shown["command"][-1] == "--help"
    words = json.dumps(shown)
    assert "http://127.0.0.1:11500" in words
    assert "flash" in words
    assert not started
    assert not (data_dir / "agents").exists()
    human = moet("launch", agent)
    assert "nothing was written or started" in human.out
    for path in shown["files"]:
        assert path in human.out


@pytest.mark.parametrize("agent", AGENTS)
def test_launch__run__no_key_of_a_service_reaches_the_agent(
    moet: Command, agent: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEYS:
        monkeypatch.setenv(name, "cloud-secret")
    monkeypatch.setenv("KEPT", "yes")
    assert moet("launch", agent, "--run", "more").code == 0
    ((program, command, environment),) = started
    assert program == f"/bin/{command[0]}"
    assert command[-1] == "more"
    # Only the endpoint's own key, which here comes from a variable as well, may go on.
    left = {name for name, value in environment.items() if value == "cloud-secret"}
    assert left <= {"ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", KEY_VARIABLE}
    assert environment["KEPT"] == "yes"


def test_launch__dry__names_what_is_taken_out_and_hides_the_key(
    moet: Command, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROQ_API_KEY", "gsk")
    monkeypatch.setenv("MOET_DESK_ENDPOINT_KEY", "topsecret")
    for agent in AGENTS:
        shown = moet("launch", agent)
        assert "topsecret" not in shown.out + shown.err
        assert "gsk" not in shown.out
        assert "GROQ_API_KEY" in shown.out


def test_launch__run__files_are_private_and_in_a_folder_of_ours(
    moet: Command, data_dir: Path, started: list[Any]
) -> None:
    moet("launch", "codex", "--run")
    file = data_dir / "agents" / "codex" / "config.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    settings = tomllib.loads(file.read_text())
    assert settings["model"] == "flash"
    assert settings["model_context_window"] == 32768
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:11500/v1"
    assert provider["wire_api"] == "responses"
    assert started[0][2][provider["env_key"]] == NO_KEY
    assert started[0][2]["CODEX_HOME"] == str(file.parent)


def test_launch__opencode__its_file_names_provider_and_limits(
    moet: Command, data_dir: Path, started: list[Any]
) -> None:
    moet("launch", "opencode", "--run", "--model", 'a"b')
    file = Path(started[0][2]["OPENCODE_CONFIG"])
    document = json.loads(file.read_text())
    assert document["model"] == 'moet-desk/a"b'
    assert document["enabled_providers"] == list(document["provider"])
    options = document["provider"]["moet-desk"]["options"]
    assert options["apiKey"] == f"{{env:{KEY_VARIABLE}}}"
    assert started[0][2][KEY_VARIABLE] == NO_KEY
    assert "OPENAI_API_KEY" not in started[0][2]  # it would offer OpenAI's models as well
    models = document["provider"]["moet-desk"]["models"]
    assert models['a"b']["limit"] == {"context": 32768, "output": 8192}


def test_launch__nothing_serves__says_so_and_starts_nothing(
    moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_DESK_ENDPOINT_PORT", "1")
    shown = moet("launch", "claude")
    assert shown.code == 0
    assert "does not answer" in shown.err
    failed = moet("launch", "claude", "--run", "--json")
    assert (failed.code, failed.error_code) == (ExitCode.NOT_FOUND, "MD-CLI-03")


def test_launch__agent_not_installed__exit_3(
    moet: Command, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    failed = moet("launch", "aider", "--run", "--json")
    assert (failed.code, failed.error_code) == (ExitCode.NOT_FOUND, "MD-CLI-02")


def test_keys__known_and_harmless_names() -> None:
    assert all(map(is_cloud_key, KEYS))
    for name in ("PATH", "HOME", "AWS_REGION", "NO_COLOR", "KEYBOARD", "MOET_DESK_DATA_DIR"):
        assert not is_cloud_key(name)


def test_child_variables__ours_win_over_the_persons() -> None:
    setup = AGENTS["claude"](Target("http://h:1", "m"), Path("/x"))
    made = child_variables({"ANTHROPIC_BASE_URL": "https://cloud", "PATH": "p"}, setup)
    assert made["ANTHROPIC_BASE_URL"] == "http://h:1"
    assert made["PATH"] == "p"


def test_address__everywhere_and_ipv6() -> None:
    assert address_of(Endpoint(host="0.0.0.0", port=5)) == "http://127.0.0.1:5"
    assert address_of(Endpoint(host="::1", port=5)) == "http://[::1]:5"


def test_snippets__name_the_address_and_never_the_key() -> None:
    texts = snippets(Target("http://h:1", "m", key="topsecret"))
    assert "http://h:1/v1/chat/completions" in texts["curl"]
    assert "Bearer $KEY" in texts["curl"]
    assert "topsecret" not in "".join(texts.values())
    assert "Bearer" not in snippets(Target("http://h:1", "m"))["curl"]
