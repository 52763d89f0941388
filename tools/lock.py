"""Make installer/lock with uv: every package that a user gets, with the hashes of its files.

    python tools/lock.py --uv PATH   ask the package index and write the files (uv: pip install uv)
    python tools/lock.py --check     compare with pyproject.toml and constraints.txt; no network

`packages.txt` is what both builds need. `torch-cuda.txt` is torch with what belongs to it, at the
versions whose kernels ran on a card; `torch-cpu.txt` names the version only, as its index gives no
hashes to uv without the network of PyTorch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "installer" / "lock"
CUDA_PINS = {"torch": "2.11.0", "triton": "3.6.0"}
"""The pair that the tests on a card ran with (docs/install.md says so)."""

_NOTE = "# Made by tools/lock.py; do not edit by hand.\n"
_ENTRY = re.compile(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)")


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(text: str) -> dict[str, str]:
    """The pinned requirements of a lock, each with its hashes, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        match = _ENTRY.match(line)
        if match is not None:
            name = normal(match[1])
            found[name] = line
        elif name and line.startswith(" "):
            found[name] += line
    return found


def versions(text: str) -> dict[str, str]:
    """Name and version of each pinned requirement."""
    matches = (_ENTRY.match(line) for line in text.splitlines())
    return {normal(match[1]): match[2] for match in matches if match is not None}


def wanted() -> set[str]:
    """Names of what pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {normal(re.split(r"[<>=!~;\[ ]", line)[0]) for line in project["dependencies"]}


def belongs_to_torch(name: str) -> bool:
    """Whether a package comes with torch's build: itself, Triton, CUDA's libraries."""
    with_card = name.startswith(("nvidia-", "cuda-")) and name not in wanted()
    return name in CUDA_PINS or with_card


def resolve(uv: str, pins: Sequence[str]) -> dict[str, str]:
    """Have uv resolve all dependencies for all computers."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(pins), "utf-8")
        command = [
            uv, "pip", "compile", "pyproject.toml", "--universal", "--python-version", "3.11",
            "--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--constraint",
            str(constraints),
        ]  # fmt: skip
        made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return entries(made.stdout)


def write(uv: str) -> None:
    """Ask the index and write all files."""
    kept = versions((ROOT / "constraints.txt").read_text("utf-8"))
    pins = [f"{name}=={version}" for name, version in kept.items() if name not in CUDA_PINS]
    with_card = resolve(uv, [*pins, *(f"{name}=={pin}" for name, pin in CUDA_PINS.items())])
    common = {name: text for name, text in with_card.items() if not belongs_to_torch(name)}
    same = [f"{name}=={version}" for name, version in versions("".join(common.values())).items()]
    on_cpu = resolve(uv, [*same, f"torch=={kept['torch']}"])  # it must take the same packages
    missing = {name for name in on_cpu if not belongs_to_torch(name)} - common.keys()
    if missing:
        raise LookupError(f"only the build for CPUs needs {sorted(missing)}")
    cuda = "".join(text for name, text in with_card.items() if belongs_to_torch(name))
    LOCK.mkdir(exist_ok=True)
    (LOCK / "packages.txt").write_text(_NOTE + "".join(common.values()), "utf-8")
    (LOCK / "torch-cuda.txt").write_text(_NOTE + cuda, "utf-8")
    (LOCK / "torch-cpu.txt").write_text(f"{_NOTE}torch=={kept['torch']}\n", "utf-8")


def complaints() -> list[str]:
    """What of the files does not agree with the project."""
    kept = versions((ROOT / "constraints.txt").read_text("utf-8"))
    packages = entries((LOCK / "packages.txt").read_text("utf-8"))
    cuda = entries((LOCK / "torch-cuda.txt").read_text("utf-8"))
    found = [
        f"{name} has no hash"
        for name, text in (packages | cuda).items()
        if "--hash=sha256:" not in text
    ]
    for name, version in versions("".join(packages.values())).items():
        if kept.get(name, version) != version:
            found.append(f"{name} is {version} in the lock and {kept[name]} in constraints.txt")
    found += [f"{name} is not locked" for name in wanted() - packages.keys() - {"torch"}]
    locked = versions("".join(cuda.values()))
    found += [f"{name} is not {pin}" for name, pin in CUDA_PINS.items() if locked.get(name) != pin]
    if versions((LOCK / "torch-cpu.txt").read_text("utf-8")) != {"torch": kept["torch"]}:
        found.append("torch of the CPU is not that of constraints.txt")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make installer/lock.")
    parser.add_argument("--uv", default="uv", help="the program uv")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if they differ")
    given = parser.parse_args(arguments)
    if not given.check:
        write(given.uv)
    found = complaints()
    sys.stderr.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
