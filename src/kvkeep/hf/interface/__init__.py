"""The members of a cache that transformers and its users expect, under transformers' names."""
