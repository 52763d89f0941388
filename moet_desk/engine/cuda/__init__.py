"""The engine on a CUDA device: pinned arena, slot pools in VRAM, one captured graph per decode
step.

Imported only when a device is there. The parts a request meets (`Decoder`, `Prefiller`, residency,
KV pages) have the shape of their CPU twins, so `serving` does not know which it drives.
"""
