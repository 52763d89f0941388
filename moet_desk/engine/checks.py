"""Checks of what a request asks for, before any work is done. Pure, no torch; any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moet_desk.engine.handle import Sampling
from moet_desk.errors import MoetError, fail

MAX_STOPS = 16
MAX_STOP_CHARS = 1024

# name -> (least, largest, whether `least` itself is allowed, words)
_RANGES: Mapping[str, tuple[float, float, bool, str]] = {
    "temperature": (0.0, 2.0, True, "from 0 to 2"),
    "top_p": (0.0, 1.0, False, "above 0 and at most 1"),
    "top_k": (0, math.inf, True, "0 (off) or more"),
    "min_p": (0.0, 1.0, True, "from 0 to 1"),
    "presence_penalty": (-2.0, 2.0, True, "from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, True, "from -2 to 2"),
    "repetition_penalty": (0.0, 100.0, False, "above 0"),
}
_MAX_BIAS = 100.0


def check_sampling(sampling: Sampling, vocab: int | None = None) -> None:
    """Refuse values outside of their range.

    Args:
        sampling: what the request asks for; None values are fine.
        vocab: size of the vocabulary, to check the ids of `logit_bias`.

    Raises:
        MoetError: MD-API-04 naming the parameter, its value and the range.
    """
    for name, (least, largest, includes_least, words) in _RANGES.items():
        value = getattr(sampling, name)
        if value is None:
            continue
        is_inside = least < value <= largest or (includes_least and value == least)
        if not is_inside or not math.isfinite(value):
            raise _refuse(name, f"{value} is not {words}")
    if sampling.min_p is not None and sampling.min_p >= 1:
        raise _refuse("min_p", f"{sampling.min_p} is not below 1")
    for token_id, bias in sampling.logit_bias.items():
        if token_id < 0 or (vocab is not None and token_id >= vocab):
            raise _refuse("logit_bias", f"there is no token {token_id}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise _refuse("logit_bias", f"{bias} is not from -100 to 100")


def check_gate(gate: float | None) -> None:
    """Refuse a gate that is no probability.

    Raises:
        MoetError: MD-API-04.
    """
    if gate is not None and not 0.0 <= gate <= 1.0:
        raise _refuse("gate", f"{gate} is not from 0 to 1")


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that cannot be honoured.

    Raises:
        MoetError: MD-API-04, too many, too long, or an empty one.
    """
    if len(stops) > MAX_STOPS:
        raise _refuse("stop", f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not stop:
            raise _refuse("stop", "an empty stop string would match at once")
        if len(stop) > MAX_STOP_CHARS:
            raise _refuse("stop", f"a stop string is longer than {MAX_STOP_CHARS} characters")


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Refuse a prompt of ids that the vocabulary does not have, or of none.

    Raises:
        MoetError: MD-API-04.
    """
    if not ids or min(ids) < 0 or max(ids) >= vocab:
        raise _refuse("prompt_ids", f"ids must be 0 to {vocab - 1}, and at least one")


def _refuse(parameter: str, reason: str) -> MoetError:
    return fail("MD-API-04", parameter=parameter, reason=reason)
