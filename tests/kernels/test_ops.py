"""The op table is complete and says what it means."""

from __future__ import annotations

import inspect

from moet_desk.kernels import reference
from moet_desk.kernels.ops import OPS

SIZES_AND_TABLES = {"mla_entry_bytes", "gqa_entry_bytes", "rope_frequencies", "yarn_mscale"}


def test_ops__every_public_function__is_in_the_table_under_its_name() -> None:
    functions = {
        name: value
        for name in reference.__all__
        if inspect.isfunction(value := getattr(reference, name)) and name not in SIZES_AND_TABLES
    }
    assert {name: entry.reference for name, entry in OPS.items()} == functions


def test_ops__tolerance__is_zero_exactly_for_exact_ops() -> None:
    for entry in OPS.values():
        assert entry.exact is (entry.tolerance == 0)
        assert entry.triton is None
