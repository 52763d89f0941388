"""What a DeltaNet layer computes: each wrong part is noticed; released names, config and head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet_desk.engine.blocks import gdn as block
from moet_desk.engine.draft import CpuHead, MtpDrafter
from moet_desk.kernels.reference import delta_decay
from moet_desk.store.pack_format import DENSE_FILE, ROW_FILES, Plane
from tests.conftest import pack_source
from tests.engine.oracle import allowed, loaded, logits_of, logits_with
from tests.engine.tiny_models import (
    DELTA_CONFIGS,
    LENGTH,
    TINY_NEXT,
    random_model,
    save_source,
    use_packed_experts,
)

IDS = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
Case = tuple[Path, Tensor]


@pytest.fixture(scope="module", params=list(DELTA_CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A packed model and transformers' logits."""
    model = random_model(DELTA_CONFIGS[request.param], 0.25)
    folder = tmp_path_factory.mktemp("delta")
    save_source(model, folder / "source")
    pack = pack_source(folder / "source", folder / "pack")
    with torch.no_grad():
        use_packed_experts(model, pack)
        return pack, model(IDS[None]).logits[0]


def only(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda name, value: change(value) if name.endswith(part) else value


def halves_swapped(value: Tensor) -> Tensor:
    return torch.cat(value.chunk(2)[::-1])


WEIGHTS = {
    "as it is": only("nothing", lambda value: value),
    "norm of DeltaNet with 1 + w": only("linear_attn.norm", lambda w: w + 1),
    "convolution the other way round": only("conv1d", lambda w: w.flip(-1)),
    "A without its logarithm": only("A_log", lambda w: w.exp().log1p()),
    "no bias of the decay": only("dt_bias", torch.zeros_like),
    "betas of other heads": only("in_proj_b", lambda w: w.flip(0)),
    "heads of values in another order": only("out_proj", lambda w: w.roll(24, 1)),
    "output gate of other heads": only("q_proj", halves_swapped),
    "gate of the shared expert the other way": only("shared_expert_gate", torch.neg),
}


def test_mutated_weights__any_part__parity_is_lost(case: Case) -> None:
    pack, want = case
    noticed = {}
    with loaded(pack, activations="float", kv_format="f32") as core:
        for what, change in WEIGHTS.items():
            off = (logits_with(core, core.spec, IDS.tolist(), change=change) - want).abs().max()
            noticed[what] = bool(off > 10 * allowed(core, want))
        flat = not core.spec.recurrent[0].fused
    expected = {what: what != "as it is" for what in WEIGHTS}
    expected["betas of other heads"] = flat  # else they lie in one tensor, see the next test
    assert noticed == expected


def _heads_in_turn(mixer: Any, weights: Any) -> Tensor:
    return torch.cat([weights("in_proj_qkvz"), weights("in_proj_ba")])


CODE: dict[str, dict[str, Any]] = {
    "decay grows": {"delta_decay": lambda *a: -0.05 * delta_decay(*a)},
    "no unit length": {"delta_unit": lambda x: x},
    "queries of length 1 alone": {"delta_unit": lambda x: x * 4.0},
    "no norm of heads": {"rms_norm": lambda x, w, eps: x * w},
    "fused products as if they were flat": {"_fused": _heads_in_turn},
    "no convolution": {"causal_conv": lambda x, tail, w: (x, tail)},
}


@pytest.mark.parametrize("what", list(CODE))
def test_mutated_block__any_part__parity_is_lost(
    case: Case, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, want = case
    for name, wrong in CODE[what].items():
        monkeypatch.setattr(block, name, wrong)
    with loaded(pack, activations="float", kv_format="f32") as core:
        got = logits_of(core, IDS.tolist(), plane=Plane.FINE)
        worst = (got - want).abs().max()
        if "_fused" in CODE[what] and not core.spec.recurrent[0].fused:
            assert worst < allowed(core, want)  # nothing is fused here, so nothing is changed
        else:
            assert not worst < 10 * allowed(core, want)


def test_output_gate__left_out__parity_is_lost(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, want = case
    with loaded(pack, activations="float", kv_format="f32") as core:
        monkeypatch.setattr("moet_desk.engine.blocks.gqa.torch.sigmoid", torch.ones_like)
        got = logits_of(core, IDS.tolist(), plane=Plane.FINE)
        assert (got - want).abs().max() > 10 * allowed(core, want)


# -- released layouts ----------------------------------------------------------------------------


def test_pack__released_wrapper_with_merged_experts__bytes_of_the_plain_text_model(
    tmp_path: Path,
) -> None:
    model = random_model(DELTA_CONFIGS["qwen3_5"], 0.25)
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    save_source(model, plain)
    wrapped.mkdir()
    state = {"lm_head.weight": model.lm_head.weight.detach().clone()}
    for name, value in model.model.state_dict().items():
        state[f"model.language_model.{name}"] = value.clone()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    state["model.visual.patch_embed.proj.weight"] = torch.ones(4, 4)
    save_file(state, wrapped / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    outer = {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": config, "vision_config": {"depth": 2}, "image_token_id": 5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (wrapped / "config.json").write_text(json.dumps(outer))
    packs = []
    for source in (plain, wrapped):
        pack = pack_source(source, tmp_path / f"{source.name}-pack")
        packs.append([(pack / file).read_bytes() for file in (*ROW_FILES.values(), DENSE_FILE)])
    assert packs[0] == packs[1]
    with loaded(tmp_path / "wrapped-pack") as core:
        assert core.spec.model_type == "qwen3_5_moe"
        logits_of(core, [3, 4, 5], plane=Plane.BASE)


def test_pack__conv_decay_and_norms__kept_as_stored(case: Case) -> None:
    pack, _ = case
    with loaded(pack) as core:
        for part in ("conv1d", "A_log", "dt_bias", "norm"):
            info = core.reader.dense.info(f"model.layers.1.linear_attn.{part}")
            assert info.kind == "f32"


# -- the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [0.02, 0.25])
def test_head__named_as_released__equals_transformers_layer(init: float, tmp_path: Path) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextDecoderLayer,
        Qwen3NextRMSNorm,
    )

    model = random_model(TINY_NEXT, init)
    save_source(model, tmp_path / "source")
    spread = torch.Generator().manual_seed(7)
    state = load_file(tmp_path / "source" / "model.safetensors")
    for name, value in list(state.items()):
        if name.startswith("model.layers.3."):
            state[name.replace("model.layers.3.", "mtp.layers.0.")] = value.clone()
    norms = {name: Qwen3NextRMSNorm(64, eps=1e-6) for name in ("embedding", "hidden", "norm")}
    for norm in norms.values():
        norm.weight.data = 0.1 * torch.randn(64, generator=spread)
    join = init * torch.randn(64, 128, generator=spread)
    state["mtp.pre_fc_norm_embedding.weight"] = norms["embedding"].weight.data
    state["mtp.pre_fc_norm_hidden.weight"] = norms["hidden"].weight.data
    state["mtp.norm.weight"], state["mtp.fc.weight"] = norms["norm"].weight.data, join
    save_file(state, tmp_path / "source" / "model.safetensors")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    options = {"activations": "float", "kv_format": "f32", "drafts": "mtp"}
    with loaded(pack, **options) as core, torch.inference_mode():
        plain_pack = tmp_path / "plain"
        save_source(model, tmp_path / "without")
        use_packed_experts(model, pack_source(tmp_path / "without", plain_pack))
        layer = Qwen3NextDecoderLayer(model.config, 3).eval()
        layer.load_state_dict(model.model.layers[3].state_dict())
        hidden = model.model(IDS[None], use_cache=False).last_hidden_state[:, :-1]
        token = model.model.embed_tokens(IDS[None, 1:])
        x = torch.cat([norms["embedding"](token), norms["hidden"](hidden)], -1) @ join.T
        n_tokens = LENGTH - 1
        turned = model.model.rotary_emb(x, torch.arange(n_tokens)[None])
        mask = torch.full((n_tokens, n_tokens), float("-inf")).triu(1)[None, None]
        out = layer(x, position_embeddings=turned, attention_mask=mask)
        states = norms["norm"](out[0] if isinstance(out, tuple) else out)
        want = model.lm_head(states)[0]
        drafter = core.decoder.drafting.mtp
        assert isinstance(drafter, MtpDrafter)
        assert isinstance(drafter.head, CpuHead)
        sequence = core.kv.reserve(LENGTH)
        assert sequence is not None
        experts = core.prefiller._experts[Plane.FINE]
        got = drafter.head.head.forward(IDS[1:], hidden[0], core.kv, sequence, experts)
        assert (core.model.logits(got) - want).abs().max() < 1e-4 * want.std()
