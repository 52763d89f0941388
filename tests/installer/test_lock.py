"""The lock agrees with the project, and its check notices what does not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tools import lock


def test_lock__agrees_with_the_project() -> None:
    assert lock.complaints() == []
    assert lock.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("packages.txt", "click==", "click==9", "click is 9"),
        ("packages.txt", "textual==", "other==", "textual is not locked"),
        ("packages.txt", "--hash=sha256:", "--hash=md5:", "has no hash"),
        ("torch-cuda.txt", "triton==3.6", "triton==3.5", "triton is not"),
        ("torch-cpu.txt", "torch==", "torch==9", "torch of the CPU"),
    ],
)
def test_check__notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, said: str
) -> None:
    shutil.copytree(lock.LOCK, tmp_path / "lock")
    path = tmp_path / "lock" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    assert any(said in line for line in lock.complaints()), lock.complaints()


def test_write__splits_what_belongs_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv is played by a script that gives back the constraints it got, and CUDA's libraries."""
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\n"
        "import re, sys\n"
        "pins = open(sys.argv[sys.argv.index('--constraint') + 1]).read().split()\n"
        "pins += ['nvidia-cublas==1', 'cuda-bindings==2']\n"
        "for pin in pins: print(pin + ' \\\\\\n    --hash=sha256:00')\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")
    lock.write(str(uv))
    packages = lock.versions((tmp_path / "lock/packages.txt").read_text())
    cuda = lock.versions((tmp_path / "lock/torch-cuda.txt").read_text())
    assert cuda == {**lock.CUDA_PINS, "nvidia-cublas": "1", "cuda-bindings": "2"}
    assert "nvidia-ml-py" in packages
    assert not packages.keys() & cuda.keys()
    kept = lock.versions((lock.ROOT / "constraints.txt").read_text())["torch"]
    assert (tmp_path / "lock/torch-cpu.txt").read_text().endswith(f"\ntorch=={kept}\n")
