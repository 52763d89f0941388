"""Sampling over the largest vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moet_desk.kernels.triton import sampling
from tests.kernels.triton.gate import Case

TYPES = {
    "logits": "*fp32", "stride": "i32", "weights": "*i64", "wishes": "*fp64", "draws": "*i64",
    "best": "*fp32", "bins": "*i64", "state": "*i64", "cells": "*i64", "first_ids": "*i32",
    "tokens": "*i32", "chunk_best": "*fp32", "chunk_sum": "*fp32", "chunk_id": "*i32",
    "confidence": "*fp32", "error": "*i32", "V": "i32",
}  # fmt: skip
EXACT = {"enable_fp_fusion": False}


def _case(name: str, kernel: Any, warps: int, **values: int) -> Case:
    types = {name: TYPES[name] for name in kernel.arg_names if name in TYPES and name not in values}
    return Case(f"sample {name}", kernel, types, values, warps, EXACT)


def _cases() -> Iterator[Case]:
    yield _case("scan", sampling._scan_kernel, 4, BLOCK=1024)
    yield _case("settle", sampling._settle_kernel, 1, C=256, BC=256, NAN_BIT=4)
    sizes = {"BLOCK": 1024, "ROW_BINS": 24576, "SLICE": 96, "BS": 128}
    yield _case("weigh", sampling._weigh_kernel, 4, **sizes)
    for search in range(3):
        for step in range(search == 2, 4):
            name = f"search {search} pass {step}"
            values = {"S": search, "P": step, "BLOCK": 1024, "REPLICAS": 8}
            yield _case(name, sampling._pass_kernel, 4, **values)
    yield _case("finish", sampling._finish_kernel, 8, BLOCK=4096, REPLICAS=8)


CASES = list(_cases())
