"""The hub in a process of its own, so that its memory is not counted as the program's.

    python -m tests.store.hub_process FOLDER NAME

Writes the tiny repository of the command's tests into FOLDER, prints the hub's address, and ends
when its input does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cli.tiny_repo import write_repo
from tests.store.hub_server import HubServer, Repo


def main(folder: str, name: str) -> None:
    write_repo(Path(folder))
    hub = HubServer()
    hub.repos[name] = Repo(Path(folder))
    print(hub.url, flush=True)
    sys.stdin.read()
    hub.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
