"""A limit on the digits of JSON numbers, which no schema can set.

A number may go on for ever, and a model that began to repeat digits does so: the answer would never
end. More digits than these change no number that programs hold. Pure; belongs to one answer.
"""

from __future__ import annotations

MOST_DIGITS = 20
MOST_EXPONENT_DIGITS = 2

_QUOTE, _ESCAPE = b'"\\'
_EXPONENT = frozenset(b"eE")
_SIGNS = frozenset(b"+-")


class DigitCount:
    """Reads JSON as it is written; `is_full` says when a number has enough digits."""

    __slots__ = ("_escaped", "_exponent", "_in_string", "_run")

    def __init__(self) -> None:
        self._in_string = self._escaped = self._exponent = False
        self._run = 0  # digits of a number's part so far

    @property
    def is_full(self) -> bool:
        """Whether another digit is one too many."""
        return self._run >= (MOST_EXPONENT_DIGITS if self._exponent else MOST_DIGITS)

    def read(self, text: bytes) -> None:
        """Go on with the next token's bytes."""
        for byte in text:
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = byte == _ESCAPE and not self._escaped
            elif 0x30 <= byte <= 0x39:
                self._run += 1
            else:
                self._exponent = byte in _EXPONENT or (self._exponent and byte in _SIGNS)
                self._in_string, self._run = byte == _QUOTE, 0


def begins_with_digit(text: bytes) -> bool:
    """Whether a token would go on with a number."""
    return text[:1].isdigit()
