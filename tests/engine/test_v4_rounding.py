"""The low precision of DeepSeek-V4's released forward, which KV in FP8 switches on: one layer with
an indexer against the formulas, written out token by token.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moet_desk.engine.blocks.pooled import PooledBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.families import spec_for
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.spec import PooledAttention
from moet_desk.kernels.kinds import KvFormat
from tests.store.v4 import CONFIG, tensors_of

LENGTH, SPARSE_LAYER = 41, 1
EPS = 1e-6


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Of one attention, float32."""
    prefix = f"layers.{SPARSE_LAYER}.attn."
    found: dict[str, Tensor] = {}
    stored = tensors_of()
    for name, value in stored.items():
        if not name.startswith(prefix) or name.endswith(".scale"):
            continue
        plain = value.float()
        scale = stored.get(name.removesuffix(".weight") + ".scale")
        if scale is not None:
            wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain = plain * wide[: plain.shape[0], : plain.shape[1]]
        found[name.removeprefix(prefix).removesuffix(".weight")] = plain
    return found


def mixer() -> PooledAttention:
    spec = spec_for(CONFIG, path="config.json", has_mtp=False)
    found = spec.layers[SPARSE_LAYER].mixer
    assert isinstance(found, PooledAttention)
    return found


def ours(weights: dict[str, Tensor], x: Tensor, form: KvFormat, sizes: list[int]) -> Tensor:
    attention = mixer()
    kv = KvCache(attention, n_layers=0, n_pages=1, page_tokens=64, form=form, recurrent=[attention])
    sequence, found = kv.reserve(64), []
    assert sequence is not None
    block = PooledBlock(attention, Weights(weights.__getitem__), layer=0)
    for size in sizes:
        found.append(block(x[sequence.length : sequence.length + size], kv, sequence))
        sequence.length += size
    return torch.cat(found)


# -- the formulas --------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return normed if weight is None else normed * weight


def angles() -> Tensor:
    """Of one step of position: yarn over 16 numbers."""
    dim, base, factor, context = 16, 160000.0, 16.0, 64

    def turns(n: float) -> float:
        return dim * math.log(context / (n * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), dim - 1)
    found = []
    for i in range(dim // 2):
        plain = base ** (-2 * i / dim)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        found.append(plain * (1 - ramp) + plain / factor * ramp)
    return torch.tensor(found)


def turned(x: Tensor, position: int, sign: float = 1.0) -> Tensor:
    """x [..., D] with its last 16 numbers rotated in pairs."""
    angle = position * angles()
    cos, sin = angle.cos(), sign * angle.sin()
    out = x.clone()
    even, odd = x[..., -16::2], x[..., -15::2]
    out[..., -16::2], out[..., -15::2] = even * cos - odd * sin, odd * cos + even * sin
    return out


def rounded_entry(x: Tensor, *, rounds: bool) -> Tensor:
    if not rounds:
        return x
    block = x[:48]
    scale = 2.0 ** math.ceil(math.log2(max(float(block.abs().max()), 1e-4) / 448))
    values = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([values, x[48:].bfloat16().float()])


def rounded_index(x: Tensor, *, rounds: bool) -> Tensor:
    """x [32]."""
    if not rounds:
        return x
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
    y = torch.tensor(signs) @ x / 32**0.5
    scale = 2.0 ** math.ceil(math.log2(float(y.abs().max()) / 6))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (y[:, None].abs() / scale - values).abs().argmin(-1)
    return values[nearest] * y.sign() * scale


def pooled(w: dict[str, Tensor], name: str, x: Tensor, window: int, dim: int) -> Tensor:
    """The entry of one window of 4 tokens, before it is rounded."""
    values, logits = x @ w[name + "wkv"].T, x @ w[name + "wgate"].T
    logits = logits + w[name + "ape"].repeat(-(-len(x) // 4), 1)[: len(x)]
    here = slice(4 * window, 4 * window + 4)
    parts = [(values[here, dim:], logits[here, dim:])]
    if window:
        before = slice(4 * window - 4, 4 * window)
        parts.append((values[before, :dim], logits[before, :dim]))
    shares = torch.cat([part[1] for part in parts]).softmax(0)
    mean = (torch.cat([part[0] for part in parts]) * shares).sum(0)
    return turned(rms(mean, w[name + "norm"]), 4 * window)


def reference(w: dict[str, Tensor], x: Tensor, *, rounds: bool) -> Tensor:
    """The attention's output [T, H]."""
    n_windows, rows = len(x) // 4, []
    latent = rms(x @ w["wq_a"].T, w["q_norm"])
    own = [
        rounded_entry(turned(rms(row @ w["wkv"].T, w["kv_norm"]), t), rounds=rounds)
        for t, row in enumerate(x)
    ]
    far = [
        rounded_entry(pooled(w, "compressor.", x, i, 64), rounds=rounds) for i in range(n_windows)
    ]
    keys = [
        rounded_index(pooled(w, "indexer.compressor.", x, i, 32), rounds=rounds)
        for i in range(n_windows)
    ]
    for t, row in enumerate(x):
        closed = (t + 1) // 4
        queries = turned((latent[t] @ w["indexer.wq_b"].T).view(16, 32), t)
        queries = torch.stack([rounded_index(q, rounds=rounds) for q in queries])
        heads = row @ w["indexer.weights_proj"].T / 4
        scores = [float(heads @ (queries @ k / 32**0.5).relu()) for k in keys[:closed]]
        best = sorted(range(closed), key=lambda i: (-scores[i], i))[: CONFIG["index_topk"]]
        seen = torch.stack(own[max(0, t - 7) : t + 1] + [far[i] for i in best])
        heads = turned(rms((latent[t] @ w["wq_b"].T).view(4, 64)), t)
        logits = torch.cat([heads @ seen.T / 8, w["attn_sink"][:, None]], 1)
        mixed = turned(logits.softmax(-1)[:, :-1] @ seen, t, -1.0)
        low = [w["wo_a"].view(2, 80, 128)[g] @ mixed[2 * g : 2 * g + 2].flatten() for g in (0, 1)]
        rows.append(w["wo_b"] @ torch.cat(low))
    return torch.stack(rows)


@pytest.mark.parametrize("form", [KvFormat.F32, KvFormat.FP8])
@pytest.mark.parametrize("sizes", [[LENGTH], [9, 1, 17, *[1] * 14]], ids=["whole", "parts"])
def test_layer__with_and_without_rounding__formulas(
    weights: dict[str, Tensor], form: KvFormat, sizes: list[int]
) -> None:
    x = torch.randn(LENGTH, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(4))
    got = ours(weights, x, form, sizes)
    wanted = reference(weights, x, rounds=form is KvFormat.FP8)
    other = reference(weights, x, rounds=form is not KvFormat.FP8)
    # a number near to the middle of two codes may be rounded either way
    assert (got - wanted).norm() < 2e-3 * wanted.norm()
    assert (got - other).norm() > 2e-2 * wanted.norm()
