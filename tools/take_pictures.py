"""Make the pictures of the README from the app itself, on the demo model.

    python tools/take_pictures.py        writes docs/pictures/*-{80x24,120x40}.svg

The 2-bit pool is made small (96 of 256 experts), so that the cache screen has something to show.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from moet_desk.api.guard import EndpointOptions
from moet_desk.cli.app_endpoint import AppEndpoint
from moet_desk.cli.context import Invocation
from moet_desk.cli.desk import AppDesk
from moet_desk.engine.handle import EngineHandle, EngineOptions, start_engine
from moet_desk.settings import Settings
from moet_desk.telemetry import EndpointState
from moet_desk.ui.desk import PlanWishes
from moet_desk.ui.screenshot import save_screenshots

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
QUESTIONS = (
    "What is 21 + 34?",
    "Write a very short story for young children about a fox and a kite.",
)


def open_pack(name: str, wishes: PlanWishes | None) -> EngineHandle:
    """The pictures load no second model."""
    raise AssertionError(name)


def call(address: str) -> None:
    """Two programs call the endpoint: one is answered, one asks for a model that is not here."""
    said = [{"role": "user", "content": "What is 17 + 25?"}]
    for client, model in (("curl/8.5", "gpt-4o"), ("aider/0.86", "demo")):
        body = {"model": model, "messages": said, "max_tokens": 40, "stream": True}
        headers = {"User-Agent": client, "Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as answer:
            answer.read()


def main() -> None:
    """Pack the demo model if need be, ask it two things, and save what the screens show."""
    with tempfile.TemporaryDirectory() as folder:
        invocation = Invocation()
        invocation.data_dir = Path(folder)
        pack = invocation.model_path("demo")
        endpoint = AppEndpoint(EndpointOptions())
        handle = endpoint.serve(start_engine(pack, EngineOptions(pool_slots=96, save_heat=False)))
        while endpoint.view().state is EndpointState.WAITS:
            time.sleep(0.1)
        call(f"{endpoint.view().address}/v1/chat/completions")
        desk = AppDesk(invocation, Settings(), open_pack)
        for path in save_screenshots(
            PICTURES, handle, desk, questions=QUESTIONS, endpoint=endpoint
        ):
            print(path)


if __name__ == "__main__":
    main()
