"""Steps inside graphs: compiled ones, CUDA graphs, and exported programs."""
