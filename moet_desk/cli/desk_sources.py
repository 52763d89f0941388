"""Models that are not packed yet: repositories, folders, the one that comes with the program.

It finds out what they are from config and headers alone, and how a job would get them. May take
long and use the network; called in threads.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moet_desk.errors import MoetError, fail
from moet_desk.ui.desk import Fit, Offer

if TYPE_CHECKING:
    from moet_desk.cli.context import Invocation
    from moet_desk.engine.planned_model import PlannedModel
    from moet_desk.store.pack_rows import RowMaker
    from moet_desk.store.pull_prepare import Prepared

_LINK = re.compile(r"(?:https?://)?huggingface\.co/([^/\s]+/[^/\s?#]+)(?:[/?#].*)?")
KEEP_FREE_SHARE = 0.1
"""Free disk below this part of what is free now asks for deleting files as they are packed."""


@dataclass(frozen=True, slots=True)
class Known:
    """An offer, its name as a pack, what the planner sees, and the job that gets it."""

    offer: Offer
    name: str
    model: PlannedModel | None
    kind: str  # "pack" or "pull"
    arguments: tuple[str, ...]


def repository_in(text: str) -> str:
    """A repository's name in a link, else the text as it is."""
    found = _LINK.fullmatch(text.strip())
    return found.group(1) if found else text.strip()


def planned_local(path: Path, name: str) -> tuple[RowMaker, PlannedModel]:
    """A folder with a model's files or a GGUF file, as the packer and the planner see it.

    Raises:
        MoetError: MD-SRC-.., MD-GGUF-.., MD-PACK-01 it cannot be packed.
    """
    from moet_desk.engine.families import plan_for
    from moet_desk.store.model_source import ModelSource
    from moet_desk.store.pack_rows import RowMaker

    source = ModelSource.open(path)
    names = source.index.names()
    maker = RowMaker(source.index, plan_for(source.config, path=source.config_path, names=names))
    return maker, planned(name, source.config, source.config_path, maker)


def known_local(folder: Path, name: str, **words: Any) -> Known:
    """A folder with a model's files or a GGUF file; `words` are fields of its offer.

    Raises:
        MoetError: as `planned_local`.
    """
    maker, model = planned_local(folder, name)
    fields: dict[str, Any] = {
        "id": str(folder),
        "title": name,
        "about": _about(maker, f"{maker.plan.model_type}, ", f", from {folder}"),
    }
    fields |= {"download_bytes": 0, "pack_bytes": model.pack_bytes, "peak_bytes": model.pack_bytes}
    arguments = ("pack", str(folder), "--name", name, "--wait")
    return Known(Offer(**(fields | words)), name, model, "pack", arguments)


def known_repository(invocation: Invocation, repo: str) -> Known:
    """A repository of the hub; its config and headers are read, nothing is kept.

    Raises:
        MoetError: MD-NET-.., MD-HUB-.., MD-SRC-.., MD-PACK-01, MD-PACK-08.
    """
    from moet_desk.store.durable import free_bytes

    name = repo.rpartition("/")[2]
    dest = invocation.library.path_for(name)
    prepared, model = _look_at(invocation, repo, name, reclaim=False)
    figures, free = prepared.figures, free_bytes(dest)
    reclaim = figures.need > free * (1 - KEEP_FREE_SHARE)
    if reclaim:
        prepared, model = _look_at(invocation, repo, name, reclaim=True)
        figures = prepared.figures
    offer = Offer(
        id=repo,
        title=name,
        download_bytes=figures.left,
        pack_bytes=figures.pack,
        peak_bytes=figures.peak,
        fit=Fit.NO_ROOM if figures.need > free else Fit.UNKNOWN,
        reason="The drive has too little room." if figures.need > free else "",
        revision=prepared.state.commit[:12],
        about=_about(prepared.maker, f"{repo}: {prepared.maker.plan.model_type}, "),
    )
    return Known(offer, name, model, "pull", pull_arguments(repo, name, reclaim=reclaim))


def _about(maker: RowMaker, before: str, behind: str = "") -> tuple[str, ...]:
    """Lines about a source: its experts, and what of it will not be packed."""
    from moet_desk.cli.pull import left_out_words

    plan = maker.plan
    shape = f"{len(plan.moe_layers)} MoE layers x {plan.n_experts} experts"
    left_out = left_out_words(maker.left_out)
    return (f"{before}{shape}, {maker.source_format}{behind}", *([left_out] if left_out else []))


def _look_at(
    invocation: Invocation, repo: str, name: str, *, reclaim: bool
) -> tuple[Prepared, PlannedModel]:
    """What a pull would mean; only one that has begun leaves files behind."""
    from moet_desk.cli.packing import plan_of_names
    from moet_desk.store.fetch import Line
    from moet_desk.store.hub import Hub
    from moet_desk.store.model_source import parse_config
    from moet_desk.store.pull_prepare import Asked, prepare
    from moet_desk.store.pull_state import read_state

    dest, begun = invocation.library.path_for(name), invocation.locations.sources_dir / name
    with tempfile.TemporaryDirectory(prefix="moet-desk-look-") as folder:
        work = begun if read_state(begun) is not None else Path(folder)
        asked = Asked(repo=repo, revision="", work=work, dest=dest, reclaim=reclaim)
        prepared = prepare(asked, Line(Hub()), plan_of_names)
        if prepared is None:  # it is here already
            raise fail("MD-PACK-08", path=str(dest))
        path = work / "config.json"
        config = parse_config(path.read_bytes(), str(path))
        return prepared, planned(name, config, str(path), prepared.maker)


def pull_arguments(repo: str, name: str, *, reclaim: bool) -> tuple[str, ...]:
    """The command that gets a repository; the screens have asked about its size before."""
    asked = ("pull", repo, "--name", name, "--yes-really")
    return (*asked, "--reclaim") if reclaim else asked


def planned(
    name: str, config: Mapping[str, Any], config_path: str, maker: RowMaker
) -> PlannedModel:
    """A model as the planner sees it, before it is packed.

    Raises:
        MoetError: MD-SRC-07 its config cannot be used, MD-PACK-01 its family does not run.
    """
    from moet_desk.engine.dense_format import PLAIN, saving
    from moet_desk.engine.families import packed_head, spec_for
    from moet_desk.engine.model_shape import RowSizes
    from moet_desk.engine.planned_model import PlannedModel
    from moet_desk.store.pack_folder import pack_sizes
    from moet_desk.store.pack_format import DENSE_FILE

    has_mtp = packed_head(config, maker.plan.moe_layers, maker.plan.dense, path=config_path)
    sizes = pack_sizes(maker)
    by_row = maker.plan.by_row
    table = sum(
        maker.index.info(tensor).bytes
        for tensor in maker.plan.dense
        if by_row and tensor.startswith(by_row)
    )
    return PlannedModel(
        name=name,
        spec=spec_for(config, path=config_path, has_mtp=has_mtp),
        sizes=RowSizes.of(maker.layout),
        dense_bytes=sizes[DENSE_FILE] - table,
        table_bytes=table,
        dense_saving=saving(
            (info.name, info.shape, info.bytes)
            for info in map(maker.index.info, maker.plan.dense)
            if info.format.name in PLAIN
        ),
        pack_bytes=sum(sizes.values()),
    )


def nothing_there(text: str) -> MoetError:
    """The error for a text that is neither."""
    missing = "files, and it is no name of a repository"
    return fail("MD-SRC-01", path=text, missing=missing)
