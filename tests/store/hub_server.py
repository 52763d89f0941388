"""A model hub on localhost: the few addresses that a download needs, and ways to fail.

Real HTTP in threads of the test's process. Files are served from folders; a fault is chosen per
request by the test.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS_FROM = 4096  # smaller files are git's and have no sha256
BLOCK = 16 * 1024


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer.

    kind: "drop" ends the connection after `at` bytes of the body; "truncated" announces fewer bytes
    than asked for; "stall" goes silent after `at` bytes; "wrong" flips a bit at `at`; "slow" sends
    with pauses; "whole" ignores the range; "other" sends another range; a number is a status.
    """

    kind: str
    at: int = 0
    seconds: float = 0.05


Choose = Callable[[str, int], Fault | None]
"""(path, number of the request) -> what goes wrong with it."""


@dataclass
class Repo:
    folder: Path
    commit: str = "c" * 40
    branch: str = "main"
    gated: bool = False
    token: str = ""  # needed to see it
    older: dict[str, Path] = field(default_factory=dict)  # commit -> folder

    def folder_at(self, revision: str) -> Path | None:
        if revision in (self.branch, self.commit):
            return self.folder
        return self.older.get(revision)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed break their connections; that is what is tested."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class HubServer:
    """Repositories by name, a log of requests, and the faults to come."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: Choose = lambda path, n: None
        self.requests: list[tuple[str, str]] = []  # (path, Range header)
        self.sent: dict[str, int] = {}  # file -> bytes of its body that were sent
        self.on_request: Callable[[], None] = lambda: None
        self.redirect = False  # like files in big-file storage: another address, without a token
        self.headers_seen: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def log(self, path: str, wanted: str) -> int:
        with self._lock:
            self.requests.append((path, wanted))
            return len(self.requests)

    def count(self, name: str, n_bytes: int) -> None:
        with self._lock:
            self.sent[name] = self.sent.get(name, 0) + n_bytes


def listing(repo: Repo, folder: Path, name: str, commit: str) -> dict[str, object]:
    siblings = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256, sha1 = sums(path)
        size = path.stat().st_size
        rfilename = path.relative_to(folder).as_posix()
        entry: dict[str, object] = {"rfilename": rfilename, "size": size, "blobId": sha1}
        if size >= LFS_FROM:
            entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 130}
        siblings.append(entry)
    return {"id": name, "sha": commit, "siblings": siblings, "gated": repo.gated}


def sums(path: Path) -> tuple[str, str]:
    """A file's sha256, and its name among git's blobs. Read once while the file stays as it is."""
    status = path.stat()
    return _sums(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@functools.lru_cache(256)
def _sums(path: Path, size: int, *state: int) -> tuple[str, str]:
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % size)
    blob.update(data)
    return hashlib.sha256(data).hexdigest(), blob.hexdigest()


def read_part(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            hub.on_request()
            hub.headers_seen.append({k.lower(): v for k, v in self.headers.items()})
            path = unquote(urlsplit(self.path).path)
            number = hub.log(path, self.headers.get("Range", ""))
            fault = hub.faults(path, number)
            if fault is not None and fault.kind.isdigit():
                extra = {"Retry-After": str(fault.seconds)} if fault.kind == "429" else {}
                self.answer(int(fault.kind), b"not now", extra)
                return
            parts = path.strip("/").split("/")
            parts[4:] = ["/".join(parts[4:])] if parts[2:3] == ["resolve"] else parts[4:]
            if parts == ["api", "whoami-v2"]:
                self.whoami()
            elif parts[:2] == ["api", "models"]:
                self.info(parts[2:], fault)
            elif parts[0] == "cdn":
                self.file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]), fault)
            elif len(parts) == 5 and parts[2] == "resolve":
                self.resolve(parts, fault)
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def repo(self, name: str, *, is_file: bool) -> Repo | None:
            repo = hub.repos.get(name)
            signed_in = repo and self.headers.get("Authorization") == f"Bearer {repo.token}"
            if repo is None or (repo.token and not repo.gated and not signed_in):
                self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
                return None
            if repo.gated and is_file and not signed_in:
                self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
                return None
            return repo

        def whoami(self) -> None:
            known = {f"Bearer {repo.token}" for repo in hub.repos.values() if repo.token}
            if self.headers.get("Authorization") not in known:
                self.answer(401, b"", {})
                return
            found = {"name": "ada", "auth": {"accessToken": {"role": "read", "displayName": "t"}}}
            self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        def info(self, parts: list[str], fault: Fault | None) -> None:
            name = "/".join(parts[:2])
            repo = self.repo(name, is_file=False)
            if repo is None:
                return
            revision = parts[3] if len(parts) > 3 else repo.branch
            folder = repo.folder_at(revision)
            if folder is None:
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            commit = repo.commit if folder == repo.folder else revision
            body = json.dumps(listing(repo, folder, name, commit)).encode()
            if fault is not None and fault.kind in ("drop", "truncated", "stall"):
                self.body(body, "", 200, {}, fault)
            else:
                self.answer(200, body, {"Content-Type": "application/json"})

        def resolve(self, parts: list[str], fault: Fault | None) -> None:
            name = "/".join(parts[:2])
            repo = self.repo(name, is_file=True)
            if repo is None:
                return
            if hub.redirect and not fault:
                folder = repo.folder_at(parts[3])
                if folder is not None and (folder / parts[4]).is_file():
                    place = f"{hub.url}/cdn/{name}/at/{parts[3]}/{parts[4]}"
                    place = place.replace("127.0.0.1", "localhost")  # another host: no token there
                    self.answer(302, b"", {"Location": place, "X-Repo-Commit": parts[3]})
                    return
            self.file(name, parts[3], parts[4], fault)

        def file(self, repo_name: str, revision: str, name: str, fault: Fault | None) -> None:
            folder = hub.repos[repo_name].folder_at(revision)
            if folder is None or not (folder / name).is_file():
                code = "RevisionNotFound" if folder is None else "EntryNotFound"
                self.answer(404, b"", {"X-Error-Code": code})
                return
            path = folder / name
            sha256, size = sums(path)[0], path.stat().st_size
            extra = {"X-Repo-Commit": revision, "ETag": f'"{sha256}"', "X-Linked-Etag": sha256}
            wanted = self.headers.get("Range", "")
            if not wanted or (fault is not None and fault.kind == "whole"):
                self.body(path.read_bytes(), name, 200, extra, fault)
                return
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first)
            end = min(int(last) + 1, size) if last else size
            if fault is not None and fault.kind == "other":
                start = min(start + 1, size - 1)
            if start >= size:
                self.answer(416, b"", extra | {"Content-Range": f"bytes */{size}"})
                return
            extra["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self.body(read_part(path, start, end), name, 206, extra, fault)

        def body(
            self, data: bytes, name: str, status: int, extra: dict[str, str], fault: Fault | None
        ) -> None:
            kind, at = (fault.kind, fault.at % (len(data) + 1)) if fault else ("", 0)
            if kind == "wrong" and data:
                at %= len(data)
                data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            if kind == "truncated":
                data = data[:at]
            self.send_response(status)
            for key, value in extra.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            end = at if kind in ("drop", "stall") else len(data)
            try:
                for begin in range(0, end, BLOCK):
                    block = data[begin : min(begin + BLOCK, end)]
                    self.wfile.write(block)
                    hub.count(name, len(block))
                    if kind == "slow" and fault:
                        time.sleep(fault.seconds)
                if kind == "stall" and fault:
                    time.sleep(fault.seconds)
            except OSError:
                end = -1  # the client has gone
            if end != len(data):
                self.close_connection = True

        def answer(self, status: int, body: bytes, extra: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in extra.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
