"""Weights and pages that the tests of dense products and attention build on, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference import quantize_dense
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.latent import LatentWeight


def dense_weight(
    n: int, k: int, kind: WeightKind, *, by_row: bool = False, device: str = "cpu"
) -> DenseWeight:
    values = torch.randn(n, k, device=device) * 0.1
    if kind is WeightKind.F32:
        return DenseWeight(values)
    if kind is WeightKind.BF16:
        return DenseWeight(values.bfloat16())
    if kind is WeightKind.INT8:
        return DenseWeight(*quantize_dense(values))
    grid = (n, 1) if by_row else (-(-n // 128), -(-k // 128))
    scales = torch.rand(grid, device=device) + 0.1
    return DenseWeight((values * 10).to(torch.float8_e4m3fn), scales)


def real_values(weight: DenseWeight) -> Tensor:
    """What a weight means, float64."""
    values = weight.values.double()
    if weight.scales is None:
        return values
    scales = weight.scales.double()
    if weight.kind is WeightKind.INT8:
        return values * scales.repeat_interleave(32, 1)
    if scales.shape == (weight.n, 1):
        return values * scales
    scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * scales[: weight.n, : weight.k]


def latent_weight(
    kind: WeightKind,
    heads: int,
    dn: int,
    dv: int,
    r: int,
    *,
    by_row: bool = False,
    device: str = "cpu",
) -> LatentWeight:
    weight = dense_weight(heads * (dn + dv), r, kind, by_row=by_row, device=device)
    return LatentWeight(weight, heads, dn, dv)


def latent_halves(up: LatentWeight) -> tuple[Tensor, Tensor]:
    """U_K [N, dn, r] and U_V [N, dv, r], float64."""
    both = real_values(up.weight).view(up.heads, up.dn + up.dv, -1)
    return both[:, : up.dn], both[:, up.dn :]


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| over |want|, as norms, in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def paged(sequences: list[Tensor], page_tokens: int, form: KvFormat) -> KvPages:
    """Entries [S, bytes] of some sequences, in shuffled pages whose unused bytes are noise."""
    counts = [-(-len(entries) // page_tokens) for entries in sequences]
    device, size = sequences[0].device, sequences[0].shape[1]
    shape = (sum(counts) + 2, page_tokens, size)
    pages = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    order = iter(torch.randperm(shape[0]).tolist())
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    for t, entries in enumerate(sequences):
        for p in range(counts[t]):
            page = next(order)
            part = entries[p * page_tokens : (p + 1) * page_tokens]
            pages[page, : len(part)] = part
            table[t, p] = page
    return KvPages(pages, table.to(device), form)
