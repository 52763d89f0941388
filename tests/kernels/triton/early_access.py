"""Which memory a compiled kernel touches before it waits for the kernel before it.

Reads PTX, where the way from an argument to an address can still be followed, and counts in SASS,
which the assembler has reordered.
"""

from __future__ import annotations

import re

from moet_desk.kernels.triton.compile import CompiledInfo

_WAIT = "griddepcontrol.wait"
_PARAMETER = re.compile(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]")
_REGISTER = re.compile(r"%\w+")
_ADDRESS = re.compile(r"\[([^\]]*)\]")
_ACCESS = re.compile(r"\b(?:ld|st|atom|red|prefetch)\.(?:\w+\.|\w+::)*global|\bcp\.")
_BRANCH = re.compile(r"\b(?:bra|ret|exit)\b")
_GUARD = re.compile(r"@!?%\w+\s*$")
_SASS_ACCESS = re.compile(r"\b(?:LDG|STG|LDGSTS|ATOMG|REDG?|UBLKCP)\b(?!\S*CONSTANT)")


def early_arguments(ptx: str, arguments: list[str]) -> list[str]:
    """Arguments whose memory is read or written before the wait, in order of access.

    Args:
        ptx: of one kernel.
        arguments: its run-time arguments in order.

    Raises:
        ValueError: there is no wait, more than one, or one that not every thread comes to.
    """
    body = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
    before, *rest = body.split(_WAIT)
    if len(rest) != 1:
        raise ValueError(f"{len(rest)} waits")
    before = before[before.index("{") + 1 :]
    if _BRANCH.search(before) or _GUARD.search(before):
        raise ValueError("a branch around the wait")
    sources: dict[str, set[int]] = {}
    found: list[str] = []
    for statement in before.split(";"):
        parameter = _PARAMETER.search(statement)
        if parameter is not None:
            sources[parameter[1]] = {int(parameter[2])}
            continue
        registers = _REGISTER.findall(statement)
        reached = set[int]().union(*(sources.get(register, set()) for register in registers))
        if _ACCESS.search(statement):
            address = _ADDRESS.search(statement)
            used = _REGISTER.findall(address[1]) if address else []
            of = set[int]().union(*(sources.get(register, set()) for register in used))
            found += [arguments[i] for i in sorted(of)] or ["?"]
        for register in registers[:1]:
            sources[register] = reached
    return found


def early_complaints(
    info: CompiledInfo, arguments: list[str], allowed: tuple[str, ...]
) -> list[str]:
    """What a kernel that is launched early does before its wait and should not."""
    try:
        early = early_arguments(info.ptx, arguments)
    except ValueError as error:
        return [str(error)]
    found = [f"{name} before the wait" for name in early if name not in allowed]
    before = info.sass.split("ACQBULK")[0]
    # The assembler may only have brought forward what says that it never changes.
    moved = len(_SASS_ACCESS.findall(before)) - len(early)
    return found + ([f"{moved} accesses moved before the wait"] if moved > 0 else [])
