"""Decode steps, of one token a row, as calls of the native library."""
