"""DeepSeek-V4's config.json: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from moet_desk.engine.families.deepseek_v4 import spec
from moet_desk.engine.spec_v4 import Indexer
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import Glu, Score

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


def test_spec__flash__as_published() -> None:
    flash = spec(FLASH, path="config.json", has_mtp=True)
    pools = [layer.mixer.pool for layer in flash.layers]
    assert [0 if pool is None else pool.ratio for pool in pools] == [0, 0, *[4, 128] * 20, 4]
    assert [layer.index for layer in flash.layers if layer.hashed] == [0, 1, 2]
    assert pools[2] is not None
    assert pools[3] is not None
    assert (pools[2].overlap, pools[2].indexer) == (True, Indexer(64, 128, 512))
    assert (pools[3].overlap, pools[3].indexer) == (False, None)
    assert (flash.streams.n, flash.streams.sinkhorn_steps, flash.streams.eps) == (4, 20, 1e-6)
    assert flash.mtp is not None
    assert (flash.mtp.index, flash.mtp.mixer.pool, flash.mtp.hashed) == (43, None, False)


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
        ("compress_ratios", None, "compress_ratios"),
        ("num_key_value_heads", 2, "num_key_value_heads"),
        ("norm_topk_prob", False, "norm_topk_prob"),
        ("scoring_func", "sigmoid", "scoring_func"),
        ("expert_dtype", "int3", "expert_dtype"),
        ("o_groups", 7, "7 groups"),
        ("qk_rope_head_dim", 256, "qk_rope_head_dim"),
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
