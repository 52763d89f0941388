"""Errors that leave their process as records and come back."""

from __future__ import annotations

import json

import pytest

from moet_desk.errors import CATALOGUE, fail, from_record


def test_record__of_every_code__comes_back_equal() -> None:
    for code in CATALOGUE:
        error = fail(code, name="x", reason="r", parameter="p")
        back = from_record(json.loads(json.dumps(error.to_dict())))
        assert back is not None
        assert (back.code, back.facts, str(back)) == (code, error.facts, str(error))
        assert type(back) is type(error)


@pytest.mark.parametrize("record", [None, [], "MD-RAM-01", {}, {"code": "MD-X-1"}, {"code": []}])
def test_record__that_is_none__none(record: object) -> None:
    assert from_record(record) is None
