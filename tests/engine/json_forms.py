"""Random JSON schemas, and a check of values against them that knows nothing of grammars."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = "tide harbour boat net rope wind salt sand gull pier buoy sail".split()
PATTERNS = ("[a-c]{2,4}", "[0-9]{3}-[0-9]{2}", "(north|south)( east| west)?", 'x[^a-z"\\\\]y')


def random_schema(seed: int) -> Schema:
    """An object's schema whose values are short. The same seed gives the same one."""
    rng = random.Random(seed)
    defs: dict[str, Schema] = {}
    if rng.random() < 0.3:
        defs["Part"] = _leaf(rng)
    schema = _object(rng, 0, defs)
    return {**schema, "$defs": defs} if defs else schema


def _object(rng: random.Random, depth: int, defs: dict[str, Schema]) -> Schema:
    keys = rng.sample(WORDS, rng.randint(1, 4 - depth))
    if rng.random() < 0.15:
        keys[0] += rng.choice((" é", "-1", "_$", ' "q"'))
    properties = {key: _any(rng, depth + 1, defs) for key in keys}
    required = [key for key in keys if rng.random() < 0.7]
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def _any(rng: random.Random, depth: int, defs: dict[str, Schema]) -> Schema:
    if defs and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(sorted(defs))}"}
    if depth < 3 and rng.random() < 0.3:
        if rng.random() < 0.5:
            return _object(rng, depth, defs)
        least = rng.randint(0, 2)
        return {"type": "array", "items": _any(rng, depth + 1, defs), "minItems": least,
                "maxItems": least + rng.randint(0, 2)}  # fmt: skip
    if rng.random() < 0.12:
        return {"anyOf": [_leaf(rng), _leaf(rng)]}
    return _leaf(rng)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(_LEAVES)(rng)


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 5)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _integer(rng: random.Random) -> Schema:
    least = rng.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 2000)}


def _number(rng: random.Random) -> Schema:
    least = rng.randint(-50, 50)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + rng.randint(1, 30)}


_LEAVES: tuple[Callable[[random.Random], Schema], ...] = (
    _string,
    _string,
    _integer,
    _integer,
    _number,
    lambda rng: {"type": "boolean"},
    lambda rng: {"type": "null"},
    lambda rng: {"type": ["boolean", "null"]},
    lambda rng: {"const": rng.choice(["yes", 7, False, None, [1, "a"]])},
    lambda rng: {"enum": rng.sample(["red", 'a "b"', "ünï", 3, 2.5, True, None], 3)},
    lambda rng: {"type": "string", "enum": rng.sample(WORDS, 3)},
    lambda rng: {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"},
    lambda rng: {"type": "string", "format": "date"},
)

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,),
    "integer": (int,), "number": (int, float), "null": (type(None),),
}  # fmt: skip


def fits(value: Any, schema: Schema, root: Schema | None = None) -> bool:
    """Whether a value is what a schema (of the kinds made here) allows."""
    root = schema if root is None else root
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return any(fits(value, branch, root) for branch in schema["anyOf"])
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return False
    stated = schema.get("type", [])
    kinds = [stated] if isinstance(stated, str) else stated
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return False
    return _within(value, schema, root)


def _is_a(value: Any, kind: str) -> bool:
    is_flag = isinstance(value, bool)
    return isinstance(value, _TYPES[kind]) and (not is_flag or kind == "boolean")


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _within(value: Any, schema: Schema, root: Schema) -> bool:
    if isinstance(value, dict):
        its = schema.get("properties", {})
        extra = schema.get("additionalProperties", True)
        return (
            set(schema.get("required", ())) <= set(value)
            and (extra is not False or set(value) <= set(its))
            and all(fits(one, its[key], root) for key, one in value.items() if key in its)
        )
    if isinstance(value, list):
        size_fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30)
        return size_fits and all(fits(one, schema.get("items", {}), root) for one in value)
    if isinstance(value, str):
        size_fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
        is_date = schema.get("format") != "date" or re.fullmatch(r"\d{4}-\d\d-\d\d", value)
        return size_fits and bool(is_date) and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get(
            "maximum", value
        ) and value < schema.get("exclusiveMaximum", value + 1)
    return True


# -- schemas that make little sense ----------------------------------------------------------

_ODD_NUMBERS = (0, 1, -1, 3, 0.5, 1e-6, -2.25, 10**9, 2**53, -(2**53), 1_000_003)
_ODD_PATTERNS = ("^a+$", "(a|b)*c", "[0-9]{3}", "^$", "(a*)*b", "(?=a)", "(", r"\w+")
_ODD_REFERENCES = ("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "http://a.b/c")


def odd_schema(rng: random.Random, depth: int = 0) -> Any:
    """Known keywords with values of the right kinds, put together without sense."""
    if depth > 4:
        return {}
    deeper = depth + 1
    makers: dict[str, Callable[[], Any]] = {
        "type": lambda: rng.choice([*_TYPES, ["string", "null"], "intege"]),
        "properties": lambda: {key: odd_schema(rng, deeper) for key in rng.sample("abc", 2)},
        "$defs": lambda: {key: odd_schema(rng, deeper) for key in rng.sample("abc", 2)},
        "required": lambda: rng.sample("abc", 2),
        "items": lambda: odd_schema(rng, deeper),
        "additionalProperties": lambda: rng.choice([True, False, odd_schema(rng, deeper)]),
        "not": lambda: odd_schema(rng, deeper),
        "pattern": lambda: rng.choice(_ODD_PATTERNS),
        "format": lambda: rng.choice(["date", "uuid", "email", "uri", "ipv4", "nothing"]),
        "$ref": lambda: rng.choice(_ODD_REFERENCES),
        "enum": lambda: [rng.choice(_ODD_NUMBERS), "x", None, [odd_schema(rng, 9)]],
        "const": lambda: rng.choice([*_ODD_NUMBERS, {}, "é"]),
    }
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        makers[key] = lambda: [odd_schema(rng, deeper) for _ in range(rng.randint(0, 2))]
    for key in ("minItems", "maxItems", "minLength", "maxLength"):
        makers[key] = lambda: rng.choice([0, 1, 2, 5, 50, -1])
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        makers[key] = lambda: rng.choice(_ODD_NUMBERS)
    return {key: makers[key]() for key in rng.sample(sorted(makers), rng.randint(1, 4))}
