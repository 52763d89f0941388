"""Text in bodies that may come in blocks or parts, as two protocols have it.

Pure; runs in the endpoint's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moet_desk.api.schemas import refuse


def texts_of(content: object, where: str, *, kinds: Collection[str], word: str) -> list[str]:
    """A text, or the texts of blocks.

    Args:
        content: as it came.
        where: its place in the body, for messages.
        kinds: types of blocks that are text.
        word: what the protocol calls them.

    Raises:
        MoetError: MD-API-04 it is something else.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise refuse(where, f"it must be text or a list of {word}")
    texts = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise refuse(f"{where}[{i}]", f"only text is read, not {kind} {word}")
        texts.append(string_of(block, "text", f"{where}[{i}]"))
    return texts


def string_of(block: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be text.

    Raises:
        MoetError: MD-API-04 it is not.
    """
    value = block.get(name)
    if not isinstance(value, str):
        raise refuse(f"{where}.{name}", "it must be text")
    return value
