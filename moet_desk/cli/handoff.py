"""`handoff`: settings with which another server serves the same model on larger computers.

How many GPUs are needed is estimated from the catalogue; nothing is asked of the other program.
Runs in the main thread; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from moet_desk.catalogue import CatalogueEntry, find_entry
from moet_desk.cli.context import Invocation, Size, global_options, output_options
from moet_desk.cli.output import Format, print_result, print_text
from moet_desk.cli.plan import complete_known
from moet_desk.errors import ExitCode, fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.store.durable import write_new
from moet_desk.units import GIB, show_disk, show_memory

_MOST_GPUS = 8  # of one computer, as servers have them
_DEFAULT_GPU = 80 * GIB
_SHARE = 0.9  # of a card's memory that vLLM takes unless it is told otherwise
_BESIDE = 4 * GIB  # per card: activations, CUDA graphs; assumed


@dataclass(frozen=True, slots=True)
class Sizing:
    """How many GPUs a model takes. An estimate: see `size_up`.

    Attributes:
        weights: bytes of the weights.
        is_published: that is the size of the download; else it is counted.
        kv: bytes of one conversation of full length.
        gpus: of one node.
        nodes: computers.
        need_per_gpu: bytes that each card has to hold.
        room_per_gpu: bytes that each card has for that.
    """

    weights: int
    is_published: bool
    kv: int
    gpus: int
    nodes: int
    need_per_gpu: int
    room_per_gpu: int

    @property
    def fits(self) -> bool:
        """Whether weights and one full conversation fit."""
        return self.need_per_gpu <= self.room_per_gpu


def size_up(
    entry: CatalogueEntry, *, gpu_bytes: int, context: int, gpus: int | None, nodes: int | None
) -> Sizing:
    """Estimate the GPUs for a model's own files and one conversation of `context` tokens.

    Attention's heads are split over a node's GPUs, so their number divides the heads; layers are
    split over nodes. KV is split by its heads; latent KV is the same on all GPUs of a node.

    Args:
        entry: the model.
        gpu_bytes: memory of one GPU.
        context: tokens.
        gpus: of one node; None: as many as are needed, 8 at most.
        nodes: None: as many as are needed.
    """
    weights = entry.download_bytes or entry.weight_bytes
    kv = context * entry.kv_token_bytes(KvFormat.BF16)

    def sized(n_gpus: int, n_nodes: int) -> Sizing:
        shares = n_nodes * min(n_gpus, 1 if entry.gqa is None else entry.gqa.keys)
        need = -(-weights // (n_gpus * n_nodes)) - (-kv // shares)
        return Sizing(
            weights, entry.download_bytes is not None, kv, n_gpus, n_nodes, need,
            max(0, int(_SHARE * gpu_bytes) - _BESIDE),
        )  # fmt: skip

    counts = [gpus] if gpus else [n for n in (1, 2, 4, _MOST_GPUS) if entry.heads % n == 0]
    for n_gpus in counts:  # on one node if it can be
        if sized(n_gpus, nodes or 1).fits:
            return sized(n_gpus, nodes or 1)
    most = counts[-1]
    for n_nodes in [nodes] if nodes else range(1, entry.layers + 1):
        if sized(most, n_nodes).fits:
            return sized(most, n_nodes)
    return sized(most, nodes or 1)


def vllm_config(entry: CatalogueEntry, sizing: Sizing, *, gpu_bytes: int, context: int) -> str:
    """The text of a file for `vllm serve --config`."""
    source = "as published" if sizing.is_published else "counted from their published form"
    cards = f"{sizing.nodes} x {sizing.gpus}" if sizing.nodes > 1 else str(sizing.gpus)
    lines = [
        f"# {entry.title}, licence {entry.licence}: the makers' own files, not a pack of ours.",
        f"# Estimate, not tried: weights {show_disk(sizing.weights)} ({source}), and"
        f" {show_memory(sizing.kv)} for one",
        f"# conversation of {context:,} tokens, are {show_memory(sizing.need_per_gpu)} on each of"
        f" {cards} GPUs; of {show_memory(gpu_bytes)}",
        f"# each has {show_memory(sizing.room_per_gpu)} for that. More conversations need more.",
        "# Whether your vLLM runs this model, and which tool-call-parser and reasoning-parser it",
        "# wants, its documentation says.",
    ]
    if not sizing.fits:
        lines.append("# By this estimate it does NOT fit: use more or larger GPUs.")
    if sizing.nodes > 1:
        lines += [
            "# Before, with the same software on all computers; HEAD is the first one's address:",
            "#   on the first:    ray start --head --port=6379",
            f"#   on {sizing.nodes - 1} more:       ray start --address=HEAD:6379",
            "# Then, on the first:",
        ]
    lines += [
        f"#   vllm serve --config {entry.name}.yaml",
        f"model: {entry.repo}",
        f"served-model-name: {entry.name}",
        f"max-model-len: {context}",
        f"tensor-parallel-size: {sizing.gpus}",
        f"pipeline-parallel-size: {sizing.nodes}",
    ]
    if sizing.nodes > 1:
        lines.append("distributed-executor-backend: ray")
    return "\n".join(lines) + "\n"


@click.group()
@global_options
def handoff() -> None:
    """Write settings for a server on larger computers."""


@handoff.command()
@click.argument("model", shell_complete=complete_known)
@click.option("--gpus", type=click.IntRange(min=1), help="Of one computer; else as many as needed.")
@click.option("--nodes", type=click.IntRange(min=1), help="Computers; else as many as needed.")
@click.option("--gpu-memory", type=Size(at_least=1), help="Of one GPU; 80GiB by default.")
@click.option("--context", type=click.IntRange(min=64), help="Tokens; else the model's own.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this new file too."
)
@output_options
@click.pass_obj
def vllm(
    invocation: Invocation,
    /,
    model: str,
    *,
    gpus: int | None,
    nodes: int | None,
    gpu_memory: int | None,
    context: int | None,
    out: Path | None,
) -> int:
    """Print a configuration for vLLM, with an estimate of the GPUs it needs.

    MODEL is one of `moet-desk ls --available`. Several computers are joined by Ray. Use the result
    with `vllm serve --config FILE`, and this app with `moet-desk chat --connect URL`.
    """
    entry = find_entry(model)
    if entry is None:
        raise fail("MD-CAT-02", model=model)
    if gpus and entry.heads % gpus:
        raise click.UsageError(f"--gpus must divide the {entry.heads} heads of {entry.name}")
    gpu_bytes = gpu_memory or _DEFAULT_GPU
    tokens = min(context or entry.context, entry.context)
    sizing = size_up(entry, gpu_bytes=gpu_bytes, context=tokens, gpus=gpus, nodes=nodes)
    text = vllm_config(entry, sizing, gpu_bytes=gpu_bytes, context=tokens)
    if out is not None:
        write_new(out, text)
    if invocation.format is Format.HUMAN:
        print_text(text.rstrip("\n"))
    else:
        print_result(
            invocation.format,
            "handoff",
            {
                "model": entry.name,
                "gpus": sizing.gpus,
                "nodes": sizing.nodes,
                "fits": sizing.fits,
                "weight_bytes": sizing.weights,
                "kv_bytes": sizing.kv,
                "is_estimate": True,
                "config": text,
            },
        )
    if not sizing.fits:
        invocation.say("By this estimate it does not fit; see the notes in it.")
    return ExitCode.OK
