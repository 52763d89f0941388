"""Arguments of calls: JSON as models write it, and values that a tool's schema gives a type.

Formats with tags around each argument only have text; the schema says whether "6" is a number. What
is declared a string stays the text it is. Pure; nothing here raises on any text or schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w.\-:/]*")
_TYPES: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip
_MAX_REFS = 16


@dataclass(frozen=True, slots=True)
class ToolBook:
    """The tools that a request offers: name -> schema of its parameters."""

    schemas: Mapping[str, Schema] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> ToolBook:
        """From tools as OpenAI clients send them; what is not one is left out."""
        found: dict[str, Schema] = {}
        for tool in tools:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                continue
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, Mapping) else {}
        return cls(found)

    def knows(self, name: str) -> bool:
        """Whether there is such a tool; without any tools, whether it could be one's name."""
        return name in self.schemas if self.schemas else is_name(name)

    def keys(self, name: str) -> frozenset[str]:
        """Names of a tool's parameters."""
        properties = self.schemas.get(name, {}).get("properties")
        return frozenset(properties) if isinstance(properties, Mapping) else frozenset()

    def typed(self, name: str, key: str, text: str) -> Any:
        """An argument's text as the value that the tool's schema wants."""
        root = self.schemas.get(name, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return typed(text, schema_types(schema, root))


def is_name(text: str) -> bool:
    """Whether a text could be a function's name."""
    return _NAME.fullmatch(text) is not None


def typed(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for.

    Args:
        text: as the model wrote it.
        types: JSON types that are allowed; empty if unknown.

    Returns:
        The text itself if it may be a string, or is nothing that is allowed.
    """
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    value = _value_of(text.strip())
    if isinstance(value, float) and "integer" in types and "number" not in types:
        value = int(value) if value.is_integer() else value
    kind = _TYPES.get(type(value), "string")
    if kind == "string":
        return text
    wanted = not types or kind in types or (kind == "integer" and "number" in types)
    return value if wanted else text


def _value_of(text: str) -> Any:
    """The JSON or Python literal in a text; the text if there is none."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return load_json(text)
    except (ValueError, RecursionError):
        pass
    if not text.startswith(("{", "[")) and text != "None":
        return text
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


def schema_types(schema: object, root: Schema) -> frozenset[str]:
    """JSON types that a schema allows; empty if it does not say."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, Mapping):
            return frozenset()
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        schema = _resolved(reference, root)
    else:
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset((stated,))
    if isinstance(stated, list):
        return frozenset(kind for kind in stated if isinstance(kind, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if values is None and "const" in schema:
        values = [schema["const"]]
    if values is not None:
        return frozenset(_TYPES.get(type(value), "string") for value in values)
    branches = next((schema[k] for k in ("anyOf", "oneOf", "allOf") if k in schema), None)
    if not isinstance(branches, list):
        return frozenset()
    return frozenset().union(*(_branch_types(branch, root) for branch in branches[:64]))


def _branch_types(branch: object, root: Schema) -> frozenset[str]:
    # One level: a branch with branches of its own says nothing here.
    nested = isinstance(branch, Mapping) and {"anyOf", "oneOf", "allOf"} & set(branch)
    return frozenset() if nested else schema_types(branch, root)


def _resolved(reference: str, root: Schema) -> object:
    place: object = root
    for part in reference.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def load_json(text: str) -> Any:
    """Parse JSON. Not strict: models put raw newlines into the strings of their JSON.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(text, strict=False)


def object_text(value: object) -> str | None:
    """The JSON text of an object, of none, or of a text that holds one; None for anything else."""
    try:
        if isinstance(value, str):
            value = load_json(value)
        if not isinstance(value, dict | None):
            return None
        text = json.dumps(value or {}, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return text


def read_object(text: str) -> str | None:
    """`object_text` of a JSON text whose braces are its own: a text that holds a text is none."""
    return object_text(text) if text.lstrip().startswith("{") else None


def in_string(text: str) -> bool:
    """Whether a JSON object or list cut off here is inside a string, which may hold a tag."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    return _ESCAPED.sub("", text).count('"') % 2 == 1
