"""Typed, strict reading of a config.json: missing, wrong and unknown keys become MD-SRC-07.

An unknown key may change the maths of a new point release, so a family lists the keys it knows and
the rest is refused by name, except those listed here that cannot matter (training, bookkeeping,
generation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from moet_desk.errors import MoetError, fail

T = TypeVar("T")

HARMLESS_KEYS = frozenset(
    "_name_or_path architectures model_type auto_map bos_token_id eos_token_id pad_token_id"
    " torch_dtype dtype transformers_version use_cache initializer_range attention_dropout"
    " aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits ep_size pretraining_tp"
    " quantization_config return_dict output_hidden_states output_attentions problem_type id2label"
    " label2id is_encoder_decoder chunk_size_feed_forward is_decoder cross_attention_hidden_size"
    " add_cross_attention tie_encoder_decoder finetuning_task task_specific_params"
    " attn_implementation _attn_implementation mlp_bias sliding_window_size".split()
)


def text_keys(config: Mapping[str, Any], *, path: str, wrapper: frozenset[str]) -> Keys:
    """Keys of the language model of a config that may have a level for it, `text_config`.

    Around it only the keys of `wrapper` may be; whether the embedding is the head is said there, if
    it is said. Raises MD-SRC-07.
    """
    inner = config.get("text_config")
    if inner is None:
        return Keys(config, path=path)
    outer = Keys(config, path=path)
    outer.refuse_unknown(wrapper)
    if not isinstance(inner, Mapping):
        raise outer.wrong(f"text_config is {inner!r}, an object was expected")
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    return Keys({**inner, "tie_word_embeddings": tied}, path=path)


class Keys:
    """A config.json with checked access. Raises MD-SRC-07 with the file's path and the reason."""

    def __init__(self, config: Mapping[str, Any], *, path: str) -> None:
        self._config = config
        self._path = path
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        for name, value in (("rope_scaling", old), ("rope_parameters", new)):
            if value is not None and not isinstance(value, Mapping):
                raise self.wrong(f"{name} is {value!r}, an object was expected")
        # newer files keep everything about rope in rope_parameters, older ones in several places
        outside = ("rope_theta", "partial_rotary_factor")
        self._rope: dict[str, Any] = {key: config.get(key) for key in outside}
        self._rope.update({**(old or {}), **(new or {})})

    def wrong(self, reason: str) -> MoetError:
        return fail("MD-SRC-07", path=self._path, reason=reason)

    def refuse_unknown(self, known: frozenset[str]) -> None:
        unknown = sorted(set(self._config) - known - HARMLESS_KEYS)
        if unknown:
            raise self.wrong(f"keys that this family does not know: {', '.join(unknown)}")

    def refuse_unknown_rope(self, known: frozenset[str]) -> None:
        unknown = sorted(set(self._rope) - known)
        if unknown:
            raise self.wrong(f"rope parameters that are not known: {', '.join(unknown)}")

    def get(self, key: str) -> Any:
        return self._config.get(key)

    def want(self, key: str, wanted: object) -> None:
        """Refuse a config whose `key` is there with another value than the only supported one."""
        value = self._config.get(key)
        if value is not None and value != wanted:
            raise self.wrong(f"{key} is {value!r}, only {wanted!r} is supported")

    def count(
        self, key: str, *, default: int | None = None, least: int = 1, aliases: tuple[str, ...] = ()
    ) -> int:
        found = [
            self._config[name] for name in (key, *aliases) if self._config.get(name) is not None
        ]
        value = found[0] if found else default
        if value is None:
            raise self.wrong(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"{key} is {value!r}, a whole number of at least {least} was expected")
        return value

    def multiple(self, key: str, *, of: int) -> int:
        value = self.count(key)
        if value % of:
            raise self.wrong(
                f"{key} is {value}, a multiple of {of} is needed for blocks of weights"
            )
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        return self._number(key, self._config.get(key), default)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(f"{key} is {value!r}, true or false was expected")
        return value

    def indices(self, key: str, *, below: int) -> set[int]:
        """A list of different places, empty if the key is missing."""
        value = self._config.get(key) or []
        if not isinstance(value, list) or any(
            isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < below for i in value
        ):
            raise self.wrong(f"{key} is {value!r}, a list of numbers below {below} was expected")
        return set(value)

    def choice(self, key: str, choices: Mapping[str, T], *, default: str) -> T:
        value = self._config.get(key) or default
        if value not in choices:
            raise self.wrong(f"{key} is {value!r}, supported: {', '.join(choices)}")
        return choices[value]

    def rope_kind(self) -> str:
        kind = self._rope.get("rope_type") or self._rope.get("type") or "default"
        return str(kind)

    def rope_number(self, key: str, *, default: float | None = None) -> float:
        value = self._number(key, self._rope.get(key), default)
        if value <= 0:
            raise self.wrong(f"{key} of the rope is {value}, a positive number was expected")
        return value

    def rope_optional(self, key: str) -> float | None:
        value = self._rope.get(key)
        return None if value is None else self._number(key, value, None)

    def rope_flag(self, key: str, *, default: bool) -> bool:
        value = self._rope.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(f"{key} is {value!r}, true or false was expected")
        return value

    def _number(self, key: str, value: Any, default: float | None) -> float:
        if value is None:
            value = default
        if value is None:
            raise self.wrong(f"{key} is missing")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.wrong(f"{key} is {value!r}, a number was expected")
        return float(value)
