"""The command line with a scripted engine instead of a model, for tests that need a process.

python scripted_main.py SPEED ARGUMENT...
"""

from __future__ import annotations

import sys
from pathlib import Path

from moet_desk import cli
from moet_desk.cli.context import Invocation
from moet_desk.engine import handle
from moet_desk.engine.handle import EngineHandle, EngineOptions
from moet_desk.engine.scripted import Script, ScriptedEngine


def main() -> None:
    speed, *arguments = sys.argv[1:]
    script = Script(
        answers=("one two three four five six seven eight nine ten " * 5, "Second answer."),
        tokens_per_s=float(speed),
        prompt_tok_per_s=1e6,
        model="demo",
    )

    def start_engine(pack: Path, options: EngineOptions | None = None) -> EngineHandle:
        return ScriptedEngine(script).start()

    def model_path(self: Invocation, name: str) -> Path:
        return Path(name)

    handle.start_engine = start_engine
    Invocation.model_path = model_path  # type: ignore[method-assign]
    sys.exit(cli.main(arguments))


if __name__ == "__main__":
    main()
