"""Fixtures: places for blocks, of which a server is started once for each module."""

from __future__ import annotations

import pytest
from support.store_places import BACKENDS, KINDS, WITH_BUDGETS, Place


@pytest.fixture(scope="module")
def _places(tmp_path_factory):
    """Each kind of place, made when it is first needed."""
    made = {}

    def place(kind):
        if kind not in made:
            made[kind] = Place(kind, tmp_path_factory.mktemp(kind))
        made[kind].clear()
        return made[kind]

    yield place
    for each in made.values():
        each.close()


@pytest.fixture
def place_of(_places):
    """A function that gives an empty place of a kind."""
    return _places


@pytest.fixture(params=KINDS)
def place(request, _places):
    """An empty place."""
    return _places(request.param)


@pytest.fixture(params=WITH_BUDGETS)
def place_with_budget(request, _places):
    """An empty place that limits its bytes by itself."""
    return _places(request.param)


@pytest.fixture(params=[*BACKENDS, *KINDS])
def backend(request, _places, tmp_path):
    """An empty backend."""
    if request.param in BACKENDS:
        return BACKENDS[request.param](tmp_path)
    return _places(request.param).open()
