"""Bytes, rates and durations: parse what people type, print what people read.

Memory (VRAM, RAM) is shown in GiB, disk and downloads in GB, as drive makers count. Inside the
program everything is bytes and seconds. Pure functions.
"""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 1000**3

_FACTOR_OF_SUFFIX = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": KIB,
    "m": 1000**2, "mb": 1000**2, "mib": MIB,
    "g": GB, "gb": GB, "gib": GIB,
    "t": 1000**4, "tb": 1000**4, "tib": 1024**4,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Turn "32GiB", "1.5 GB" or "4096" into bytes.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _FACTOR_OF_SUFFIX:
        raise ValueError(f"{text!r} is not a size; write it like 32GiB or 1.5GB")
    n_bytes = float(match[1]) * _FACTOR_OF_SUFFIX[match[2].lower()]
    if n_bytes >= 2**63:
        raise ValueError(f"{match[0]!r} is too large")
    return round(n_bytes)


def _scaled(value: float, step: int, names: tuple[str, ...]) -> str:
    size = float(value)
    for name in names[:-1]:
        if abs(size) < step:
            return f"{size:.0f} {name}" if name == names[0] else f"{size:.1f} {name}"
        size /= step
    return f"{size:.1f} {names[-1]}"


def show_memory(n_bytes: float) -> str:
    """Bytes as memory: "6.8 MiB", "30.9 GiB"."""
    return _scaled(n_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def show_disk(n_bytes: float) -> str:
    """Bytes as disk or download size: "50.5 MB", "78.0 GB"."""
    return _scaled(n_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def show_rate(bytes_per_s: float) -> str:
    """A transfer rate: "5.9 GB/s"."""
    return show_disk(bytes_per_s) + "/s"


def show_duration(seconds: float) -> str:
    """A duration in at most two units: "0.4 s", "12 s", "3 m 20 s", "2 h 5 m"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} m"


def show_count(n: int) -> str:
    """A token count for tight places: "812", "2.4K", "128K"."""
    if n < 1000:
        return str(n)
    thousands = n / 1024 if n % 1024 == 0 else n / 1000
    return (
        f"{thousands:.0f}K"
        if thousands >= 10 or thousands == int(thousands)
        else f"{thousands:.1f}K"
    )
