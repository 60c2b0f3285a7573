"""Benchmarks: each `run` measures two or more systems side by side and returns plain rows."""
