"""What differs between a GPU and Triton's interpreter, and between cards.

Inline PTX exists only on a GPU. An op that uses it has a second branch in plain Triton, chosen by a
constexpr `PTX`; GPU tests compare both bit for bit. Set once at import, never changed.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run as numpy on the CPU (TRITON_INTERPRET=1), tensors are CPU tensors."""

PTX: bool = not INTERPRETED
"""Use inline PTX where a kernel has it."""


@triton.jit
def product(a, b, PTX: tl.constexpr):
    """a * b, rounded before anything is added to it.

    `enable_fp_fusion=False` is not enough: for SM100 and later LLVM pairs floats (mul.rn.f32x2),
    and ptxas 12.9 fuses such a pair with a following add in spite of .rn and --fmad=false. It
    leaves a product alone that comes from one float (seen in the SASS for sm_120a).
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b
