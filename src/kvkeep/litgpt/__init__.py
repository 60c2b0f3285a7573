"""The host for LitGPT's models."""
