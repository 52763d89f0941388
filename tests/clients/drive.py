"""Runs other people's clients against the endpoint; see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.handle import GenerateRequest, RequestStream
from moet_desk.engine.scripted import Script, ScriptedEngine

XDG = ("DATA", "CONFIG", "CACHE", "STATE")
HERE = Path(__file__).resolve().parent
WORDS = "High water at Oban is at noon."
CALL = '<tool_call>{"name": "fetch_tide", "arguments": {"harbour": "Oban"}}</tool_call>'
EDIT = """\
I make it say good morning.

hello.py
```python
<<<<<<< SEARCH
print("hello")
=======
print("good morning")
>>>>>>> REPLACE
```
"""


def script(answer: str) -> Script:
    fast = {"tokens_per_s": 500.0, "prompt_tok_per_s": 1e6}
    return Script(answers=(answer,), model="played", context=65536, **fast)  # type: ignore[arg-type]


class Played(ScriptedEngine):
    """Says the words; makes the call if there are tools and no result is there yet."""

    def __init__(self, words: str, call: str) -> None:
        super().__init__(script(words))
        self._caller = ScriptedEngine(script(call)).start()

    def submit(self, request: GenerateRequest) -> RequestStream:
        roles = [message.get("role") for message in request.messages or ()]
        if request.tools and "tool" not in roles:
            return self._caller.submit(request)
        return super().submit(request)


@contextmanager
def served(words: str, call: str = CALL, *, data_dir: Path | None = None) -> Iterator[str]:
    """The address of an endpoint that plays; `launch` finds it in the data folder."""
    engine = Played(words, call)
    engine.start()
    note = None if data_dir is None else data_dir / "run" / "endpoint.json"
    endpoint = Endpoint(engine, EndpointOptions(port=0, note=note))
    endpoint.start()
    yield endpoint.address
    endpoint.stop()
    engine.close()


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    given = list(map(str, command))
    done = subprocess.run(
        given, cwd=cwd, env={**os.environ, **environment}, check=False,
        capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{given[0]} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def node(at: Path) -> None:
    with served(WORDS) as address:
        print(run("node", HERE / "openai_node.mjs", f"{address}/v1", OPENAI_FROM=str(at)), end="")


def litellm(at: Path) -> None:
    with served(WORDS) as address:
        print(run(at / "bin/python", HERE / "litellm_calls.py", address), end="")


def llm(at: Path) -> None:
    with served(WORDS) as address, tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "extra-openai-models.yaml"
        models.write_text(f"- model_id: desk\n  model_name: played\n  api_base: {address}/v1\n")
        for more in ([], ["--no-stream"]):
            said = run(
                at / "bin/llm", "-m", "desk", "--key", "none", *more, "hi", LLM_USER_PATH=folder
            )
            assert said.strip() == WORDS, said
    print("llm: ok")


def new_repo(folder: str) -> Path:
    """A repository with one file, in its first commit."""
    repo = Path(folder) / "repo"
    repo.mkdir()
    (repo / "hello.py").write_text('print("hello")\n')
    run("git", "init", "-q", cwd=repo)
    run("git", "config", "user.email", "a@example.org", cwd=repo)
    run("git", "config", "user.name", "A", cwd=repo)
    run("git", "add", ".", cwd=repo)
    run("git", "commit", "-qm", "first", cwd=repo)
    return repo


AIDER_OPTIONS = (
    "--edit-format diff --yes-always --no-check-update --no-show-model-warnings --no-gitignore "
    "--map-tokens 0"
).split()
AIDER_TASK = ("--message", "Say good morning instead.", "hello.py")


def aider(at: Path) -> None:
    with served(EDIT) as address, tempfile.TemporaryDirectory() as folder:
        repo = new_repo(folder)
        run(
            at / "bin/aider", "--model", "openai/played", "--no-analytics", *AIDER_OPTIONS,
            *AIDER_TASK,
            cwd=repo, OPENAI_API_BASE=f"{address}/v1", OPENAI_API_KEY="none", HOME=folder,
        )  # fmt: skip
        assert (repo / "hello.py").read_text() == 'print("good morning")\n'
        assert len(run("git", "log", "--oneline", cwd=repo).splitlines()) == 2
    print("aider: ok")


def launch(at: Path, data_dir: Path, *command: str, **more: Any) -> str:
    """`moet-desk launch ... --run` with the programs of a folder."""
    path = f"{at}{os.pathsep}{os.environ['PATH']}"
    start = (sys.executable, "-m", "moet_desk", "--data-dir", str(data_dir), "launch")
    return run(*start, *command, PATH=path, PYTHONPATH=str(HERE.parents[1]), **more)


def launch_aider(at: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        repo, data = new_repo(folder), Path(folder) / "data"
        with served(EDIT, data_dir=data):
            said = launch(
                at / "bin", data, "aider", "--run", "--", *AIDER_OPTIONS, *AIDER_TASK,
                cwd=repo, HOME=folder,
            )  # fmt: skip
        assert (repo / "hello.py").read_text() == 'print("good morning")\n', said
        assert len(run("git", "log", "--oneline", cwd=repo).splitlines()) == 2
        assert "Unknown context window" not in said, said
    print("launch aider: ok")


def launch_talker(at: Path, agent: str, *question: str) -> None:
    """An agent that is asked something and prints the answer."""
    with tempfile.TemporaryDirectory() as folder:
        repo, data = new_repo(folder), Path(folder) / "data"
        with served(WORDS, WORDS, data_dir=data):
            programs = at / "node_modules/.bin"
            said = launch(programs, data, agent, "--run", "--", *question, cwd=repo, HOME=folder)
        assert WORDS in said, said
    print(f"launch {agent}: ok")


def launch_opencode(at: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        repo, data = new_repo(folder), Path(folder) / "data"
        given = {"filePath": str(repo / "note.txt"), "content": "High water at noon."}
        call = json.dumps({"name": "write", "arguments": given})
        places = {f"XDG_{name}_HOME": f"{folder}/{name}" for name in XDG}
        with served(WORDS, f"<tool_call>{call}</tool_call>", data_dir=data):
            said = launch(
                at / "node_modules/.bin", data, "opencode", "--run", "--", "run", "Write it.",
                cwd=repo, PWD=str(repo), HOME=folder, **places,
            )  # fmt: skip
        assert WORDS in said, said
        assert (repo / "note.txt").read_text() == given["content"]
    print("launch opencode: ok")


def opencode(at: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        repo = Path(folder) / "repo"
        repo.mkdir()
        run("git", "init", "-q", cwd=repo)
        given = {"filePath": str(repo / "note.txt"), "content": "High water at noon."}
        call = json.dumps({"name": "write", "arguments": given})
        with served(WORDS, f"<tool_call>{call}</tool_call>") as address:
            provider = {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Desk",
                "options": {"baseURL": f"{address}/v1", "apiKey": "none"},
                "models": {"played": {"name": "Played", "tool_call": True}},
            }
            config = repo / "opencode.json"
            config.write_text(json.dumps({"provider": {"desk": provider}, "autoupdate": False}))
            # It takes its folder from PWD, and all it keeps goes into the temporary one.
            places = {f"XDG_{name}_HOME": f"{folder}/{name}" for name in XDG}
            said = run(
                at / "node_modules/.bin/opencode", "run", "--model", "desk/played", "Write it.",
                cwd=repo, PWD=str(repo), HOME=folder, OPENCODE_CONFIG=str(config),
                OPENCODE_DISABLE_MODELS_FETCH="1", **places,
            )  # fmt: skip
        assert WORDS in said, said
        assert (repo / "note.txt").read_text() == given["content"]
    print("opencode: ok")


DRIVES: dict[str, Callable[[Path], None]] = {
    "node": node,
    "litellm": litellm,
    "llm": llm,
    "aider": aider,
    "opencode": opencode,
    "launch-aider": launch_aider,
    "launch-opencode": launch_opencode,
    "launch-codex": lambda at: launch_talker(at, "codex", "exec", "hi"),
    "launch-qwen": lambda at: launch_talker(at, "qwen", "-p", "hi"),
    "launch-continue": lambda at: launch_talker(at, "continue", "-p", "hi"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=list(DRIVES))
    parser.add_argument("--at", type=Path, required=True, help="where the client is installed")
    given = parser.parse_args()
    DRIVES[given.client](given.at.resolve())


if __name__ == "__main__":
    main()
