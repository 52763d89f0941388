"""The device look-up's policy in plain Python over the same tables, float32 like the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moet_desk.kernels.reference.cache import FREE, HALF_LIFE, WINDOW
from moet_desk.kernels.triton.cache import EXP2_TERMS, LOG2_TERMS, GpuTables

F = np.float32


def added_use(old: np.float32, at: np.float32) -> np.float32:
    """log2(2**old + 2**at) as the kernel computes it, number by number."""
    e1, e2, e3 = (F(term) for term in EXP2_TERMS)
    l1, l2, l3, l4 = (F(term) for term in LOG2_TERMS)
    high = max(old, at)
    d = max(F(min(old, at) - high), F(-24.0))
    whole = np.floor(d)
    r = F(d - whole)
    power = F(1.0) + r * (e1 + r * (e2 + r * e3))
    y = F(power * np.ldexp(F(1.0), int(whole)))
    return F(high + y * (l1 + y * (l2 + y * (l3 + y * l4))))


@dataclass
class Found:
    uniq_slot: Tensor
    uniq_pair: Tensor
    misses: list[tuple[int, int]]
    evicted: list[int]


def lookup(
    ids: Tensor, tables: GpuTables, layer: int, *, ends_step: bool = False, before: int = 0
) -> Found:
    """Change CPU tables as the kernel does, and say what it writes."""
    n_tokens, top_k = ids.shape
    now = int(tables.clock) * tables.n_layers + layer + 1
    at = F(now) * F(1.0 / (HALF_LIFE * tables.n_layers))
    uniq: list[int] = []
    uniq_pair = torch.full((n_tokens * top_k, n_tokens), -1, dtype=torch.int32)
    used = [(i, int(e)) for i, e in enumerate(ids.reshape(-1)) if e >= 0]
    for i, expert in used:
        row = layer * tables.n_experts + expert
        tables.warmth[row] = float(added_use(F(tables.warmth[row]), at))
        if row not in uniq:
            uniq.append(row)
        uniq_pair[uniq.index(row), i // top_k] = i
    missing = [row for row in uniq if tables.slot_of[row] == FREE]
    for row in uniq:
        if row not in missing:
            tables.last_used[tables.slot_of[row].long()] = now
    misses, evicted = _give_slots(tables, missing, now, before)
    uniq_slot = torch.full((n_tokens * top_k,), -1, dtype=torch.int32)
    uniq_slot[: len(uniq)] = tables.slot_of[torch.tensor(uniq, dtype=torch.int64)]
    counts = [len(used), len(used) - len(misses), len(misses), len(evicted)]
    tables.counters[layer] += torch.tensor(counts, dtype=torch.int32)
    tables.clock.add_(int(ends_step))
    return Found(uniq_slot, uniq_pair, misses, evicted)


def look_ahead(
    ids: Tensor, most: int, tables: GpuTables, layer: int, *, chosen: Tensor, brought: list[int]
) -> list[tuple[int, int]]:
    """Change CPU tables as that kernel does; rows to bring and their slots."""
    now = int(tables.clock) * tables.n_layers + layer + 1
    asked = {(layer - 1) * tables.n_experts + e for e in chosen.flatten().tolist() if e >= 0}
    counts = [len(brought), sum(row in asked for row in brought)]
    tables.ahead[layer - 1] += torch.tensor(counts, dtype=torch.int32)
    likely = [layer * tables.n_experts + e for e in ids[:, :most].flatten().tolist()]
    rows = list(dict.fromkeys(likely))
    missing = [row for row in rows if tables.slot_of[row] == FREE]
    for row in rows:
        if row not in missing:
            tables.last_used[tables.slot_of[row].long()] = now
    misses, evicted = _give_slots(tables, missing, now, 1)
    tables.counters[layer, 3] += len(evicted)
    return misses


def _give_slots(
    tables: GpuTables, missing: list[int], now: int, before: int
) -> tuple[list[tuple[int, int]], list[int]]:
    misses, evicted = [], []
    for row in missing:
        slot = _free_slot(tables)
        slot = _coldest(tables, now, before) if slot is None else slot
        old = int(tables.owner[slot])
        if old != FREE:
            tables.slot_of[old] = FREE
            evicted.append(old)
        tables.owner[slot] = row
        tables.slot_of[row] = slot
        tables.last_used[slot] = now
        misses.append((row, slot))
    return misses, evicted


def _free_slot(tables: GpuTables) -> int | None:
    if not int(tables.n_free):
        return None
    tables.n_free.sub_(1)
    return int(tables.free[int(tables.n_free)])


def _coldest(tables: GpuTables, now: int, before: int) -> int:
    n_slots = int(tables.limit)
    while True:
        begin = int(tables.hand) if n_slots > WINDOW else 0
        end = min(begin + WINDOW, n_slots)
        tables.hand.fill_(end % n_slots)
        warmth = tables.warmth[tables.owner[begin:end].long()].clone()
        used = tables.last_used[begin:end]
        in_use = (used >= now - before) & (used <= now)
        warmth[in_use] = torch.inf
        slot = int(np.argmin(warmth.numpy()))
        if not in_use[slot]:
            return begin + slot
