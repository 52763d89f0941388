"""Whether this process runs kernels on a GPU or in Triton's interpreter.

Inline PTX exists only on a GPU. An op that uses it has a second branch in plain Triton, chosen by a
constexpr `PTX`; GPU tests compare both bit for bit. Set once at import, never changed.
"""

from __future__ import annotations

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run as numpy on the CPU (TRITON_INTERPRET=1), tensors are CPU tensors."""

PTX: bool = not INTERPRETED
"""Use inline PTX where a kernel has it."""
