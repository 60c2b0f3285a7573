"""The loss of quality by a cache spec, against the full cache, on a real model and real text."""
