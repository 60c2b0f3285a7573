"""Policies that installed packages declare as entry points."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from kvkeep.errors import SpecError
from kvkeep.policy import POLICIES
from kvkeep.spec import CacheSpec

SOURCE = """
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import ClassVar
    from kvkeep.policy import Scored

    @dataclass(frozen=True)
    class Oldest(Scored):
        name: ClassVar[str] = "oldest"
        weight: float = 1.0

        def score(self, planes, seen):
            return -self.weight * planes["score"]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with a module and entry points of kvkeep's group."""

    def install(source, **entries):
        (tmp_path / "my_policies.py").write_text(textwrap.dedent(source))
        info = tmp_path / "my_policies-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvkeep.policies]", *lines]))
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    before = dict(POLICIES)
    yield install
    POLICIES.clear()
    POLICIES.update(before)
    sys.modules.pop("my_policies", None)


def test_a_spec_names_the_policy_of_an_installed_package(package):
    package(SOURCE, oldest="my_policies:Oldest")
    spec = CacheSpec.parse("adakv(oldest:8,weight=2)+int8")
    assert spec.policy.inner.weight == 2
    assert CacheSpec.parse(str(spec)) == spec


def test_only_a_spec_that_names_it_imports_it(package):
    package("raise RuntimeError('imported')", oldest="my_policies:Oldest")
    CacheSpec.parse("h2o:8")
    with pytest.raises(SpecError, match="did you mean 'oldest'"):
        CacheSpec.parse("oldst:8")
    assert "oldest" not in POLICIES


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        ("raise RuntimeError('broken')", "my_policies:Oldest", "RuntimeError: broken; repair"),
        ("", "my_policies:Oldest", "AttributeError.*repair the package, or uninstall it"),
        ("class Oldest: name = 'oldest'", "my_policies:Oldest", "is not a Policy class whose name"),
        (SOURCE.replace('"oldest"', '"older"'), "my_policies:Oldest", "whose name is 'oldest'"),
    ],
)
def test_entry_points_that_are_wrong(package, source, value, message):
    package(source, oldest=value)
    with pytest.raises(SpecError, match=message):
        CacheSpec.parse("oldest:8")
    assert "oldest" not in POLICIES


def test_kvkeeps_own_names_cannot_be_taken(package):
    package(SOURCE.replace('"oldest"', '"h2o"'), h2o="my_policies:Oldest")
    assert type(CacheSpec.parse("h2o:8").policy).__module__ == "kvkeep.policy.h2o"
