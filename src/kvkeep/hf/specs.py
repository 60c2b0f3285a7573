"""Specs for a model; see `kvkeep.host.specs`."""

from kvkeep.host.specs import Specs, fitting_some, per_layer

__all__ = ["Specs", "fitting_some", "per_layer"]
