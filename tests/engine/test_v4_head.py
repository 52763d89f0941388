"""DeepSeek-V4's MTP head: against transformers' layer fed by hand, and guessing several tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.draft import CpuHead, MtpDrafter
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import pack_source
from tests.engine.oracle import loaded
from tests.engine.test_v4 import SMALL
from tests.engine.tiny_v4 import random_v4, released_name, save_v4

LENGTH = 24
HEAD_ONLY = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}


def with_head(
    init: float, folder: Path, config: dict[str, Any] = SMALL
) -> tuple[Any, dict[str, Tensor], Path]:
    """transformers' one layer of the head, the head's own tensors, and a pack of all."""
    model, layer = random_v4(config, init), random_v4({**config, **HEAD_ONLY}, init)
    spread = torch.Generator().manual_seed(9)
    with torch.no_grad():  # two random models of one seed begin alike
        for value in layer.model.layers[0].parameters():
            value.add_(init * torch.randn(value.shape, generator=spread))
        layer.lm_head.weight.copy_(model.lm_head.weight)
    hidden = config["hidden_size"]
    own = {
        "e_proj.weight": init * torch.randn(hidden, hidden, generator=spread),
        "h_proj.weight": init * torch.randn(hidden, hidden, generator=spread),
        "enorm.weight": 1 + 0.1 * torch.randn(hidden, generator=spread),
        "hnorm.weight": 1 + 0.1 * torch.randn(hidden, generator=spread),
    }
    layer.save_pretrained(folder / "layer")
    from safetensors.torch import load_file

    (file,) = (folder / "layer").glob("*.safetensors")
    more = {f"mtp.0.{name}": value for name, value in own.items()}
    for saved, value in load_file(file).items():
        name = released_name(saved)
        if name not in ("embed.weight", "head.weight"):
            more["mtp.0." + name.removeprefix("layers.0.")] = value
    save_v4(model, config, folder / "source", more)
    return layer, own, pack_source(folder / "source", folder / "pack")


@pytest.fixture(scope="module", params=[0.02, 0.25], ids=["cold", "hot"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[str, Tensor], Path]:
    return with_head(request.param, tmp_path_factory.mktemp("v4"))


def use_packed_layer(layer: Any, pack: Path) -> None:
    """Give transformers' layer the head's experts, which come last."""
    from moet_desk.kernels.reference import expand_fine

    reader = PackReader.open(pack)
    meta, layout = reader.meta, reader.layout
    experts, slot = layer.model.layers[0].mlp.experts, torch.empty(layout.slot_floats)
    split = layout.gate_up.n * layout.gate_up.k
    for expert in range(meta.n_experts):
        base, fine = bytearray(meta.base_stride), bytearray(meta.fine_stride)
        row = meta.n_rows - meta.n_experts + expert
        reader.read_row(Plane.BASE, row, memoryview(base))
        reader.read_row(Plane.FINE, row, memoryview(fine))
        expand_fine(*(torch.frombuffer(x, dtype=torch.uint8) for x in (base, fine)), layout, slot)
        gate_up, down = experts.gate_up_proj.data[expert], experts.down_proj.data[expert]
        gate_up.copy_(slot[:split].view(gate_up.T.shape).T)
        down.copy_(slot[split:].view(down.T.shape).T)
    reader.close()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@pytest.mark.parametrize("sizes", [[LENGTH - 1], [9, 1, 13]], ids=["whole", "parts"])
def test_head__streams_of_the_model_and_tokens__equals_transformers_layer(
    case: tuple[Any, dict[str, Tensor], Path], sizes: list[int]
) -> None:
    layer, own, pack = case
    use_packed_layer(layer, pack)
    ids = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
    options = {"activations": "float", "kv_format": "f32", "drafts": "mtp"}
    with loaded(pack, **options) as core, torch.inference_mode():
        drafter = core.decoder.drafting.mtp
        assert isinstance(drafter, MtpDrafter)
        assert isinstance(drafter.head, CpuHead)
        head = drafter.head.head
        sequence, mine = core.kv.reserve(LENGTH), core.kv.reserve(LENGTH)
        assert sequence is not None
        assert mine is not None
        many = core.prefiller._experts[Plane.FINE]
        hidden = core.model.forward(ids, core.kv, sequence, many)
        found, at = [], 0
        for size in sizes:
            here = slice(at, at + size)
            states = head.forward(ids[1:][here], hidden[:-1][here], core.kv, mine, many)
            found.append(head.logits(states))
            at += size
        streams = hidden[:-1].view(LENGTH - 1, SMALL["hc_mult"], -1)
        token = rms(core.model.embed(ids[1:]), own["enorm.weight"]) @ own["e_proj.weight"].T
        joined = token[:, None] + rms(streams, own["hnorm.weight"]) @ own["h_proj.weight"].T

        def feed(module: Any, args: Any, kwargs: Any) -> Any:
            return (joined[None], *args[1:]), kwargs

        hook = layer.model.layers[0].register_forward_pre_hook(feed, with_kwargs=True)
        want = layer(ids[None, 1:]).logits[0]
        hook.remove()
    assert (torch.cat(found) - want).abs().max() < 1e-4 * want.std()


def test_head__reads_ahead__its_own_tokens_are_as_before(
    case: tuple[Any, dict[str, Tensor], Path],
) -> None:
    """Guesses behind guesses leave no trace in the state that the next real token goes on from."""
    _, _, pack = case
    ids = torch.randint(3, 256, (20,), generator=torch.Generator().manual_seed(3))
    with loaded(pack, drafts="mtp") as core, torch.inference_mode():
        drafter = core.decoder.drafting.mtp
        assert drafter is not None
        assert isinstance(drafter.head, CpuHead)
        sequence = core.kv.reserve(32)
        assert sequence is not None
        hidden = core.model.forward(ids, core.kv, sequence, core.prefiller._experts[Plane.BASE])
        straight, ahead_of = replace(sequence, length=0), replace(sequence, length=0)
        results = []
        for own, goes_ahead in ((straight, False), (ahead_of, True)):
            drafter.head.read(ids[1:12].tolist(), hidden[:11], own, Plane.BASE)
            for place in range(11, 15):
                if goes_ahead:
                    ahead, state, guess = own.fork(), hidden[place - 1 : place], 5
                    for _ in range(4):
                        found, state = drafter.head.read([guess], state, ahead, Plane.BASE)
                        assert found is not None
                        guess = found
                results.append(
                    drafter.head.read(
                        [int(ids[place + 1])], hidden[place : place + 1], own, Plane.BASE
                    )[1]
                )
            own.states.clear()
    assert torch.equal(torch.cat(results[:4]), torch.cat(results[4:]))
