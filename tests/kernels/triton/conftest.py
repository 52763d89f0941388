"""Kernels of this folder are interpreted: no GPU is needed.

Triton decides that once, when a kernel's module is imported, so the switch is set here, before.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.kernels.triton.interpreter import quicken

quicken()
