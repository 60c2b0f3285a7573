"""Registered parts: their classes, documents, and the errors of names that changed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvkeep import codec, policy, storage
from kvkeep.policy import ALIASES
from kvkeep.storage import Growing

ROOT = Path(__file__).parent.parent
TABLES = [(policy, "POLICIES"), (codec, "CODECS"), (storage, "STORAGES")]


@pytest.mark.parametrize(("package", "table"), TABLES)
def test_each_part_is_exported(package, table):
    found = getattr(package, table)
    for name, part in package.PARTS.items():
        kind = getattr(package, part.kind)
        assert found[name] is kind
        assert (kind.name, kind.__name__) == (name, part.kind)
        assert part.kind in package.__all__
    assert {table, *package.__all__} <= set(dir(package))
    assert getattr(package, table) is found  # so that new parts stay registered
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


@pytest.mark.parametrize("package", [policy, codec, storage])
def test_names_are_known_without_torch(package):
    code = f"import sys, {package.__name__} as p; print(len(p.PARTS), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(len(package.PARTS)), "False"]


def test_the_tables_of_the_documents_have_a_row_for_each():
    text = (ROOT / "docs" / "policies.md").read_text()
    policies, codecs = (
        {re.split(r"[:(]", name)[0] for name in re.findall(r"^\| `([^`]+)`", part, re.MULTILINE)}
        for part in text.split("| codec | a token of width 64 takes | how |", 1)
    )
    assert {*policy.PARTS, *ALIASES} - {"keep_all"} <= policies
    assert set(codec.PARTS) <= codecs


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kvkeep.codec.whole", "kvkeep.codec.encoded_count"),
        ("kvkeep.codec.left_plain", "kvkeep.codec.plain_count"),
        ("kvkeep.codec.caution", "kvkeep.codec.warn_about_keys"),
        ("kvkeep.host.drawn", "kvkeep.generate.sample"),
        ("kvkeep.host.Generation", "kvkeep.generate.Answer"),
    ],
)
def test_former_names(old, new):
    package, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=re.escape(f"{old} is now {new}")):
        exec(f"from {package} import {name}")
    home, _, found = new.rpartition(".")
    assert hasattr(import_module(home), found)


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (codec.Codec, "caution", "key_warning"),
        (policy.Policy, "budget_at", "at"),
        (policy.Policy, "protected", "protection"),
        (policy.Policy, "room", "most_slots"),
        (policy.Scored, "worth", "score"),
        (storage.Storage, "keep", "write_plane"),
        (storage.Storage, "left", "remaining"),
        (storage.Storage, "another", "empty_copy"),
        (storage.Storage, "behind", "empty_copy"),
        (storage.Storage, "limited", "limit"),
    ],
)
def test_members_that_have_other_names(base, old, new):
    assert hasattr(base, new)
    with pytest.raises(AttributeError, match=f"{base.__name__}.{old} is now {new}"):
        getattr(base, old)
    with pytest.raises(TypeError, match=f"class Mine: {old} is now {new}; rename it"):
        type("Mine", (base,), {old: lambda self: None})


def test_an_object_names_them_too():
    with pytest.raises(AttributeError, match=r"Growing\.another is now empty_copy"):
        Growing().another()
