"""Errors that leave their process as records and come back."""

from __future__ import annotations

import errno
import json

import pytest

from moet_desk.errors import CATALOGUE, fail, from_record
from moet_desk.errors.disk import unexpected


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


@pytest.mark.parametrize(
    ("problem", "code", "cause"),
    [
        (fail("MD-LIB-01", model="m", path="/p"), "MD-LIB-01", "m"),
        (PermissionError(errno.EACCES, "Permission denied", "/t"), "MD-DISK-04", "/t: Permission"),
        (TimeoutError("timed out"), "MD-DISK-04", "The system: timed out."),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "MD-RAM-04", "RAM"),
        (MemoryError(), "MD-RAM-04", "RAM"),
        (KeyError("k"), "MD-BUG-01", "KeyError: 'k'"),
    ],
)
def test_unexpected__the_system_s_refusals_are_no_bugs(
    problem: Exception, code: str, cause: str
) -> None:
    error = unexpected(problem, log="/log")
    assert error.code == code
    assert cause in error.cause
    assert "/log" in error.do or code != "MD-BUG-01"
