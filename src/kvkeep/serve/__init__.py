"""An OpenAI-compatible server for one model, which computes no beginning of a prompt twice."""
