"""Replies: an engine's events as responses of OpenAI's API."""
