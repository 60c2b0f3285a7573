"""check_policy lets a right policy pass, and says what is wrong with another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kvkeep.codec import base
from kvkeep.errors import PrecisionWarning, SpecError
from kvkeep.policy import POLICIES, Scored
from kvkeep.spec import CacheSpec
from kvkeep.testing import check_policy


@dataclass(frozen=True)
class Mine(Scored):
    """Keeps values of large norm."""

    name: ClassVar[str] = "mine"

    def enter(self, tokens):
        return {"score": tokens.values.float().norm(dim=-1)}

    def score(self, planes, seen):
        return planes["score"]


class ByPlace(Mine):
    """Scores a slot by where it lies, which says nothing of the token."""

    def score(self, planes, seen):
        return torch.arange(planes["score"].shape[2]).expand_as(planes["score"]).float() % 3


class TooFew(Mine):
    """Evicts fewer slots than it must."""

    def victims(self, count, planes, seen):
        return super().victims(max(1, count - 1), planes, seen)


class Meddling(Mine):
    """Changes a plane that is not its own."""

    def observe(self, planes, seen):
        planes["k"].mul_(2)


@pytest.mark.parametrize(
    "spec",
    [
        "mine:8,recent=2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("adakv(mine:8)", "pyramid(mine:8)")),
    ],
)
def test_a_right_policy_passes(monkeypatch, spec):
    monkeypatch.setitem(POLICIES, "mine", Mine)
    base._warn_once.cache_clear()
    with warnings.catch_warnings():  # none of codecs that nobody chose
        warnings.simplefilter("error")
        check_policy(spec)
    with pytest.warns(PrecisionWarning):  # it was not used up
        CacheSpec.parse("mine:8+int4:centre=0").layer()


@pytest.mark.parametrize("wrong", [ByPlace, TooFew, Meddling])
def test_a_wrong_policy_does_not(monkeypatch, wrong):
    monkeypatch.setitem(POLICIES, "mine", wrong)
    with pytest.raises(AssertionError):
        check_policy("mine:8,recent=2")


def test_no_policy():
    with pytest.raises(SpecError, match="did you mean"):
        check_policy("knrom:8")
