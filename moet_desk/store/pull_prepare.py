"""Before a download: what it is, whether it can be packed, and what it takes.

Owns the first, small part of a pull: the listing at a pinned commit, config and tokenizer, and the
headers of all shards. From these the whole plan is checked, so a model that cannot be packed or
does not fit is refused before its weights are fetched. One thread, with helpers for the headers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet_desk.errors import MoetError, fail
from moet_desk.store.durable import check_space, clear_leftovers, disk_errors
from moet_desk.store.fetch import PART, Line, check_file, fetch_file, fetch_start, save
from moet_desk.store.headers import (
    INDEX_FILE,
    LENGTH_BYTES,
    SINGLE_FILE,
    header_length,
    read_shard_index,
)
from moet_desk.store.hub import Listing, RemoteFile
from moet_desk.store.model_source import parse_config, quantization_of, read_small
from moet_desk.store.pack_folder import missing_bytes, pack_sizes
from moet_desk.store.pack_format import PACK_JSON, PackPlan
from moet_desk.store.pack_rows import RowMaker
from moet_desk.store.pull_state import (
    MADE_FROM,
    SMALL_FILES,
    STATE_VERSION,
    FileRecord,
    PullState,
    drop_headers,
    header_path,
    read_origin,
    read_state,
    write_state,
)
from moet_desk.store.quantization import Quantization
from moet_desk.store.shard_book import peak_bytes
from moet_desk.store.sources import TensorIndex, WeightFile, index_shards, raw_tensors
from moet_desk.store.stream_pack import unit_shards

_CONFIG = "config.json"
_HEADERS_AT_ONCE = 8

MakePlan = Callable[[Mapping[str, Any], str, Collection[str]], PackPlan]
"""(config, its path, logical tensor names) -> what the family says is in the model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person wants pulled, and how. `revision` "" is the default branch."""

    repo: str
    revision: str
    work: Path  # folder of the source
    dest: Path  # folder of the pack
    reclaim: bool = False
    parallel: int = 2

    @property
    def window(self) -> int:
        """Shards on disk at a time with `reclaim`: those on their way and one being packed."""
        return self.parallel + 1


@dataclass(frozen=True, slots=True)
class Figures:
    """What a pull takes, in bytes."""

    total: int  # all files it needs
    left: int  # of these, still to be fetched
    pack: int  # the pack when it is done
    peak: int  # of the disk at most, what is there already included
    need: int  # more disk space than is taken now


@dataclass(frozen=True, slots=True)
class Prepared:
    """A pull that can begin."""

    asked: Asked
    state: PullState
    shards: tuple[RemoteFile, ...]
    maker: RowMaker
    homes: Mapping[str, WeightFile]
    headers: Mapping[str, bytes]
    figures: Figures
    moved: str = ""  # commit that the revision has now, if it is not the pinned one

    @property
    def listing(self) -> Listing:
        return _listing(self.state)


def prepare(asked: Asked, line: Line, make_plan: MakePlan) -> Prepared | None:
    """Find out what a pull means; None: the pack is there already.

    Fetches small files and headers only.

    Raises:
        MoetError: MD-NET-.., MD-HUB-.. the hub; MD-SRC-.., MD-PACK-01 a model that cannot be
            packed; MD-PACK-08 the name is taken; MD-DISK-02, 03 the disk.
        Stopped: asked to stop.
    """
    revision = asked.revision or None
    now = line.patiently(lambda: line.hub.listing(asked.repo, revision))
    state, moved = _pin(asked, now)
    listing = _listing(state)
    if _is_complete(asked, listing):
        with suppress(OSError, MoetError):  # they may stay where that is not possible
            clear_leftovers(asked.dest)
        return None
    _keep(asked, state)
    seen = look_at_model(asked.work, listing, line, make_plan)
    return Prepared(
        asked=asked,
        state=state,
        shards=seen.shards,
        maker=seen.maker,
        homes=seen.homes,
        headers=seen.headers,
        figures=_figures(asked, state, seen.shards, seen.maker),
        moved=moved,
    )


@dataclass(frozen=True, slots=True)
class SeenModel:
    """A model by its small files and headers; the weights need not be here."""

    shards: tuple[RemoteFile, ...]
    headers: Mapping[str, bytes]
    homes: Mapping[str, WeightFile]
    maker: RowMaker


def look_at_model(work: Path, listing: Listing, line: Line, make_plan: MakePlan) -> SeenModel:
    """Bring small files and headers into `work`, and check the plan against them.

    Raises:
        MoetError: as `prepare`.
        Stopped: asked to stop.
    """
    _fetch_small(work, listing, line)
    path = str(work / _CONFIG)
    config = parse_config(read_small(work)[_CONFIG], path)
    quantization = quantization_of(work, config)
    shards = _shards(work, listing)

    def look(*, fresh: bool) -> SeenModel:
        headers, index, homes = _index(work, listing, shards, line, quantization, fresh=fresh)
        maker = RowMaker(index, make_plan(config, path, index.names()))
        return SeenModel(shards, headers, homes, maker)

    try:
        return look(fresh=False)
    except MoetError as error:
        if not error.code.startswith("MD-SRC"):
            raise
        # headers alone have no checksum: look twice before a model is blamed
        return look(fresh=True)


def check_room(prepared: Prepared) -> None:
    """Whether the disk has room for all of it.

    Raises:
        MoetError: MD-DISK-01, with the figures.
    """
    asked = prepared.asked
    check_space(asked.dest, prepared.figures.need, what=f"Fetching and packing {asked.dest.name}")


def _pin(asked: Asked, now: Listing) -> tuple[PullState, str]:
    """The state of this download, new or from before; and the commit it has moved to, if so."""
    known = read_state(asked.work)
    if known is not None and known.repo != asked.repo:
        names = {"path": str(asked.work), "model": asked.work.name}
        raise fail("MD-PACK-08", got=known.repo, want=asked.repo, **names)
    if known is not None and known.revision == asked.revision:
        return known, now.commit if now.commit != known.commit else ""
    files = [
        FileRecord(file.name, file.size, file.sha256, file.git_sha1)
        for file in now.files
        if "/" not in file.name or file.name in MADE_FROM
    ]
    landed = {} if known is None else known.landed
    same = {} if known is None else {file.name for file in files if file in known.files}
    kept = {name: ours for name, ours in landed.items() if name in same}
    return PullState(STATE_VERSION, asked.repo, asked.revision, now.commit, files, kept), ""


def _keep(asked: Asked, state: PullState) -> None:
    """Write down a new state; of another revision only the files that are the same stay."""
    known = read_state(asked.work)
    if known == state:
        return
    if known is not None:
        drop_headers(asked.work)
        for file in known.files:
            if file not in state.files:
                (asked.work / file.name).unlink(missing_ok=True)
                (asked.work / f"{file.name}{PART}").unlink(missing_ok=True)
    write_state(asked.work, state)


def _listing(state: PullState) -> Listing:
    files = tuple(RemoteFile(f.name, f.size, f.sha256, f.git_sha1) for f in state.files)
    return Listing(state.repo, state.commit, files)


def _fetch_small(work: Path, listing: Listing, line: Line) -> None:
    for name in SMALL_FILES:
        file = listing.file(name)
        if file is not None and check_file(file, work / name, line) is None:
            with disk_errors(work / name, lambda: "a folder"):
                (work / name).parent.mkdir(exist_ok=True)
            fetch_file(line, listing, file, work)
    if not (work / _CONFIG).is_file():
        raise fail("MD-SRC-01", path=listing.repo, missing=_CONFIG)


def _shards(work: Path, listing: Listing) -> tuple[RemoteFile, ...]:
    if (work / INDEX_FILE).is_file():
        names = sorted(set(read_shard_index(work / INDEX_FILE).values()))
    elif listing.file(SINGLE_FILE):
        names = [SINGLE_FILE]
    else:
        names = [file.name for file in listing.files if file.name.endswith(".safetensors")]
        if len(names) != 1:
            missing = INDEX_FILE if names else ".safetensors file"
            raise fail("MD-SRC-01", path=listing.repo, missing=missing)
    files = [listing.file(name) for name in names]
    absent = [name for name, file in zip(names, files, strict=True) if file is None]
    if absent:
        raise fail("MD-SRC-01", path=listing.repo, missing=absent[0])
    return tuple(file for file in files if file is not None)


_Indexed = tuple[dict[str, bytes], TensorIndex, dict[str, WeightFile]]


def _index(
    work: Path,
    listing: Listing,
    shards: tuple[RemoteFile, ...],
    line: Line,
    quantization: Quantization,
    *,
    fresh: bool,
) -> _Indexed:
    """All tensors of the model, from headers that are here or are fetched."""
    if fresh:
        drop_headers(work)
    with ThreadPoolExecutor(_HEADERS_AT_ONCE, thread_name_prefix="header") as pool:
        found = pool.map(lambda file: _header(work, listing, file, line), shards)
        headers = {file.name: header for file, header in zip(shards, found, strict=True)}
    homes = {file.name: WeightFile(work / file.name) for file in shards}
    sizes = {file.name: file.size for file in shards}
    if not (work / INDEX_FILE).is_file():
        (name,) = headers
        raws = {raw.name: raw for raw in raw_tensors(homes[name], headers[name], sizes[name])}
        return headers, TensorIndex(raws, [work / name], quantization), homes
    index = index_shards(
        work,
        read_shard_index(work / INDEX_FILE),
        lambda name: raw_tensors(homes[name], headers[name], sizes[name]),
        quantization,
    )
    return headers, index, homes


def _header(work: Path, listing: Listing, file: RemoteFile, line: Line) -> bytes:
    """The JSON header of a shard."""
    path = header_path(work, file.name)
    home = WeightFile(work / file.name)
    for again in (True, True, False):
        data = path.read_bytes() if path.is_file() else b""
        try:
            if not data and home.path.is_file() and home.path.stat().st_size == file.size:
                data = _with_length(home.attach())
            if not data:
                data = fetch_start(line, listing, file, lambda start: _header_end(start, file))
                save(path, data)
            list(raw_tensors(home, data[LENGTH_BYTES:], file.size))
        except MoetError as error:
            path.unlink(missing_ok=True)  # perhaps it was damaged on its way
            if not again or not error.code.startswith("MD-SRC"):
                raise
        else:
            return data[LENGTH_BYTES:]
        finally:
            home.detach()
    raise AssertionError("the last try returns or raises")


def _with_length(header: bytes) -> bytes:
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _header_end(start: bytes, file: RemoteFile) -> int:
    if len(start) < LENGTH_BYTES:
        return min(LENGTH_BYTES, file.size)
    return LENGTH_BYTES + header_length(start[:LENGTH_BYTES], file.size, file.name)


def _is_complete(asked: Asked, listing: Listing) -> bool:
    """Whether the pack of this very model is there; refuses the pack of another one."""
    if not (asked.dest / PACK_JSON).is_file():
        return False
    origin = read_origin(asked.dest)
    listed = {file.name: file for file in listing.files}
    if origin is not None and all(
        listed.get(f.name) == RemoteFile(f.name, f.size, f.sha256, f.git_sha1) for f in origin.files
    ):
        return True
    got = "a folder" if origin is None else f"{origin.repo} at {origin.commit[:12]}"
    names = {"path": str(asked.dest), "model": asked.dest.name}
    raise fail("MD-PACK-08", got=got, want=f"{listing.repo} at {listing.commit[:12]}", **names)


def _figures(
    asked: Asked, state: PullState, shards: tuple[RemoteFile, ...], maker: RowMaker
) -> Figures:
    listing = _listing(state)
    small = [file for name in SMALL_FILES if (file := listing.file(name)) is not None]
    small_bytes = sum(file.size for file in small)
    sizes = {file.name: file.size for file in shards}
    here = {name: _arrived(asked.work, name, size) for name, size in sizes.items()}
    done = {n for n in sizes if here[n] == sizes[n] or (asked.reclaim and n in state.landed)}
    left = sum(size - here[name] for name, size in sizes.items() if name not in done)
    pack = pack_sizes(maker)
    if asked.reclaim:
        held = peak_bytes(unit_shards(maker), sizes, asked.window)
    else:
        held = sum(sizes.values())
    pack_bytes = sum(pack.values()) + small_bytes
    need = missing_bytes(asked.dest, pack) + max(0, held - sum(here.values())) + small_bytes
    return Figures(
        total=sum(sizes.values()) + small_bytes,
        left=left,
        pack=pack_bytes,
        peak=pack_bytes + held + small_bytes,
        need=need,
    )


def _arrived(work: Path, name: str, size: int) -> int:
    for path in (work / name, work / f"{name}{PART}"):
        if path.is_file():
            return min(path.stat().st_size, size)
    return 0
