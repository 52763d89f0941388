"""Triton's interpreter without work whose results it throws away: half of what a kernel costs here.

Both are about how the interpreter is called, not about what a kernel computes.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


class _Patched:
    """Which of Triton's modules the launch that runs now has patched already."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._known: dict[Any, frozenset[str]] = {}

    def patch(self, kernel: Any) -> Any:
        """As `_patch_lang`, which patches everything again for each call of a device function."""
        wanted = self._used_by(kernel)
        if wanted <= self._modules:
            return interpreter._LangPatchScope()
        is_launch = not self._modules
        scope = _patch_lang(kernel)
        self._modules |= wanted
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                self._modules.clear()
                restore()

            scope.restore = restore_all
        return scope

    def _used_by(self, kernel: Any) -> frozenset[str]:
        if kernel not in self._known:
            modules = [value for value in kernel.__globals__.values() if inspect.ismodule(value)]
            self._known[kernel] = frozenset(m.__name__ for m in modules if m in (tl, tl.core))
        return self._known[kernel]


def quicken() -> None:
    """Call once, before kernels run. Does nothing to kernels that are compiled."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # so an overflow of whole numbers is worked out, and not said
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Patched().patch
