"""Triton kernels compiled ahead of time: registers, spills, shared memory."""
