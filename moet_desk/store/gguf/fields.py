"""Typed access to the fields of a GGUF header: what is missing or wrong becomes MD-GGUF-05."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from moet_desk.errors import MoetError, fail


class Fields:
    """Fields by name; those of the architecture without its prefix by the methods' `key`."""

    def __init__(self, fields: Mapping[str, Any], *, file: str) -> None:
        self.file = file
        self._fields = fields
        self._read: set[str] = set()
        self.arch = self.text("general.architecture")

    def wrong(self, reason: str) -> MoetError:
        return fail("MD-GGUF-05", file=self.file, reason=reason)

    def get(self, name: str) -> Any:
        """Any field by its whole name, None if it is not there."""
        return self._fields.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """A text by its whole name."""
        self._read.add(name)
        value = self._fields.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(f"{name} is {_shown(value)}, a text was expected")
        return value

    def _own(self, key: str, default: object) -> Any:
        name = f"{self.arch}.{key}"
        self._read.add(name)
        return self._fields.get(name, default)

    def refuse_unread(self, harmless: Container[str]) -> None:
        """Refuse fields of the architecture that nobody asked for: they may change the maths.

        Raises:
            MoetError: MD-GGUF-05 names them.
        """
        start = f"{self.arch}."
        keys = [name.removeprefix(start) for name in self._fields if name.startswith(start)]
        unknown = sorted(
            key for key in keys if start + key not in self._read and key not in harmless
        )
        if unknown:
            raise self.wrong(f"fields that are not known here: {', '.join(unknown)}")

    def ignore(self, key: str) -> None:
        """Take note of a field of the architecture that says nothing here."""
        self._read.add(f"{self.arch}.{key}")

    def has(self, key: str) -> bool:
        """Whether a field of the architecture is there."""
        return self._fields.get(f"{self.arch}.{key}") is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list with one per layer, the value that all layers share."""
        value = self._own(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(f"{self.arch}.{key} is {_shown(value)}, a count was expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._own(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(f"{self.arch}.{key} is {_shown(value)}, a number was expected")
        return decimal(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._own(key, default)
        if not isinstance(value, bool):
            raise self.wrong(f"{self.arch}.{key} is {_shown(value)}, true or false was expected")
        return value


def as_json(value: Mapping[str, Any]) -> bytes:
    """A small file made from fields: the same value gives the same bytes."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def decimal(value: float) -> float:
    """The decimal that somebody wrote, of a number that was stored as float32: 1e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
