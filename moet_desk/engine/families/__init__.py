"""Model families: config.json in, `Spec` and `PackPlan` out. One file per family, named as
model_type.

No torch here. `spec_for` and `plan_for` are what the packer and the engine call.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast

from moet_desk.engine.spec import Spec
from moet_desk.errors import fail
from moet_desk.store.pack_format import PackPlan

MODULE_OF_TYPE = {
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "kimi_k25",
    "deepseek_v32": "deepseek_v32",
    "glm_moe_dsa": "glm_moe_dsa",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "olmoe": "olmoe",
    "mixtral": "mixtral",
    "minimax_m2": "minimax_m2",
    "gpt_oss": "gpt_oss",
    "longcat_flash": "longcat_flash",
    "longcat_flash_ngram": "longcat_flash_ngram",
    "deepseek_v4": "deepseek_v4",
}
"""model_type -> module. Kimi-K2's text model is DeepSeek-V3's with other sizes."""


_TYPE_OF_ARCHITECTURE = {"LongcatFlashNgramForCausalLM": "longcat_flash_ngram"}
"""Of released configs that have no model_type."""

_MOST_COUNTED = 10_000  # layers, or experts of one


def runs(model_type: str) -> bool:
    """Whether the maths of this family is written."""
    return model_type in MODULE_OF_TYPE


def _n_layers(config: Mapping[str, Any]) -> int:
    """Layers of the language model, whose keys may lie one level down."""
    inner = config.get("text_config")
    keys = inner if isinstance(inner, Mapping) else config
    return int(keys["num_layers" if "num_layers" in keys else "num_hidden_layers"])


class Family(Protocol):
    """What a family module offers."""

    def spec(self, config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec: ...

    def plan(self, spec: Spec) -> PackPlan: ...

    def mtp_prefix(self, config: Mapping[str, Any]) -> str | tuple[str, ...] | None: ...


def _family(config: Mapping[str, Any], path: str) -> Family:
    model_type = config.get("model_type")
    if model_type is None and config.get("architectures"):
        model_type = _TYPE_OF_ARCHITECTURE.get(str(config["architectures"][0]))
    if not isinstance(model_type, str):
        raise fail("MD-SRC-07", path=path, reason="it has no model_type")
    module = MODULE_OF_TYPE.get(model_type)
    if module is None:
        supported = ", ".join(sorted(MODULE_OF_TYPE))
        raise fail("MD-PACK-01", model_type=model_type, supported=supported)
    _check_counts(config, path)
    return cast("Family", importlib.import_module(f"moet_desk.engine.families.{module}"))


def _check_counts(config: Mapping[str, Any], path: str) -> None:
    """Refuse counts that no model has, before something is made of each: a damaged file must not
    keep this program busy for hours.
    """
    inner = config.get("text_config")
    for name, value in (inner if isinstance(inner, Mapping) else config).items():
        is_count = name.endswith(("layers", "experts", "expert_num")) and isinstance(
            value, int | float
        )
        if is_count and not abs(value) <= _MOST_COUNTED:
            raise fail("MD-SRC-07", path=path, reason=f"{name} is {value}")


def spec_for(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """The spec of a model.

    Args:
        config: the parsed config.json.
        path: where it came from, for messages.
        has_mtp: whether the MTP head's tensors are there (a config may announce a head that the
            files lack, and the reverse is refused by the packer).

    Raises:
        MoetError: MD-PACK-01 unknown family, MD-SRC-07 a key that is missing, wrong or unknown.
    """
    return _with_experts(_family(config, path).spec(config, path=path, has_mtp=has_mtp), path)


def plan_for(config: Mapping[str, Any], *, path: str, names: Collection[str]) -> PackPlan:
    """The packer's plan for a source with these logical tensor `names`. Raises as `spec_for`."""
    family = _family(config, path)
    prefix = family.mtp_prefix(config)
    has_mtp = prefix is not None and any(name.startswith(prefix) for name in names)
    return family.plan(_with_experts(family.spec(config, path=path, has_mtp=has_mtp), path))


def packed_head(
    config: Mapping[str, Any], moe_layers: Sequence[int], dense: Collection[str], *, path: str
) -> bool:
    """Whether a pack holds an MTP head, as the layer behind the model's last one: its experts are
    the last MoE layer then, or it has dense tensors alone. Raises as `spec_for`.
    """
    if _family(config, path).mtp_prefix(config) is None:
        return False
    try:
        n_layers = _n_layers(config)
        return moe_layers[-1] >= n_layers or f"model.layers.{n_layers}.enorm" in dense
    except (ValueError, KeyError, TypeError) as error:
        raise fail("MD-SRC-07", path=path, reason=str(error)) from error


def _with_experts(spec: Spec, path: str) -> Spec:
    if not spec.main_moe_layers:
        raise fail("MD-SRC-07", path=path, reason="it leaves no layer with routed experts")
    return spec
