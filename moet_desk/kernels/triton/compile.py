"""Compile a kernel for a GPU that need not be there, and read what it costs from the machine code.

Owns the measuring, not the limits (those are in the tests). Needs no GPU and no driver, but a
process in which kernels are not interpreted (no `TRITON_INTERPRET`). Called by tests and bench.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_REGISTERS = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)
_FUSED_ADDEND = re.compile(r"\bFFMA\S* (?:[^,;]+, ){3}-?(?!RZ)\w")


@dataclass(frozen=True)
class CompiledInfo:
    """What one compiled kernel takes.

    Attributes:
        registers: per thread.
        stack_bytes: per thread, in local memory; 0 means no register was spilled.
        shared_bytes: per program, static and dynamic.
        cubin: the machine code.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    cubin: bytes

    @functools.cached_property
    def sass(self) -> str:
        """The disassembly. Made when it is asked for: it takes as long as compiling.

        Raises:
            subprocess.CalledProcessError: the disassembler failed.
        """
        return _tool("nvdisasm", self.cubin, "-c", "-ndf")  # names of jumps' targets are not read

    @functools.cached_property
    def instructions(self) -> Mapping[str, int]:
        """How often each SASS opcode (with modifiers) stands in the code."""
        return Counter(_INSTRUCTION.findall(self.sass))

    @property
    def fused_adds(self) -> int:
        """Multiplications that are added to something without rounding in between."""
        return sum(_FUSED_ADDEND.search(line) is not None for line in self.sass.splitlines())

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with `prefix`, such as "IDP.4A" or "LDG.E.128"."""
        return sum(n for opcode, n in self.instructions.items() if opcode.startswith(prefix))


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    *,
    constexprs: Mapping[str, Any],
    capability: int,
    num_warps: int = 4,
    **options: Any,
) -> CompiledInfo:
    """Compile `kernel` for compute capability `capability` (90, 120).

    Args:
        kernel: a `@triton.jit` function.
        signature: type of each run-time argument: "*fp32", "*u8", "i32", ...; pointers count as
            aligned to 16 bytes, as tensors are.
        constexprs: value of each `tl.constexpr` argument.
        capability: 10 * major + minor.
        num_warps: warps per program.
        options: further launch options (`num_stages`, `enable_fp_fusion`, `maxnreg`, ...).

    Raises:
        TypeError: the kernel is interpreted in this process.
        subprocess.CalledProcessError: `cuobjdump` failed.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError("kernels are interpreted in this process; unset TRITON_INTERPRET")
    names = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned: dict[tuple[int, ...], list[list[str | int]]] = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"
    }
    source = ASTSource(kernel, types, dict(constexprs), aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, **options},
    )
    return read_cubin(compiled.asm["cubin"], shared_bytes=int(compiled.metadata.shared))


def read_cubin(cubin: bytes, *, shared_bytes: int) -> CompiledInfo:
    """What machine code takes; `shared_bytes` are those that a launch asks for.

    Raises:
        subprocess.CalledProcessError: `cuobjdump` failed.
    """
    usage = _tool("cuobjdump", cubin, "-res-usage")
    found = _REGISTERS.search(usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage[:200]}")
    registers, stack, static_shared, local = (int(x) for x in found.groups())
    return CompiledInfo(registers, stack + local, max(shared_bytes, static_shared), cubin)


def _tool(name: str, cubin: bytes, *options: str) -> str:
    """What one of Triton's own tools prints of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
