"""The processor, the kind of system this runs in, and the tools that kernels are made with."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib import metadata, util
from pathlib import Path

from moet_desk import config
from moet_desk.machine import Cpu, Tools
from moet_desk.probing.memory import SystemFiles


def look_at_cpu(files: SystemFiles) -> Cpu:
    """Name and logical cores of the processor."""
    name = "unknown"
    for line in _text(files.proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return Cpu(name=name, cores=total, usable=usable)


def is_wsl(files: SystemFiles) -> bool:
    """Whether this is Linux inside Windows."""
    return "microsoft" in _text(files.proc / "sys" / "kernel" / "osrelease").lower()


def find_container(files: SystemFiles) -> str | None:
    """The kind of container this runs in, None outside of one."""
    for marker, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (files.root / marker).exists():
            return kind
    groups = _text(files.proc / "1" / "cgroup")
    for kind in ("docker", "kubepods", "lxc", "containerd"):
        if kind in groups:
            return kind
    return None


def find_tools() -> Tools:
    """Versions by what is installed; nothing is imported, so this is quick."""
    return Tools(
        torch=_version("torch"),
        torch_cuda=_torch_cuda(),
        triton=_version("triton"),
        compiler=c_compiler(),
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    )


def c_compiler() -> str | None:
    """The compiler that Triton will take (triton/runtime/build.py)."""
    return config.c_compiler() or shutil.which("gcc") or shutil.which("clang")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """CUDA version of the installed torch, read from its version file: importing takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    for line in _text(Path(spec.origin).with_name("version.py")).splitlines():
        name, _, value = line.partition("=")
        if name.split(":")[0].strip() == "cuda":
            word = value.strip().strip("'\"")
            return None if word == "None" else word
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
