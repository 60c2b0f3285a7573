"""Steps inside graphs: compiled graphs, CUDA graphs, and exported programs."""
