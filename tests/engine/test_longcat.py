"""LongCat-Flash: what its identity experts cost, the order of its layer, configs, long contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet_desk.engine.blocks.ffn import MoeBlock
from moet_desk.engine.families import plan_for, spec_for
from moet_desk.engine.residency import Residency
from moet_desk.engine.spec import DenseFfn, Mla
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import CONFIGS, random_model, save_source, use_packed_experts

TOP_K = CONFIGS["longcat"]["moe_topk"]
FLOAT = {"activations": "float", "kv_format": "f32"}
RELEASED: dict[str, Any] = {
    "model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"],
    "attention_bias": False, "attention_method": "MLA", "bos_token_id": 1, "eos_token_id": 2,
    "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "hidden_size": 6144,
    "kv_lora_rank": 512, "max_position_embeddings": 131072, "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True, "moe_topk": 12, "n_routed_experts": 512, "num_attention_heads": 64,
    "num_layers": 28, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e7, "routed_scaling_factor": 6.0, "router_bias": False,
    "v_head_dim": 128, "vocab_size": 131072, "zero_expert_num": 256, "zero_expert_type": "identity",
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Tensor]:
    return packed(CONFIGS["longcat"], tmp_path_factory.mktemp("longcat"), 24)


def packed(config: dict[str, Any], folder: Path, length: int) -> tuple[Path, list[int], Tensor]:
    """A pack with large weights, token ids, and transformers' logits for them."""
    model = random_model(config, 0.25)
    save_source(model, folder / "source")
    pack = pack_source(folder / "source", folder / "pack")
    ids = torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        use_packed_experts(model, pack)
        return pack, ids.tolist(), model(ids[None]).logits[0]


def test_identity_experts__decode_and_prompt__no_row_is_asked_for(
    case: tuple[Path, list[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, ids, _ = case
    looked_up: list[list[int]] = []
    read: list[int] = []
    slots, read_one = Residency.slots, Residency.read

    def note_slots(self: Residency, plane: Plane, layer: int, experts: list[int]) -> Any:
        looked_up.append(list(experts))
        return slots(self, plane, layer, experts)

    def note_read(self: Residency, plane: Plane, layer: int, expert: int) -> Any:
        read.append(expert)
        return read_one(self, plane, layer, expert)

    monkeypatch.setattr(Residency, "slots", note_slots)
    monkeypatch.setattr(Residency, "read", note_read)
    with loaded(pack, **FLOAT) as core:
        n_experts = core.reader.meta.n_experts
        logits_of(core, ids, plane=Plane.BASE, sizes=[1] * len(ids))
        logits_of(core, ids, plane=Plane.BASE)
    assert all(0 <= expert < n_experts for chosen in looked_up for expert in chosen)
    assert set(read) <= set(range(n_experts))
    assert sum(len(chosen) for chosen in looked_up) < 0.9 * TOP_K * 2 * len(ids)
    assert {len(chosen) for chosen in looked_up} > {TOP_K}


def test_identity_experts__left_out__parity_is_lost(
    case: tuple[Path, list[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, ids, want = case

    def without(self: MoeBlock, x: Tensor, chosen: Tensor, weights: Tensor, experts: Any) -> Any:
        is_real = chosen < self._router.n_experts
        return experts(
            self.moe_layer, x, chosen.masked_fill(~is_real, 0), weights.masked_fill(~is_real, 0)
        )

    monkeypatch.setattr(MoeBlock, "_beside_identity", without)
    with loaded(pack, **FLOAT) as core:
        got = logits_of(core, ids, plane=Plane.FINE)
    assert (got - want).abs().max() > 1e-2 * want.std()


@pytest.mark.parametrize("what", ["experts added early", "one KV for both attentions"])
def test_layer__changed_order__parity_is_lost(
    case: tuple[Path, list[int], Tensor], what: str
) -> None:
    pack, ids, want = case
    with loaded(pack, **FLOAT) as core:
        blocks: list[Any] = list(core.model._blocks)
        for block in blocks:
            if what == "experts added early":
                moe, first = block._moe, block._first._ffn
                given: list[Tensor] = []

                def keep(x: Tensor, experts: Any, moe: Any = moe, given: Any = given) -> Tensor:
                    given.append(moe(x, experts))
                    return torch.zeros_like(x)

                def add(x: Tensor, first: Any = first, given: Any = given) -> Any:
                    return first(x) + given.pop()

                block._moe, block._first._ffn = keep, add
            else:
                block._second._attention._layer -= 1
        sizes = [8] + [1] * (len(ids) - 8)
        got = logits_of(core, ids, plane=Plane.FINE, sizes=sizes)
    assert (got - want).abs().max() > 1e-2 * want.std()


@pytest.mark.slow
def test_long_context__4000_tokens__equal_transformers(tmp_path: Path) -> None:
    config = {**CONFIGS["longcat"], "num_layers": 1, "max_position_embeddings": 4096}
    pack, ids, want = packed(config, tmp_path, 4000)
    with loaded(pack, **FLOAT) as core:
        got = logits_of(core, ids, plane=Plane.FINE, sizes=[1777, 2000, 203] + [1] * 20)
    assert (got - want).abs().max() < 1e-4 * want.std()


# -- the MTP head ----------------------------------------------------------------------------------


def save_longcat_head(source: Path) -> dict[str, Tensor]:
    """Add a head to a saved model, under released names: the first half of its first layer, behind
    random norms and a random product. Returns what is random.
    """
    state = load_file(source / "model.safetensors")
    hidden = state["model.norm.weight"].shape[0]
    spread = torch.Generator().manual_seed(5)
    own, first = "model.mtp.layers.0.", "model.layers.0."
    made = {
        name: 1 + 0.1 * torch.randn(hidden, generator=spread)
        for name in ("model.mtp.norm.weight", own + "enorm.m.weight", own + "hnorm.m.weight")
    }
    made[own + "eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=spread)
    halves = {
        f"{first}self_attn.0.": f"{own}self_attn.",
        f"{first}mlps.0.": f"{own}transformer_layer.mlp.",
        f"{first}input_layernorm.0.": f"{own}input_layernorm.",
        f"{first}post_attention_layernorm.0.": f"{own}post_attention_layernorm.",
    }
    for name, value in list(state.items()):
        for old, new in halves.items():
            if name.startswith(old):
                state[new + name.removeprefix(old)] = value.clone()
    state["model.mtp.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    save_file({**state, **made}, source / "model.safetensors")
    return made


def test_head__chunks_and_single_tokens__as_its_parts_in_transformers(tmp_path: Path) -> None:
    model = random_model(CONFIGS["longcat"], 0.25)
    save_source(model, tmp_path / "source")
    made = save_longcat_head(tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids, n = torch.randint(3, 256, (12,), generator=torch.Generator().manual_seed(2)), 11
    with loaded(pack, **FLOAT, drafts="mtp") as core, torch.inference_mode():
        drafter = core.decoder.drafting.mtp
        assert drafter is not None
        head: Any = drafter.head
        sequence, own = core.kv.reserve(12), core.kv.reserve(12)
        assert sequence is not None
        assert own is not None
        assert core.residency.sizes().rows == 2 * 8  # the head has none
        many = core.prefiller._experts[Plane.FINE]
        states = core.model.forward(ids, core.kv, sequence, many)[:-1]
        found, at = [], 0
        for size in (7, 1, 3):
            here = slice(at, at + size)
            out = head.head.forward(ids[1:][here], states[here], core.kv, own, many)
            found.append(core.model.logits(out))
            at += size
        layer, norm = model.model.layers[0], _norm
        token = norm(model.model.embed_tokens(ids[1:]), made["model.mtp.layers.0.enorm.m.weight"])
        before = norm(states, made["model.mtp.layers.0.hnorm.m.weight"])
        joined = torch.cat([token, before], -1)
        x = (joined @ made["model.mtp.layers.0.eh_proj.weight"].T)[None]
        places = torch.arange(n)[None]
        attended, _ = layer.self_attn[0](
            layer.input_layernorm[0](x),
            position_embeddings=model.model.rotary_emb(x, position_ids=places),
            attention_mask=torch.full((n, n), -torch.inf).triu(1)[None, None],
        )
        x = x + attended
        x = x + layer.mlps[0](layer.post_attention_layernorm[0](x))
        want = model.lm_head(norm(x[0], made["model.mtp.norm.weight"]))
    assert (torch.cat(found) - want).abs().max() < 1e-4 * want.std()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


# -- configs ---------------------------------------------------------------------------------------


def test_spec__released_config__as_published() -> None:
    spec = spec_for(RELEASED, path="config.json", has_mtp=False)
    assert (len(spec.layers), spec.n_kv_layers, len(spec.main_moe_layers)) == (28, 56, 28)
    assert all(layer.around == DenseFfn(12288) for layer in spec.layers)
    router, mixer = spec.moe_ffn.router, spec.layers[0].mixer
    assert (router.n_experts, router.n_choices, router.top_k, router.scale) == (512, 768, 12, 6.0)
    assert isinstance(mixer, Mla)
    assert (mixer.q_gain, mixer.kv_gain) == (2.0, 12**0.5)
    assert (mixer.softmax_scale, mixer.rope.base, mixer.latent_eps) == (192**-0.5, 1e7, 1e-5)
    plan = plan_for(RELEASED, path="config.json", names=["model.mtp.norm"])
    assert plan.n_rows == 28 * 512
    assert plan.dense["model.layers.27.mlp.router.classifier"] == (768, 6144)
    assert not any("mtp" in name for name in plan.dense)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": None}, "num_layers is missing"),
        ({"num_hidden_layers": 28}, "num_hidden_layers is 28"),
        ({"zero_expert_type": "drop"}, "zero_expert_type"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora"),
        ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora"),
        ({"router_bias": True}, "router_bias"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"moe_topk": 513}, "513 of 512 experts"),
        ({"zero_expert_num": -1}, "zero_expert_num is -1"),
        ({"attention_method": "MHA"}, "attention_method"),
        ({"ngram_vocab_size_ratio": 78}, "ngram_vocab_size_ratio"),
    ],
)
def test_spec__wrong_or_unknown_key__refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MoetError) as caught:
        spec_for({**RELEASED, **change}, path="config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"
    assert words in str(caught.value)


def test_kv_bytes__a_token__counted_for_both_attentions() -> None:
    spec = spec_for(RELEASED, path="config.json", has_mtp=False)
    single = replace(spec, layers=tuple(replace(layer, around=None) for layer in spec.layers))
    assert (spec.n_kv_layers, single.n_kv_layers) == (56, 28)
