"""Decode steps (one token a row) as calls of the native library."""
