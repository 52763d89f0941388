"""The app as `moet-desk` opens it, with a scripted engine instead of a model.

python scripted_app.py SPEED N_WORDS

The answer is n0001 n0002 and so on; the second one has wide characters.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moet_desk.cli import app
from moet_desk.cli.context import Invocation
from moet_desk.engine import handle
from moet_desk.engine.handle import EngineHandle, EngineOptions
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.store.library import Library

WIDE = "Rows of wide signs:\n\n- 日本語の表示 end\n- 🙂🙂🙂 end\n- a👩‍👩‍👧b end\n- plain text end\n"


def main() -> None:
    speed, n_words = float(sys.argv[1]), int(sys.argv[2])
    script = Script(
        answers=(" ".join(f"n{number:04}" for number in range(1, n_words + 1)), WIDE),
        tokens_per_s=speed,
        prompt_tok_per_s=1e9,
        context=1_000_000,
        model="demo",
    )

    def start_engine(pack: Path, options: EngineOptions | None = None) -> EngineHandle:
        return ScriptedEngine(script).start()

    def start(*_: object, **__: object) -> app.Start:
        return app.Start("demo")

    handle.start_engine = start_engine
    Library.ready = lambda self, name: Path(name)  # type: ignore[method-assign]
    app.plan_start = start  # type: ignore[assignment]
    sys.exit(app.open_app(Invocation()))


if __name__ == "__main__":
    main()
