"""An OpenAI-compatible server for one model, which reuses the caches of shared prompt prefixes."""
