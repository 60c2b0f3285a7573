"""Decode steps of attached models as programs: compiled, or captured in CUDA graphs."""
