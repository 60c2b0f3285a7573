"""Policies that installed packages declare as entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from kvkeep.errors import SpecError, reason_of
from kvkeep.policy import POLICIES, Policy

GROUP = "kvkeep.policies"
"""The group of the entry points. Each maps the name of a policy in a spec to its class."""


def installed() -> dict[str, EntryPoint]:
    """The entry points of policies by name, without importing them. Entry points cannot take
    kvkeep's own names."""
    return {one.name: one for one in entry_points(group=GROUP) if one.name not in POLICIES}


def load(name: str) -> None:
    """Import the policy of an entry point, and add it to `POLICIES`.

    Raises:
        SpecError: the entry point cannot be imported, or is not a policy of that name.
    """
    entry = installed()[name]
    where = f"policy {name!r}, which an installed package declares as {entry.value}"
    try:
        found = entry.load()
    except Exception as error:  # importing a package may raise any exception
        raise SpecError(
            f"{where}, cannot be imported: {type(error).__name__}: {reason_of(error)}; repair the "
            "package, or uninstall it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy) and found.name == name):
        raise SpecError(
            f"{where}, is not a Policy class whose name is {name!r}; correct the entry point"
        )
    POLICIES[name] = found
