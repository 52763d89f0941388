"""Sparse attention in the whole engine: the MTP head's own indexer, promise 1, kept prompts, a long
context, and what a plan counts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from moet_desk.engine.blocks import indexer
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.chunk_sizes import chunk_bytes
from moet_desk.engine.cuda.shapes import SHAPES
from moet_desk.engine.families import spec_for
from moet_desk.engine.handle import Quality, Sampling
from moet_desk.engine.model_shape import index_layers, kv_token_bytes
from moet_desk.engine.spec import Mla
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference import choose
from moet_desk.kernels.triton.chosen_prefill import rows_that_fit
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine import test_kept_prompts as kept_prompts
from tests.engine.oracle import HEAD_OPTIONS, head_logits, loaded, logits_of
from tests.engine.sparse_head import random_head
from tests.engine.test_balanced import balanced
from tests.engine.test_mtp_parity import save_head, use_packed_experts_of_model, use_packed_head
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine
from tests.engine.tiny_models import CONFIGS, random_model, save_source, use_packed_experts

SHARING = {
    **CONFIGS["glm_dsa"], "num_hidden_layers": 3, "index_topk_freq": 2,
    "index_skip_topk_offset": 1, "first_k_dense_replace": 1,
}  # fmt: skip
"""Indexers in the first and the last of three layers, and in the head behind them."""
MODELS = {"v32": CONFIGS["v32"], "glm_dsa": SHARING}
LENGTH = 24


# -- the head ------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[(name, init) for name in MODELS for init in (0.02, 0.25)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor, Tensor]:
    """A pack with a head, token ids, and the head's logits for them but the first."""
    name, init = request.param
    folder = tmp_path_factory.mktemp("sparse")
    model = random_model(MODELS[name], init)
    head = random_head(model)
    save_source(model, folder / "source")
    save_head(head, folder / "source")
    pack = pack_source(folder / "source", folder / "pack")
    ids = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        use_packed_experts_of_model(model, pack)
        use_packed_head(head, pack)
        hidden = model.model(ids[None], use_cache=False).last_hidden_state[:, :-1]
        states = head.forward_layer(ids[None, 1:], hidden, torch.arange(LENGTH - 1)[None])
        want = model.lm_head(states)[0]
    return pack, ids, want


@pytest.mark.parametrize("sizes", [[LENGTH - 1], [9, 1, 13], [1] * (LENGTH - 1)])
def test_head__chunks_and_single_tokens__equal_transformers(
    case: tuple[Path, Tensor, Tensor], sizes: list[int]
) -> None:
    pack, ids, want = case
    with loaded(pack, **HEAD_OPTIONS) as core:
        got = head_logits(core, ids, sizes)
    assert (got - want).abs().max() < 1e-4 * want.std()


# -- promise 1 -----------------------------------------------------------------------------------

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    ask(STORY, Quality.FAST, GREEDY),
    ask(SUM, Quality.EXACT, DRAWN),
    balanced(STORY, GREEDY, gate=0.5),
]
CHUNK = {"prefill_chunk": 16}  # prompts of several chunks, all longer than what is chosen


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    model = random_model({**SHARING, "vocab_size": 8192}, 0.25)
    save_source(model, folder / "source")
    save_head(random_head(model), folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_source / name, folder / "source")
    return pack_source(folder / "source", folder / "pack")


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    """Each request alone, everything resident."""
    with engine(pack, **CHUNK) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        {"pool_slots": 4, "fine_slots": 4, "arena_rows": 2},
        {"drafts": "mtp", "draft_depth": 2},
    ],
    ids=["least pools and rows from disk", "guesses of the head"],
)
def test_tokens__however_it_runs__same_bits(
    pack: Path, wanted: list[Answer], options: dict[str, Any]
) -> None:
    with engine(pack, **CHUNK, **options) as handle:
        assert [answer(handle, [request])[0] for request in REQUESTS] == wanted
        assert answer(handle, REQUESTS) == wanted
        counters, drafts = handle.snapshot().counters, handle.snapshot().drafts
    if "drafts" in options:
        assert drafts.guessed[0] > 0
    else:
        assert counters.evictions > 100
        assert counters.from_nvme > 100


def test_tokens__prompts_kept__same_bits_without_reading(pack: Path, wanted: list[Answer]) -> None:
    """What an indexer keeps is kept with the rest: else the choice behind it would be another."""
    with engine(pack, **CHUNK, prefix_bytes=10**8) as handle:
        for _ in range(2):
            found = [kept_prompts.answer(handle, request) for request in REQUESTS]
            assert [tokens for tokens, _ in found] == wanted
    assert all(cached >= 16 for _, cached in found)


# -- a long context ------------------------------------------------------------------------------


class Teacher:
    """Gives transformers the engine's choices, and counts where its own would have been others.

    Among thousands of scores some lie nearer to each other than float32 tells apart, so the last
    place of a choice may go to either; one such place changes the logits by far more than rounding.
    """

    def __init__(self, patch: pytest.MonkeyPatch, n_layers: int) -> None:
        self.made: list[list[Tensor]] = [[] for _ in range(n_layers)]  # [T, S] of each forward
        self._calls, self.rows, self.others, self.most = 0, 0, 0, 0
        patch.setattr(indexer, "choose", self._choose)
        patch.setattr(GlmMoeDsaIndexer, "forward", self._told(GlmMoeDsaIndexer.forward))

    def _choose(self, scores: Tensor, top_k: int) -> Tensor:
        chosen = choose(scores, top_k)
        self.made[self._calls % len(self.made)].append(chosen)
        self._calls += 1
        return chosen

    def _told(self, forward: Any) -> Any:
        def answer(own: Any, *args: Any, **kwargs: Any) -> Tensor:
            theirs = forward(own, *args, **kwargs)[0].long()  # [T, K]
            count, top_k = theirs.shape
            ours, at = torch.zeros(count, count, dtype=torch.bool), 0
            for part in self.made.pop(0):
                ours[at : at + part.shape[0], : part.shape[1]] = part
                at += part.shape[0]
            full = slice(top_k, count)  # rows before see all
            mask = torch.zeros(count, count, dtype=torch.bool).scatter_(1, theirs, value=True)
            off = (mask ^ ours)[full].sum(-1)
            self.rows += len(off)
            self.others += int((off > 0).sum())
            self.most = max(self.most, int(off.max()))
            assert (ours[full].sum(-1) == top_k).all()
            theirs[full] = ours[full].nonzero()[:, 1].view(-1, top_k)
            return theirs[None].int()

        return answer


@pytest.mark.slow
def test_logits__4000_tokens__equal_transformers_whole_and_in_odd_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than pages hold in a row, a choice of a tenth of them, layers that reuse it."""
    count = 4000
    kwargs = {**CONFIGS["glm_dsa"], "index_topk": 400, "max_position_embeddings": 4096}
    model = random_model(kwargs, 0.25)
    save_source(model, tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = torch.randint(3, 256, (count,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        use_packed_experts(model, pack)
    options = {"activations": "float", "kv_format": "f32", "context": 4096, "max_running": 1}
    with loaded(pack, **options) as core:
        for sizes in ([count], [1023, 7, 1, 1501, 1460, *[1] * 8]):
            with monkeypatch.context() as patch, torch.no_grad():
                teacher = Teacher(patch, len(index_layers(core.spec, with_head=False)))
                got = logits_of(core, ids.tolist(), plane=Plane.FINE, sizes=sizes)
                want = model(ids[None]).logits[0]
            assert (got - want).abs().max() < 1e-4 * want.std()
            assert teacher.rows == 4 * (count - 400)
            assert teacher.others < 0.01 * teacher.rows
            assert teacher.most <= 4


# -- what a plan counts ---------------------------------------------------------------------

GLM_52: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "qk_head_dim": 256, "head_dim": 64, "v_head_dim": 256, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 1048576, "tie_word_embeddings": False, "attention_bias": False,
    "rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
}  # fmt: skip
"""GLM-5.2's config.json, as published."""


def test_spec__glm_5_2__indexers_where_they_are_published() -> None:
    spec = spec_for(GLM_52, path="config.json", has_mtp=True)
    assert index_layers(spec, with_head=False) == (0, 1, 2, *range(6, 78, 4))
    assert index_layers(spec, with_head=True)[-1] == 78
    assert [layer.mixer.reuses_choice for layer in spec.layers[:8]] == [
        False, False, False, True, True, True, False, True,
    ]  # fmt: skip
    indexer = spec.layers[6].mixer.indexer
    assert (indexer.n_heads, indexer.head_dim, indexer.top_k) == (32, 128, 2048)
    assert indexer.interleaved
    assert spec.layers[0].mixer.latent_eps == 1e-5
    listed = {**GLM_52, "index_topk_freq": None, "index_skip_topk_offset": None}
    pattern = "".join("F" if i in index_layers(spec, with_head=False) else "S" for i in range(78))
    assert spec_for({**listed, "index_topk_pattern": pattern}, path="", has_mtp=True) == spec
    older = spec_for(listed, path="", has_mtp=True)  # GLM-5 says nothing: all layers
    assert index_layers(older, with_head=False) == tuple(range(78))
    for name in ("indexed_attention", "deepseek_sparse_attention"):  # as transformers writes it
        named = {**GLM_52, "layer_types": [name] * 78}
        assert spec_for(named, path="", has_mtp=True) == spec


def test_spec__deepseek_v32__halves_in_the_indexer_pairs_in_the_attention() -> None:
    v32 = {**GLM_52, "model_type": "deepseek_v32", "index_n_heads": 64}
    for key in ("index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration"):
        del v32[key]
    del v32["indexer_rope_interleave"]
    spec = spec_for(v32, path="config.json", has_mtp=False)
    assert spec.layers[77].mixer.rope.interleaved
    assert not spec.layers[77].mixer.indexer.interleaved
    assert len(index_layers(spec, with_head=False)) == 78


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index_topk": None}, "index_topk is missing"),
        ({"index_n_heads": 0}, "index_n_heads is 0"),
        ({"index_head_dim": 32}, "64 numbers rotate"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"indexer_types": ["full"] * 77}, "78 of full or shared"),
        ({"indexer_types": ["full", "none"] * 39}, "78 of full or shared"),
        ({"index_topk_pattern": "S" * 78}, "first layer"),
        ({"index_topk_pattern": "FX" * 39}, "78 of full or shared"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types"),
        ({"layer_types": ["deepseek_sparse_attention"] * 77}, "layer_types"),
        ({"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"index_kpool": 4}, "index_kpool"),
    ],
)
def test_spec__wrong_or_unknown_key__refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MoetError, match=words) as caught:
        spec_for({**GLM_52, **change}, path="some/config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"


@pytest.mark.parametrize(("rows", "context"), [(256, 300), (8192, 131_072)])
def test_chunk_bytes__glm_5_2__as_many_as_the_buffers_have(rows: int, context: int) -> None:
    spec = spec_for(GLM_52, path="config.json", has_mtp=False)
    made = ChunkBuffers.make(spec, rows, context=context, device=torch.device("meta"))
    assert made.index is not None
    assert chunk_bytes(spec, rows, context=context) == made.n_bytes()


@pytest.mark.parametrize("name", ["glm-5.2", "deepseek-v3.2"])
@pytest.mark.parametrize("context", [2112, 8192, 131_072])
def test_chunk_buffers__chosen_entries__hundreds_of_rows_at_a_time(name: str, context: int) -> None:
    spec = SHAPES[name](context).spec
    made = ChunkBuffers.make(spec, 2048, context=context, device=torch.device("meta"))
    mixer = spec.attention
    assert isinstance(mixer, Mla)
    fit = rows_that_fit(made.attention, mixer.n_heads, mixer.kv_rank, mixer.rope_dim)
    assert fit >= 480


def test_kv_bytes__glm_5_2__entries_and_keys_of_21_layers() -> None:
    spec = spec_for(GLM_52, path="config.json", has_mtp=True)
    assert kv_token_bytes(spec, KvFormat.BF16) == 78 * 1152 + 21 * 256 == 95232  # models.md §2
    assert kv_token_bytes(spec, KvFormat.FP8) == 78 * 656 + 21 * 132
    assert kv_token_bytes(spec, KvFormat.NVFP4) == 78 * 352 + 21 * 132
    with_head = kv_token_bytes(spec, KvFormat.NVFP4, with_head=True)
    assert with_head == 79 * 352 + 22 * 132
