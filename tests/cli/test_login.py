"""login: a token that the hub knows is kept for this user alone; it appears nowhere else."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.hf_api
import pytest
from huggingface_hub import constants

from moet_desk.errors import CATALOGUE, ExitCode
from tests.cli.conftest import Command
from tests.store.deepseek import write_deepseek
from tests.store.hub_server import Fault, HubServer, Repo

NAME, TOKEN = "maker/tiny", "hf_sesame123"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A gated model on a hub of the test's own; nobody is signed in."""
    folder = tmp_path / "hub" / "tiny"
    write_deepseek(folder)
    server = HubServer()
    server.repos[NAME] = Repo(folder, gated=True, token=TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
    for name in ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
        monkeypatch.setattr(constants, name, str(tmp_path / "kept" / name))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_login__then_the_gated_model_is_fetched(
    hub: HubServer, moet: Command, kept: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = moet("pull", NAME, "--yes", "--json")
    assert refused.error_code == "MD-HUB-02"
    assert "moet-desk login" in refused.document["error"]["do"]
    typed(monkeypatch, f"  {TOKEN}\n")
    result = moet("login", "--json")
    assert (result.code, result.document["signed_in"]) == (0, True)
    files = list(kept.iterdir())
    assert len(files) == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert moet("pull", NAME, "--yes").code == 0
    said = result.out + result.err
    ours = [path for path in data_dir.rglob("*") if path.is_file()]
    assert TOKEN not in said
    assert not any(TOKEN.encode() in path.read_bytes() for path in ours)


@pytest.mark.parametrize("token", ["hf_wrong", "", "two words", "geheim\u00e4", "api_org_x"])
def test_login__unknown_token__refused_and_not_kept(
    hub: HubServer, moet: Command, kept: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    typed(monkeypatch, token + "\n")
    result = moet("login", "--json")
    assert (result.code, result.error_code) == (ExitCode.NETWORK, "MD-HUB-05")
    assert f"{hub.url}/settings/tokens" in result.document["error"]["do"]
    assert not kept.exists()
    if token:
        assert token not in result.out + result.err


def test_login__hub_is_away__the_connection_s_error(
    hub: HubServer, moet: Command, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults = lambda path, n: Fault("503")
    typed(monkeypatch, TOKEN)
    assert moet("login", "--json").error_code == "MD-NET-02"
    assert not kept.exists()


def test_login__token_of_the_environment__counts_before_it(
    hub: HubServer, moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "other")
    typed(monkeypatch, TOKEN)
    assert moet("login", "--json").error_code == "MD-HUB-06"
    assert not hub.requests


def test_errors__say_how_to_sign_in() -> None:
    assert all("moet-desk login" in CATALOGUE[code].do for code in ("MD-HUB-01", "MD-HUB-02"))
