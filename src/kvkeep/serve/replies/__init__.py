"""From an engine's events to what clients are told."""
