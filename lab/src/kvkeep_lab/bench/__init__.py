"""Benchmarks: each `run` measures two or more systems on the same task and returns plain rows."""
