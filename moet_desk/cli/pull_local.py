"""`pull PATH`: what packing files of this computer takes, the question, and the packing. Main
thread.

Nothing is fetched and the files are only read; what has to be agreed to is the disk that the pack
takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moet_desk.cli.context import Invocation
from moet_desk.cli.models import pack_folder
from moet_desk.cli.output import Format, print_document, print_event, say
from moet_desk.cli.pull import is_agreed, left_out_words
from moet_desk.errors import ExitCode
from moet_desk.units import show_disk

_FOR_DOWNLOADS = ("reclaim", "revision", "limit_rate", "background")


def pull_local(invocation: Invocation, path: Path, options: dict[str, Any]) -> int:
    """Say what it takes, ask, and pack it; returns the exit code.

    Raises:
        MoetError: MD-DISK-01 no room, MD-PULL-03 nobody agreed; as `models.pack_folder`.
    """
    for name in _FOR_DOWNLOADS:
        if options[name]:
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} is for downloads, and {path} is here already")
    from moet_desk.store.source_paths import source_name

    name = options["name"] or source_name(path)
    fields = _figures(invocation, path, name)
    _say_figures(invocation, path, fields, is_all=options["dry_run"])
    if options["dry_run"]:
        return ExitCode.OK
    if not is_agreed(name, fields["left_bytes"], options, code="MD-PULL-03", ask="Write"):
        say("Nothing was packed.")
        return ExitCode.FAILED
    budget = options["memory_budget"]
    return pack_folder(invocation, path, name, memory_budget=budget, wait=False)


def _figures(invocation: Invocation, path: Path, name: str) -> dict[str, Any]:
    """All that can be said before the first row, as fields of JSON."""
    from moet_desk.cli.packing import plan_of_names
    from moet_desk.store.durable import check_space, free_bytes
    from moet_desk.store.model_source import ModelSource
    from moet_desk.store.pack_folder import missing_bytes, pack_sizes
    from moet_desk.store.pack_format import BASE_FILE, DENSE_FILE, FINE_FILE
    from moet_desk.store.pack_rows import RowMaker

    source = ModelSource.open(path)
    maker = RowMaker(
        source.index, plan_of_names(source.config, source.config_path, source.index.names())
    )
    dest = invocation.library.path_for(name)
    sizes = pack_sizes(maker)
    small = {name: len(data) for name, data in source.small.items()}
    is_there = invocation.library.has(name) and invocation.library.find(name).meta is not None
    need = 0 if is_there else missing_bytes(dest, sizes | small)
    if not is_there:
        check_space(dest, need, what=f"The pack {name}")
    pack_bytes = sum(sizes.values()) + sum(small.values())
    return {
        "model": name,
        "path": str(path),
        "family": maker.plan.model_type,
        "source_format": maker.source_format,
        "experts": maker.plan.n_rows,
        "files": len(maker.index.files),
        "source_bytes": sum(file.stat().st_size for file in maker.index.files),
        "base_bytes": sizes[BASE_FILE],
        "fine_bytes": sizes[FINE_FILE],
        "dense_bytes": sizes[DENSE_FILE],
        "pack_bytes": pack_bytes,
        "left_bytes": min(need, pack_bytes),
        "peak_bytes": pack_bytes,
        "need_bytes": need,
        "free_bytes": free_bytes(dest),
        "has_tokenizer": "tokenizer.json" in small,
        "left_out": maker.left_out,
    }


def _say_figures(
    invocation: Invocation, path: Path, fields: dict[str, Any], *, is_all: bool
) -> None:
    if invocation.format is Format.NDJSON:
        print_event("plan", **fields)
    elif invocation.format is Format.JSON and is_all:
        print_document(fields)
    size = {name: show_disk(fields[f"{name}_bytes"]) for name in _SAID}
    invocation.say(
        f"{path}: {fields['files']} files, {size['source']} of {fields['source_format']}, which"
        f" stay as they are. The pack takes {size['pack']} ({size['base']} of 2-bit rows,"
        f" {size['fine']} more for 4 bits, {size['dense']} of other weights);"
        f" {size['free']} are free."
    )
    if left_out := left_out_words(fields["left_out"]):
        invocation.say(left_out)
    if not fields["has_tokenizer"]:
        invocation.say("It has no tokenizer.json: it can be packed, and not run until it has one.")


_SAID = ("source", "pack", "base", "fine", "dense", "free")
