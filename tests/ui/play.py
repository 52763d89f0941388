"""Open the app on the scripted engine in this terminal, to look at it by hand.

    python -m tests.ui.play [--first-start] [--fail] [--resident] [--ascii] [--no-colour] [--big]
        [--wizard]

Not a test; nothing is stored.
"""

from __future__ import annotations

import sys
import time

from moet_desk.engine.scripted import DEFAULT_ANSWER, Script, ScriptedEngine, ScriptedFailure
from moet_desk.telemetry import LoadStep
from moet_desk.ui.app import MoetDeskApp
from moet_desk.ui.bridge import PackJob
from moet_desk.ui.look import Look
from moet_desk.ui.setup_steps import Setup
from tests.ui.desk import FakeDesk
from tests.ui.support import FakeChats, FakePack

LOAD = (
    LoadStep("Read the pack index", seconds=0.3),
    LoadStep("Import torch", seconds=1.0),
    LoadStep("Dense layers", total=16_000_000, seconds=1.0),
    LoadStep("Experts to RAM", total=34_000_000, seconds=2.0),
    LoadStep("Self-test", seconds=0.5),
)
LONG = "\n\n".join([DEFAULT_ANSWER] * 8)


def main(arguments: list[str]) -> int:
    words = {argument.removeprefix("--") for argument in arguments}
    big = "big" in words
    script = Script(
        answers=(DEFAULT_ANSWER, LONG),
        load=LOAD,
        failures={0: ScriptedFailure("MD-ENG-04", {"reason": "A row could not be read"}, 30)}
        if "fail" in words
        else {},
        pool_share=1.0 if "resident" in words else 0.3,
        n_layers=43 if big else 8,
        n_experts=256 if big else 32,
        top_k=6 if big else 4,
        prompt_tok_per_s=20.0,
        prompt_chunk=4,
        tokens_per_s=60.0,
    )
    pack: PackJob | None = None
    if "first-start" in words:
        steps = range(0, 289, 12)
        pack = FakePack(
            [
                {"event": "pack", "done": n, "total": 288, "bytes": n * 110_592,
                 "rate_bytes_per_s": 4.0e6}
                for n in steps
            ]
        )  # fmt: skip
    look = Look(
        glyphs="ascii" if "ascii" in words else "auto", colour="no-colour" not in words,
        theme=next((w for w in words if w.startswith("moet-")), "moet-dark"),
    )  # fmt: skip

    def open_engine() -> ScriptedEngine:
        time.sleep(0.5)
        return ScriptedEngine(script).start()

    wizard = "wizard" in words
    app = MoetDeskApp(
        None if wizard else open_engine, FakeChats(), FakeDesk(open_engine), look=look,
        pack_job=pack, model="" if wizard else "demo", setup=Setup() if wizard else None,
    )  # fmt: skip
    app.run()
    return app.return_value or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
