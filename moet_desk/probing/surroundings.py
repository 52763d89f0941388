"""The clock, the certificates and the terminal: what is round about this process right now."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import moet_desk
from moet_desk import config
from moet_desk.locations import TerminalFacts
from moet_desk.machine import Certificates, Clock, Terminal

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Gentoo
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # Alpine
)


def look_at_clock(folders: Iterable[Path], now_s: float | None = None) -> Clock:
    """The time, and the newest of this program's own file and of what lies in `folders`."""
    files = [Path(moet_desk.__file__)]
    for folder in folders:
        with suppress(OSError):
            files += folder.iterdir()
    times = []
    for file in files:
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    now_s = time.time() if now_s is None else now_s
    return Clock(now_s=now_s, newest_file_s=max(times, default=None))


def find_certificates() -> Certificates:
    """What the hub's HTTP library reads: the place that is named, else the system's."""
    named = config.certificates()
    if named is not None:
        return Certificates(place=str(named), usable=_has_certificates(named))
    paths = ssl.get_default_verify_paths()
    places = [Path(p) for p in (paths.openssl_cafile, paths.openssl_capath, *_BUNDLES) if p]
    found = next((place for place in places if _has_certificates(place)), None)
    return Certificates(place=str(found or places[0]), usable=found is not None)


def _has_certificates(place: Path) -> bool:
    try:
        if place.is_dir():
            return any(place.iterdir())
        return place.stat().st_size > 0
    except OSError:
        return False


def look_at_terminal(facts: TerminalFacts | None = None) -> Terminal | None:
    """The terminal of this process; None: it has none."""
    for fd in range(3):
        with suppress(OSError):
            size = os.get_terminal_size(fd)
            break
    else:
        return None
    facts = config.read_terminal() if facts is None else facts
    return Terminal(
        name=facts.term,
        columns=size.columns,
        rows=size.lines,
        utf8=facts.utf8,
        colours=_colours(facts),
    )


def _colours(facts: TerminalFacts) -> int:
    """How many the app will use: the drawing library goes by these names too."""
    if facts.truecolor:
        return 2**24
    if facts.is_dumb:
        return 2
    return 256 if facts.term.rpartition("-")[2] in ("256color", "kitty") else 16
