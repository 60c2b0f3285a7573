"""Metrics of a server in Prometheus' format. They do not identify clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import prometheus_client as prometheus
from prometheus_client import Counter, Gauge, Histogram

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

OUTCOMES = ("answered", "refused", "unavailable", "left", "failed")
"""Outcomes of requests. refused: the request is at fault; unavailable: other requests or the
shutdown prevent an answer; left: the client disconnected."""


@final
class Metrics:
    """The metrics of one engine, in a registry of their own.

    Attributes:
        first_token: seconds from the tokenisation of a request to its first token.
        between_tokens: seconds between two tokens of an answer.
    """

    def __init__(self) -> None:
        self._registry = prometheus.CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._requests = counter("kvkeep_requests", "Requests that ended, by outcome.", ["outcome"])
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self.prompt_tokens = counter("kvkeep_prompt_tokens", "Prompt tokens of started requests.")
        found = "Prompt tokens that were found in the store instead of computed."
        self.found_tokens = counter("kvkeep_prompt_tokens_found", found)
        self.generated_tokens = counter("kvkeep_generated_tokens", "Tokens of answers.")
        first = "From a request's tokenisation to the first token of its answers."
        self.first_token = seconds("kvkeep_time_to_first_token_seconds", first)
        between = "Between two tokens of an answer."
        self.between_tokens = seconds("kvkeep_time_between_tokens_seconds", between)
        held = "Bytes of the slots that answers use."
        self.cache_bytes = Gauge("kvkeep_cache_bytes", held, registry=self._registry)

    @property
    def generated(self) -> int:
        """Generated tokens of all answers."""
        return int(self._registry.get_sample_value("kvkeep_generated_tokens_total") or 0)

    def watch(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Add a gauge that calls `value` when it is read."""
        Gauge(name, meaning, registry=self._registry).set_function(value)

    def ended(self, outcome: str) -> None:
        """Count a request that ended with one of `OUTCOMES`."""
        self._requests.labels(outcome).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)
