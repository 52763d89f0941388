"""DeepSeek-V4's config.json: what is read, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moet_desk.engine.families import plan_for
from moet_desk.engine.families.deepseek_v4 import spec
from moet_desk.engine.model_shape import kv_token_bytes, state_bytes
from moet_desk.engine.spec import PooledAttention, PoolIndexer, Spec
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import Glu, KvFormat, Score

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096,
    "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "n_routed_experts": 256, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 6, "n_shared_experts": 1, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "sliding_window": 128, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "compress_rope_theta": 160000, "expert_dtype": "fp4", "hidden_act": "silu",
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
        "beta_fast": 32, "beta_slow": 1,
    },
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


def mixers(made: Spec) -> list[PooledAttention]:
    found = [layer.mixer for layer in made.layers]
    assert all(isinstance(mixer, PooledAttention) for mixer in found)
    return found  # type: ignore[return-value]


def test_spec__flash__as_published() -> None:
    flash = spec(FLASH, path="config.json", has_mtp=True)
    pools = [mixer.pool for mixer in mixers(flash)]
    assert [0 if pool is None else pool.ratio for pool in pools] == [0, 0, *[4, 128] * 20, 4]
    assert [layer.index for layer in flash.layers if layer.ffn.hashed] == [0, 1, 2]
    assert pools[2] is not None
    assert pools[3] is not None
    assert (pools[2].indexer, pools[3].indexer) == (PoolIndexer(64, 128, 512), None)
    assert flash.streams is not None
    assert (flash.streams.n, flash.streams.sinkhorn_steps, flash.streams.eps) == (4, 20, 1e-6)
    assert flash.mtp is not None
    assert (flash.mtp.index, flash.mtp.mixer.pool, flash.mtp.ffn.hashed) == (43, None, False)


def test_spec__flash__two_ropes() -> None:
    flash = spec(FLASH, path="config.json", has_mtp=False)
    near, far = flash.layers[0].mixer.rope, flash.layers[2].mixer.rope
    assert (near.base, near.yarn, near.dim, near.interleaved) == (1e4, None, 64, True)
    assert (far.base, far.dim, far.interleaved) == (1.6e5, 64, True)
    assert far.yarn is not None
    assert (far.yarn.factor, far.yarn.attention_factor) == (16.0, 1.0)
    assert flash.layers[3].mixer.rope == far
    assert flash.mtp is None


def test_spec__flash__bias_selects_where_no_table_does() -> None:
    layers = spec(FLASH, path="config.json", has_mtp=False).layers
    assert [layer.ffn.router.selection_bias for layer in layers[:5]] == [False] * 3 + [True] * 2
    router = layers[4].ffn.router
    assert (router.score, router.top_k, router.scale) == (Score.SQRT_SOFTPLUS, 6, 1.5)
    assert (layers[4].ffn.glu, layers[4].ffn.shared_inter) == (Glu(limit=10.0), 2048)


def test_spec__draft_model_in_the_file__same_spec() -> None:
    ratios = [*FLASH["compress_ratios"], 0, 0]
    later = {**FLASH, "compress_ratios": ratios, "dspark_block_size": 4}
    assert spec(later, path="c", has_mtp=False) == spec(FLASH, path="c", has_mtp=False)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("engram_layers", [1], "engram_layers"),
        ("compress_ratios", [0, 4], "compress_ratios"),
        ("compress_ratios", [2] * 43, "compress_ratios"),
        ("compress_ratios", [96] * 43, "compress_ratios"),
        ("index_head_dim", 96, "index_head_dim"),
        ("compress_ratios", None, "compress_ratios"),
        ("num_key_value_heads", 2, "num_key_value_heads"),
        ("norm_topk_prob", False, "norm_topk_prob"),
        ("scoring_func", "sigmoid", "scoring_func"),
        ("expert_dtype", "int3", "expert_dtype"),
        ("o_groups", 7, "7 groups"),
        ("qk_rope_head_dim", 256, "qk_rope_head_dim"),
        ("head_dim", 504, "do not rotate"),
        ("rope_scaling", None, "yarn"),
        ("swiglu_limit", 0, "swiglu_limit"),
        ("compress_rope_theta", None, "compress_rope_theta"),
        ("num_experts_per_tok", 257, "257 of 256"),
    ],
)
def test_spec__unsupported__refused_by_name(key: str, value: object, named: str) -> None:
    with pytest.raises(MoetError) as caught:
        spec({**FLASH, key: value}, path="config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"
    assert named in str(caught.value)


def test_kv__flash__bytes_of_a_token_and_of_a_request() -> None:
    flash = spec(FLASH, path="config.json", has_mtp=True)
    fp8 = kv_token_bytes(flash, KvFormat.FP8)
    # 21 layers with an entry and a key for 4 tokens, 20 with an entry for 128
    assert fp8 == math.ceil(21 * (584 + 68) / 4 + 20 * 584 / 128) == 3515
    assert kv_token_bytes(flash, KvFormat.BF16) == 6720 + 160
    near = 127 * 584 * 43
    sums = 4 * (21 * 9 * (512 + 128) + 20 * 3 * 512)
    assert state_bytes(flash, KvFormat.FP8) == 3 * (near + sums)
    assert state_bytes(flash, KvFormat.FP8, with_head=True) == 3 * (near + sums + 127 * 584)


def test_plan__flash__released_names_and_rows() -> None:
    plan = plan_for(FLASH, path="config.json", names=["mtp.0.e_proj", "embed"])
    assert plan.n_rows == 44 * 256
    assert plan.gate.format(layer=3, expert=7) == "model.layers.3.ffn.experts.7.w1"
    assert plan.dense["model.layers.0.ffn.gate.tid2eid"] == (129280, 6)
    assert "model.layers.3.ffn.gate.tid2eid" not in plan.dense
    assert plan.dense["model.layers.2.attn.compressor.ape"] == (4, 1024)
    assert plan.dense["model.layers.43.hc_head_fn"] == (4, 4 * 4096)
    assert not any(name.startswith(plan.ignored) for name in plan.dense)
    n_weights = sum(
        math.prod(shape) for shape in plan_for(FLASH, path="c", names=[]).dense.values()
    )
    assert n_weights - 3 * 6 * 129280 == pytest.approx(7.31e9, rel=2e-3)


def test_plan__draft_stages__left_out() -> None:
    later = {**FLASH, "dspark_block_size": 4}
    plan = plan_for(later, path="c", names=["mtp.0.e_proj", "mtp.1.e_proj"])
    assert plan.n_rows == 43 * 256
    assert "mtp." in plan.ignored
