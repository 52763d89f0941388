"""sdist and wheel: nothing is missing, and the wheel's files run away from the checkout.

`chroot.sh` installs the wheel for real and has the demo model answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ("moet_desk", "assets", "tests", "installer", "docs", "bench", "tools")


def tracked(*folders: str) -> set[str]:
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-z", *folders], text=True)
    return set(filter(None, listed.split("\0")))


@pytest.mark.slow
def test_sdist_and_the_wheel_made_of_it__are_complete_and_run(tmp_path: Path) -> None:
    def build(source: Path, target: str) -> Path:
        out = tmp_path / target
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
        subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=240)
        return next(out.iterdir())

    with tarfile.open(build(ROOT, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(tmp_path.glob("moet_desk-*"))
    in_sdist = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert tracked(*KEPT, "*.md", "LICENSE", "NOTICE", "check", "constraints.txt") <= in_sdist

    site = tmp_path / "site"
    with zipfile.ZipFile(build(source, "wheel")) as archive:
        archive.extractall(site)
    in_wheel = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assets = {f"moet_desk/{name}" for name in tracked("assets")}
    assert tracked("moet_desk") | assets <= in_wheel
    assert not [name for name in in_wheel if name.startswith(("tests", "tools", "bench"))]

    env = {
        **{name: value for name, value in os.environ.items() if "MOET_DESK" not in name},
        "PYTHONPATH": str(site),
        "MOET_DESK_DATA_DIR": str(tmp_path / "data"),
    }
    for command, said in ((["version"], "moet-desk "), (["ls", "--available"], "deepseek-v3.1")):
        shown = subprocess.run(
            [sys.executable, "-m", "moet_desk", *command],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert said in shown.stdout
