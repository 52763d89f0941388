"""The same ops as `kernels.reference`, in Triton: the engine's GPU path.

One module per concern; each holds kernels and the plain functions that launch them. Launchers
allocate nothing and never wait for the device, so that a CUDA graph can capture them. Called on the
engine thread.
"""
