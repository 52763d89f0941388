"""What a model hub says: which files a repository has, their sizes and hashes, and where they are.

Owns the use of huggingface_hub: addresses, tokens, gated repositories, proxies, and the words for
what the hub refuses. The bytes of big files are `fetch`'s work, through the session of the same
library (docs/adr/0011). Imported by downloading processes only: the library takes half a second to
import. Any thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from moet_desk import __version__, config
from moet_desk.errors import MoetError, fail

# else the library asks the hub for a list of other programs, looks for them in the environment, and
# tells the hub which of them and which torch it found; docs/privacy.md says we do not
constants.HF_HUB_DISABLE_TELEMETRY = True

_TOKEN = re.compile(r"[!-~]+")  # what a header can carry; the hub says whether it is one
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TIMEOUT = httpx2.Timeout(20.0, read=15.0)  # a connection that is silent for longer is dead
_RETRIED = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. Exactly one of the hashes is there; both are hex."""

    name: str
    size: int
    sha256: str = ""  # of big files
    git_sha1: str = ""  # of small ones: sha1 over "blob SIZE\\0" and the content


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile | None:
        """The file of this name, with its folders as the hub writes them."""
        return next((file for file in self.files if file.name == name), None)


_DEFAULT_ENDPOINT = "https://huggingface.co"


class Passing(Exception):
    """A failure that may be gone when it is tried again.

    Attributes:
        error: what it becomes when it does not go; its `attempts` fact is still open.
        wait_s: what the server asked for, None if it did not say.
    """

    def __init__(self, error: MoetError, wait_s: float | None = None) -> None:
        self.error = error
        self.wait_s = wait_s
        super().__init__(str(error))


def is_repo(text: str) -> bool:
    """Whether this can be the name of a repository."""
    return _REPO.fullmatch(text) is not None


class Hub:
    """One hub, by default the one of HF_ENDPOINT with the token that the user signed in with.

    Making one raises MD-CFG-03 if HF_ENDPOINT is no address.
    """

    def __init__(self, endpoint: str | None = None, *, timeout: httpx2.Timeout = _TIMEOUT) -> None:
        self.endpoint = endpoint or constants.ENDPOINT or _DEFAULT_ENDPOINT  # a variable left empty
        self.host = urlsplit(self.endpoint).netloc
        if not self.host or urlsplit(self.endpoint).scheme not in ("http", "https"):
            # asking it would fail like a network that is down, and be tried for minutes
            raise fail(
                "MD-CFG-03",
                name="HF_ENDPOINT",
                value=self.endpoint,
                source="the environment",
                reason="it must be an address like https://huggingface.co",
                default=_DEFAULT_ENDPOINT,
            )
        self._timeout = timeout
        self._headers = build_hf_headers(library_name="moet-desk", library_version=__version__)
        self._api = huggingface_hub.HfApi(
            endpoint=self.endpoint, library_name="moet-desk", library_version=__version__
        )

    @property
    def token_page(self) -> str:
        """Where a person makes tokens."""
        return f"{self.endpoint}/settings/tokens"

    def listing(self, repo: str, revision: str | None) -> Listing:
        """The files of a repository at a branch, tag or commit.

        Raises:
            Passing: try again.
            MoetError: MD-HUB-01 not found, MD-HUB-02 gated, MD-HUB-04 not an answer of a hub,
                MD-NET-03 no trust.
        """
        with self._refusals(repo, revision):
            try:
                info = self._api.model_info(
                    repo, revision=revision, files_metadata=True, timeout=self._timeout.read
                )
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if isinstance(error, hub_errors.HfHubHTTPError | hub_errors.HFValidationError):
                    raise
                # the library reads the answer without checking it; it may have been cut short
                raise Passing(self._unusable(f"{type(error).__name__}: {error}")) from error
        files = []
        for found in info.siblings or ():
            size = found.lfs.size if found.lfs else found.size
            if size is None:
                continue
            sha256 = found.lfs.sha256 if found.lfs else ""
            sha1 = "" if found.lfs else found.blob_id or ""
            files.append(RemoteFile(found.rfilename, size, sha256, sha1))
        if not info.sha or not files:
            raise self._unusable(f"it lists no files for {repo}")
        return Listing(repo, info.sha, tuple(files))

    @contextmanager
    def open(self, listing: Listing, name: str, *, start: int, end: int | None) -> Iterator[Body]:
        """Ask for bytes `start` to `end` (not included; None: the rest) of a file.

        Raises:
            Passing: try again; also while the body is read.
            MoetError: as `listing`; MD-HUB-03 the hub has another commit.
        """
        place = f"{listing.repo}/resolve/{listing.commit}/{quote(name)}"
        url = f"{self.endpoint}/{place}"
        last = "" if end is None else str(end - 1)
        wanted = {"Range": f"bytes={start}-{last}", "Accept-Encoding": "identity"}
        with self._refusals(listing.repo, listing.commit, name):  # noqa: SIM117  # order matters
            with get_session().stream(
                "GET", url, headers=self._headers | wanted, timeout=self._timeout
            ) as response:
                if response.status_code >= 400 and response.status_code != 416:
                    response.read()
                    hf_raise_for_status(response)
                self._check_commit(listing, response)
                yield Body(response)

    def cached(self, listing: Listing, name: str) -> Path | None:
        """The file in the library's own cache of downloads, unchecked; None: it is not there."""
        found = huggingface_hub.try_to_load_from_cache(listing.repo, name, revision=listing.commit)
        return Path(found) if isinstance(found, str) else None

    def sign_in(self, token: str) -> None:
        """Ask the hub whether it knows a token, and keep it in the library's own place for tokens,
        which only this user can read. It counts for every `Hub` that is made from now on.

        Raises:
            MoetError: MD-HUB-05 the hub does not know it, MD-HUB-06 the environment holds another;
                MD-NET-.., MD-HUB-04 the connection; MD-DISK-03 it cannot be kept.
        """
        if config.names_hub_token():
            raise fail("MD-HUB-06")
        token = token.strip()
        unknown = fail("MD-HUB-05", host=self.host, page=self.token_page)
        if _TOKEN.fullmatch(token) is None:
            raise unknown
        try:
            with self._refusals("the token", None):
                huggingface_hub.login(token, add_to_git_credential=False)
        except MoetError as error:
            raise (unknown if error.code == "MD-HUB-02" else error) from None
        except Passing as passing:
            raise fail(passing.error.code, **{**passing.error.facts, "attempts": 1}) from None
        except ValueError:  # of an organisation, which the hub does not let read
            raise unknown from None
        except OSError as error:
            raise fail("MD-DISK-03", path=constants.HF_TOKEN_PATH, reason=str(error)) from None

    def _check_commit(self, listing: Listing, response: httpx2.Response) -> None:
        for answer in (*response.history, response):
            got = answer.headers.get("X-Repo-Commit", listing.commit)
            if got != listing.commit:
                raise self._changed(listing.repo, listing.commit, got[:12])

    def _changed(self, repo: str, want: str, got: str) -> MoetError:
        return fail("MD-HUB-03", repo=repo, want=want[:12], got=got, model=repo.rpartition("/")[2])

    @contextmanager
    def _refusals(self, repo: str, revision: str | None, name: str = "") -> Iterator[None]:
        """Turn the exceptions of library and connection into ours."""
        at = f" at revision {revision}" if revision else ""
        try:
            yield
        except hub_errors.GatedRepoError as error:
            page = f"{self.endpoint}/{repo}"
            raise fail("MD-HUB-02", repo=repo, page=page) from error
        except hub_errors.RevisionNotFoundError as error:
            if name:  # it was there when the download began
                raise self._changed(repo, revision or "", "no such commit") from error
            raise fail("MD-HUB-01", host=self.host, repo=repo, detail=at) from error
        except hub_errors.RepositoryNotFoundError as error:
            raise fail("MD-HUB-01", host=self.host, repo=repo, detail="") from error
        except hub_errors.RemoteEntryNotFoundError as error:
            detail = f"/{name}{at}"
            raise fail("MD-HUB-01", host=self.host, repo=repo, detail=detail) from error
        except hub_errors.OfflineModeIsEnabled as error:
            reason = "HF_HUB_OFFLINE is set"
            raise fail("MD-NET-01", host=self.host, reason=reason, attempts=0) from error
        except hub_errors.HFValidationError as error:
            raise fail("MD-HUB-01", host=self.host, repo=repo, detail=at) from error
        except hub_errors.HfHubHTTPError as error:
            raise self._status(error.response, repo) from error
        except httpx2.TransportError as error:
            raise self._lost(error) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unusable(f"{type(error).__name__}: {error}") from error

    def _status(self, response: httpx2.Response, repo: str) -> Exception:
        status = response.status_code
        if status in (401, 403):
            return fail("MD-HUB-02", repo=repo, page=f"{self.endpoint}/{repo}")
        if status not in _RETRIED:
            return self._unusable(f"it answered {status}")
        wait_s = _seconds(response.headers.get("Retry-After", ""))
        words = "" if wait_s is None else f" and asks to wait {wait_s:.0f} s"
        facts = {"host": self.host, "status": status, "wait": words}
        return Passing(fail("MD-NET-02", **facts), wait_s)

    def _lost(self, error: httpx2.TransportError) -> Exception:
        reason = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return fail("MD-NET-03", host=self.host, reason=reason)
        return Passing(fail("MD-NET-01", host=self.host, reason=reason))

    def _unusable(self, reason: str) -> MoetError:
        return fail("MD-HUB-04", host=self.host, reason=reason)


class Body:
    """The answer to a range request."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    @property
    def start(self) -> int | None:
        """Where its first byte lies in the file; None: there is nothing at the place asked for."""
        status, headers = self._response.status_code, self._response.headers
        if status == 416:
            return None
        if status != 206:
            return 0  # the server ignored the range and sends everything
        found = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
        return int(found[1]) if found else None

    def chunks(self) -> Iterator[bytes]:
        """The bytes as they come: with a size of its own the library would hold some back, and
        they would be lost with the connection.
        """
        return self._response.iter_raw()


def _seconds(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    return None
