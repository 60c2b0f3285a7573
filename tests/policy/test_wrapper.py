"""A wrapper that overrides nothing is the policy inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kvkeep.policy import AdaKV, Need, Policy, Wrapper
from kvkeep.policy.base import rule_of
from kvkeep.renamed import Renamed
from kvkeep.spec import CacheSpec, StorageSpec
from kvkeep.testing import EXAMPLES, live_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Same(Wrapper):
    name: ClassVar[str] = "same"


OWN = {"name", "wraps", "evicts"}
"""Members that are not the inner policy's, or follow from others that are."""

MEMBERS = [
    name
    for name, member in vars(Policy).items()
    if not (name.startswith("_") or name in OWN or isinstance(member, Renamed))
]


def inner(text):
    return CacheSpec.parse(text).policy.in_layer(0, 1)


@pytest.mark.parametrize("text", EXAMPLES.values())
def test_every_member_is_the_inner_policys(text):
    policy = inner(text)
    for name in MEMBERS:
        own, its = (getattr(one, name) for one in (Same(policy), policy))
        assert callable(its) or own == its, name
    assert Same(policy).evicts == policy.evicts
    assert rule_of(Same(policy)) == rule_of(policy)
    assert Same(policy).at(9) == Same(policy.at(9))


@pytest.mark.parametrize("text", EXAMPLES.values())
def test_it_keeps_the_same(text):
    policy = inner(text)
    layers = [CacheSpec(one, storage=StorageSpec()).layer() for one in (policy, Same(policy))]
    torch.manual_seed(0)
    for n in (11, 1, 1, 4):
        tokens = torch.randn(3, 1, 2, n, 8)
        outs = [layer.step(*tokens, scale=0.4) for layer in layers]
        assert outs[0].equal(outs[1])
        held = [[sorted(head[0]) for head in live_tokens(layer)[0]] for layer in layers]
        assert held[0] == held[1]


def test_methods_give_a_wrapper_of_the_changed_policy():
    policy = Same(CacheSpec.parse("h2o:25%").policy)
    assert policy.at(400).inner.tokens == policy.inner.at(400).budget
    assert policy.with_budget(9) == Same(policy.inner.with_budget(9))
    assert policy.keeping(3) == Same(policy.inner.keeping(3))
    assert Same(CacheSpec.parse("h2o:8").policy).within(99).inner.tokens == 8


def test_class_variables_are_the_inner_policys():
    assert AdaKV(CacheSpec.parse("vlen:8").policy).needs == {Need.MASS}
    assert AdaKV(CacheSpec.parse("knorm:8").policy).rollback


def test_a_wrapper_that_overrides_a_ruled_method_has_no_rule():
    class Other(Same):
        def observe(self, planes, seen):
            pass

    assert rule_of(Other(CacheSpec.parse("h2o:8").policy)) is None
