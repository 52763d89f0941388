"""Routed steps on random experts, and what the reference makes of them; CPU and GPU tests share it.

Importing this decides nothing about the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.kernels import reference
from moet_desk.kernels.kinds import SWIGLU, Activations, Glu
from moet_desk.kernels.layouts import ExpertLayout, base_codes
from moet_desk.kernels.reference.experts import ExpertBias, _block_matmul
from moet_desk.kernels.triton.experts import (
    ExpertPool,
    Tile,
    combine,
    experts_down,
    experts_gate_up,
    experts_hidden,
)
from moet_desk.kernels.triton.grouped import RowAddresses, expand, make_batch
from moet_desk.kernels.triton.quant import plain_shape, planar_shape, quantize_rows
from tests.kernels.makers import Expert, random_expert


@dataclass
class Step:
    """T tokens that choose K of some experts each, all on the CPU."""

    experts: list[Expert]
    ids: Tensor  # [T, K]
    x: Tensor  # [T, H]
    weights: Tensor  # [T, K]
    fine: bool
    bias: ExpertBias | None = None  # of all experts

    @property
    def layout(self) -> ExpertLayout:
        return self.experts[0].layout

    @property
    def kind(self) -> Activations:
        return Activations.INT15 if self.fine else Activations.INT8

    def slot(self, t: int, k: int) -> Tensor:
        expert = self.experts[int(self.ids[t, k])]
        return expert.fine_slot() if self.fine else expert.base_slot()

    def pool(self, device: str) -> ExpertPool:
        """The experts in a pool, in reverse order, with the tables that a look-up would write."""
        n_tokens, top_k = self.ids.shape
        last = len(self.experts) - 1
        slots = torch.full((n_tokens * top_k,), -1, dtype=torch.int32)
        pairs = torch.full((n_tokens * top_k, n_tokens), -1, dtype=torch.int32)
        uniq: list[int] = []
        for i, expert in enumerate(self.ids.reshape(-1).tolist()):
            if expert not in uniq:
                uniq.append(expert)
            pairs[uniq.index(expert), i // top_k] = i
        slots[: len(uniq)] = last - torch.tensor(uniq)
        base = torch.stack([e.base_row for e in reversed(self.experts)]).to(device)
        fine = torch.stack([e.fine_row for e in reversed(self.experts)]).to(device)
        slots, pairs = slots.to(device), pairs.to(device)
        bias, ids = self.bias, None
        if bias is not None:
            bias = ExpertBias(bias.gate_up.to(device), bias.down.to(device))
            ids = self.ids.to(device, torch.int32)
        if self.fine:
            return ExpertPool(self.layout, base, slots, pairs, fine, slots, bias, ids)
        return ExpertPool(self.layout, base, slots, pairs, bias=bias, ids=ids)

    def products(self) -> Tensor:
        """The reference's gate_up products before SwiGLU: [T, K, 2I]."""
        q, s = reference.quantize_activations(self.x, self.kind)
        matrix = self.layout.gate_up
        return self._by_pair(
            lambda t, k: _block_matmul(
                [q[t : t + 1]], s[t : t + 1], [self.slot(t, k)[: matrix.n * matrix.k]], matrix
            )
        )

    def down_products(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The reference's products of given hidden codes with the down matrices: [T, K, H]."""
        split = self.layout.gate_up.n * self.layout.gate_up.k
        q, top_k = code_values(codes), self.ids.shape[1]

        def one(t: int, k: int) -> Tensor:
            pair = slice(t * top_k + k, t * top_k + k + 1)
            return _block_matmul(
                [q[pair]], scales[pair], [self.slot(t, k)[split:]], self.layout.down
            )

        return self._by_pair(one)

    def bias_of(self, t: int, k: int) -> ExpertBias | None:
        if self.bias is None:
            return None
        one = self.ids[t, k : k + 1]
        return ExpertBias(self.bias.gate_up[one], self.bias.down[one])

    def parts(self, glu: Glu = SWIGLU, kind: Activations | None = None) -> Tensor:
        """The reference's contribution of each pair: [T, K, H]."""
        kind = kind or self.kind
        q, s = reference.quantize_activations(self.x, kind)
        return self._by_pair(
            lambda t, k: reference.expert_mlp(
                q[t : t + 1], s[t : t + 1], self.slot(t, k), self.layout,
                glu=glu, bias=self.bias_of(t, k), kind=kind,
            )
        )  # fmt: skip

    def _by_pair(self, one):  # type: ignore[no-untyped-def]
        n_tokens, top_k = self.ids.shape
        rows = [torch.stack([one(t, k)[0] for k in range(top_k)]) for t in range(n_tokens)]
        return torch.stack(rows)


@dataclass
class StepOutput:
    hidden: Tensor  # [P, I]
    codes: Tensor  # [P, 8, I/32], with fine slots [P, 2, 8, I/32]
    scales: Tensor  # [P, I/32]
    part: Tensor  # [P, H]
    out: Tensor  # [T, H]


def random_step(
    hidden: int, inter: int, n_tokens: int, top_k: int, *, fine: bool, n_experts: int = 4
) -> Step:
    experts = [random_expert(hidden, inter, low=118, high=124) for _ in range(n_experts)]
    ids = torch.rand(n_tokens, n_experts).topk(top_k, dim=1).indices
    x = torch.randn(n_tokens, hidden)
    return Step(experts, ids, x, torch.rand(n_tokens, top_k), fine)


def random_bias(layout: ExpertLayout, n_experts: int) -> ExpertBias:
    """Of bfloat16 values, the published precision."""
    gate_up = torch.randn(n_experts, 2 * layout.inter).bfloat16()
    return ExpertBias(gate_up, torch.randn(n_experts, layout.hidden).bfloat16())


def code_values(codes: Tensor) -> Tensor:
    """Integers of codes in either order and of either kind: float32 [T, H]."""
    if codes.dtype == torch.int32:
        quads = codes.view(torch.int8).view(codes.shape[0], -1, 8, codes.shape[-1], 4)
        parts = quads.permute(0, 1, 3, 2, 4).flatten(2)  # [T, 1 or 2, H]
    else:
        parts = codes.view(codes.shape[0], -1, codes.shape[-1])
    values = parts.float()
    return values[:, 0] if parts.shape[1] == 1 else 256 * values[:, 0] + values[:, 1]


def planar_codes(x: Tensor, kind: Activations = Activations.INT8) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], *planar_shape(x.shape[1], kind))
    codes = torch.empty(shape, dtype=torch.int32, device=x.device)
    scales = torch.empty(x.shape[0], x.shape[1] // 32, device=x.device)
    quantize_rows(x, codes, scales)
    return codes, scales


def plain_codes(x: Tensor, kind: Activations = Activations.INT8) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], *plain_shape(x.shape[1], kind))
    codes = torch.empty(shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], x.shape[1] // 32, device=x.device)
    quantize_rows(x, codes, scales)
    return codes, scales


def expanded(expert: Expert, *, device: str, fine: bool, ptx: bool | None = None) -> list[Tensor]:
    """Both matrices [N, K] int8 as `expand` writes them: levels, or with `fine` doubled FP4."""
    layout = expert.layout
    base, digits = expert.base_row.to(device), expert.fine_row.to(device)
    rows = RowAddresses(
        layout,
        torch.tensor([base.data_ptr()], device=device),
        torch.tensor([digits.data_ptr()], device=device) if fine else None,
    )
    workspace = torch.empty(1, layout.slot_floats, dtype=torch.int8, device=device)
    branch = {} if ptx is None else {"ptx": ptx}
    expand(rows, make_batch([1], range(1), device=device), workspace, **branch)
    split = layout.gate_up.n * layout.gate_up.k
    parts = workspace[0].cpu().split([split, layout.slot_floats - split])
    matrices = (layout.gate_up, layout.down)
    return [part.view(m.n, m.k) for part, m in zip(parts, matrices, strict=True)]


def wanted_bytes(expert: Expert, *, fine: bool) -> list[Tensor]:
    """What `expanded` has to give, from the nibbles."""
    levels = torch.tensor([-4, -1, 1, 4], dtype=torch.int8)
    halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
    doubled = torch.cat([halves, -halves])
    nibbles = (expert.gate_up[0], expert.down[0])
    return [doubled[n.long()] if fine else levels[base_codes(n).long()] for n in nibbles]


def down_columns(
    expert: Expert, columns: list[int], *, device: str, fine: bool, ptx: bool | None = None
) -> Tensor:
    """Columns of the down matrix with their scales, read off by tokens that are 1 there: [C, H]."""
    layout, n = expert.layout, len(columns)
    ones = torch.zeros(n, layout.inter, dtype=torch.int8)
    ones[torch.arange(n), columns] = 1
    quads = ones.view(torch.int32).view(n, -1, 8).transpose(1, 2).contiguous()  # [C, 8, I/32]
    codes = torch.stack([torch.zeros_like(quads), quads], 1) if fine else quads
    assert torch.equal(code_values(codes), ones.float())
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    pairs = torch.arange(n, dtype=torch.int32, device=device)[None]
    base, digits = expert.base_row[None].to(device), expert.fine_row[None].to(device)
    pool = ExpertPool(layout, base, slot, pairs, *((digits, slot) if fine else ()))
    part = torch.empty(n, layout.hidden, device=device)
    scales = torch.ones(n, layout.inter // 32, device=device)
    branch = {} if ptx is None else {"ptx": ptx}
    tile = Tile(32, 4) if device == "cpu" else None
    experts_down(pool, codes.to(device), scales, part=part, tile=tile, **branch)
    return part.cpu()


def wanted_columns(expert: Expert, columns: list[int], *, fine: bool) -> Tensor:
    """What `down_columns` has to give, by the reference's definition."""
    nibbles, scales = expert.down
    if fine:
        return reference.fp4_values(nibbles, scales)[:, columns].T
    return reference.base_values(base_codes(nibbles), scales)[:, columns].T


def run_step(
    step: Step,
    *,
    device: str = "cpu",
    glu: Glu = SWIGLU,
    ptx: bool | None = None,
    gate_up: Tile | None = None,
    down: Tile | None = None,
    last: bool = False,
) -> StepOutput:
    """All expert kernels of a step. Interpreted, few large programs are quicker than many small."""
    if device == "cpu":
        gate_up, down = gate_up or Tile(32, 4), down or Tile(32, 4)
    pool, layout = step.pool(device), step.layout
    n_pairs = step.ids.numel()
    branch = {} if ptx is None else {"ptx": ptx}
    codes, scales = planar_codes(step.x.to(device), step.kind)
    hidden = torch.empty(n_pairs, layout.inter, device=device)
    code_shape = (n_pairs, *planar_shape(layout.inter, step.kind))
    out_codes = torch.empty(code_shape, dtype=torch.int32, device=device)
    out_scales = torch.empty(n_pairs, layout.inter // 32, device=device)
    done = torch.zeros(out_scales.shape, dtype=torch.int32, device=device) if last else None
    experts_hidden(
        pool, codes, scales, scratch=hidden, out_codes=out_codes, out_scales=out_scales,
        glu=glu, tile=gate_up, done=done, **branch,
    )  # fmt: skip
    experts_gate_up(pool, codes, scales, out=hidden, glu=glu, tile=gate_up, **branch)
    part = torch.empty(n_pairs, layout.hidden, device=device)
    experts_down(pool, out_codes, out_scales, part=part, tile=down, **branch)
    out = torch.zeros(step.x.shape, device=device)
    combine(part, step.weights.to(device), base=None, residual=out, out=out)
    return StepOutput(*(t.cpu() for t in (hidden, out_codes, out_scales, part, out)))
