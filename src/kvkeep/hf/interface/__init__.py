"""What transformers and its users ask of a cache, under transformers' names."""
