"""Triton kernels, for CUDA; Triton's interpreter runs them on the CPU (TRITON_INTERPRET=1).

Nothing here is imported before a kernel is needed, so that Triton may be missing.
"""
