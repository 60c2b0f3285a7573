"""Triton kernels for CUDA. With TRITON_INTERPRET=1 Triton's interpreter runs them on the CPU.

These modules are imported only when a kernel is needed, so that kvkeep works without Triton.
"""
