"""Specs as text, both ways, and the nearest right one for a wrong one."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvkeep.codec import Int8, Plain
from kvkeep.errors import SpecError
from kvkeep.layer.layer import LayerCache
from kvkeep.policy import KeepAll, Window
from kvkeep.spec import CacheSpec, PerType, StorageSpec, as_spec, parse_specs, split_specs
from kvkeep.storage import Growing


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("keep_all", CacheSpec(KeepAll()), "keep_all+plain@growing"),
        (
            "window:1024,sinks=4",
            CacheSpec(Window(1024, 4)),
            "window:1024,sinks=4+plain@growing",
        ),
        (
            " window:size=7+plain/plain@fixed:9 ",
            CacheSpec(Window(7), Plain(), Plain(), StorageSpec("fixed", (("capacity", 9),))),
            "window:7+plain@fixed:9",
        ),
        (
            "keep_all@growing:1.5",
            CacheSpec(KeepAll(), storage=StorageSpec("growing", (("factor", 1.5),))),
            "keep_all+plain@growing:1.5",
        ),
        (
            "keep_all@concat",
            CacheSpec(KeepAll(), storage=StorageSpec("concat")),
            "keep_all+plain@concat",
        ),
    ],
)
def test_literal(text, spec, canonical):
    assert CacheSpec.parse(text) == spec
    assert str(spec) == canonical


policies = st.one_of(
    st.just(KeepAll()), st.builds(Window, st.integers(1, 10**6), st.integers(0, 100))
)
storages = st.one_of(
    st.sampled_from([StorageSpec("growing"), StorageSpec("concat"), StorageSpec("fixed")]),
    st.builds(lambda n: StorageSpec("fixed", (("capacity", n),)), st.integers(1, 10**6)),
    st.builds(
        lambda f: StorageSpec("growing", (("factor", f),)),
        st.floats(1.0, 16.0, exclude_min=True, allow_nan=False),
    ),
)


@given(policies, storages)
def test_parse_and_print_are_inverse(policy, storage):
    spec = CacheSpec(policy, storage=storage)
    assert CacheSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keepall", "did you mean 'keep_all'"),
        ("windw:3", "did you mean 'window'"),
        ("", "there is keep_all, window"),
        ("@fixed", "there is keep_all, window"),
        ("zzz:64", "no policy 'zzz'.*there is"),
        ("h2o:8,recent=9", "keeps 8 tokens, but protects 9"),
        ("h2o:8,normalize=2", "give 0 or 1"),
        ("knorm:8,sinks=-1", "at least 0"),
        ("knorm:8,keep_from=2,keep_to=11", "protects 9"),
        ("snapkv:8,pool=4", "odd"),
        ("qh2o:8,mix=2", "give 0 "),
        ("keep_all+int8:7", "multiple of 8"),
        ("keep_all:3", "takes no options"),
        ("window", "lacks 'size'; write window:1024"),
        ("window:x", "'x'.*whole number"),
        ("window:1.5", "'1.5'.*whole number"),
        ("window:0", "at least 1"),
        ("window:4,sink=2", "did you mean 'sinks'"),
        ("window:4,5", "write key=value"),
        ("keep_all+plian", "no codec 'plian'.*did you mean 'plain'"),
        ("keep_all+", "no codec ''"),
        ("keep_all@fxed", "did you mean 'fixed'"),
        ("keep_all@", "no storage ''"),
        ("keep_all@fixed:0", "at least 1"),
        ("keep_all@growing:1", "above 1"),
        ("keep_all@growing:inf", "at most 16"),
        ("keep_all@fixed:99999999999", "below 2"),
        ("window:8,sinks=3000000000", "below 2"),
        ("window:4,size=9", "'size' twice"),
        ("keep_all+plain/plain/plain", "3 codecs"),
        ("keep_all+int7", "no codec 'int7' .*; there is int8, int6, int5, int4, int3, int2$"),
        ("keep_all+int4,affine=1", "commas between options; write int4:affine=1$"),
        ("keep_all+int8/int4,64,affine=1", "write int4:64,affine=1$"),
        ("keep_all+int4:32:affine=1", "write int4:32,affine=1$"),
        ("h2o,1024,recent=9+int8", "write h2o:1024,recent=9$"),
        ("streaming,64", "write streaming:64$"),
        ("keep_all@fixed,64", "write fixed:64$"),
        ("keep_all,sinks=4", "takes no options.*write keep_all$"),
        ("adakv,x=1(h2o:64)", "write adakv:x=1$"),
        ("int8", r"int8 is a codec: write keep_all\+int8$"),
        ("kivi:2", r"kivi is a codec: write keep_all\+kivi:2$"),
        ("int8/int4", r"write keep_all\+int8/int4$"),
        ("fixed:64", "fixed is a storage: write keep_all@fixed:64$"),
        ("h2o:8+host", "host is a storage: write h2o:8@host$"),
        ("h2o:8@int8", r"int8 is a codec: write h2o:8\+int8$"),
        ("keep_all+h2o:8", "h2o is a policy: write h2o:8$"),
        ("streming:8", "did you mean 'streaming'"),
        ("zzz:64", "there is keep_all, window.*streaming"),
        ("streaming", "policy streaming in 'streaming' lacks 'size'; write streaming:1024$"),
        ("h2o:0", "^h2o of 0 tokens, 0 recent, 0 sinks and positions 0 to 0: tokens must be"),
        ("adakv(knorm:9,sinks=-1)", "^knorm of 9 tokens, 5 recent, -1 sinks and positions 0 to 0"),
    ],
)
def test_wrong(text, message):
    with pytest.raises(SpecError, match=message):
        CacheSpec.parse(text)


def test_streaming_is_a_window_with_four_sinks():
    assert CacheSpec.parse("streaming:64") == CacheSpec.parse("window:64,sinks=4")
    assert CacheSpec.parse("window:64,sinks=4").policy.budget == 68
    assert CacheSpec.parse("h2o:64,sinks=4").policy.budget == 64


def test_fixed_takes_its_capacity_from_the_budget_or_the_caller():
    assert CacheSpec.parse("window:8,sinks=2@fixed").layer(capacity=99).storage.limit == 10
    assert CacheSpec.parse("keep_all@fixed").layer(capacity=99).storage.limit == 99
    assert CacheSpec.parse("keep_all@fixed:7").layer(capacity=99).storage.limit == 7
    assert CacheSpec.parse("keep_all@fixed").layer(window=5, capacity=99).storage.limit == 5


def test_spaces_after_commas():
    assert CacheSpec.parse("window:10, sinks=2") == CacheSpec.parse("window:10,sinks=2")


def test_what_is_no_spec():
    with pytest.raises(SpecError, match="spec 5"):
        as_spec(5)


MIXED = "full_attention=keep_all+kivi;sliding_attention=window:512+int8"


def test_a_spec_for_each_type_of_layer():
    found = parse_specs(f" {MIXED}; ")
    assert found == {
        "full_attention": CacheSpec.parse("keep_all+kivi"),
        "sliding_attention": CacheSpec.parse("window:512+int8"),
    }
    other = "sliding_attention = window:512+int8 ; full_attention=keep_all+kivi@growing"
    assert parse_specs(other) == parse_specs(str(found)) == found
    assert str(parse_specs(other)) == str(found)
    assert hash(parse_specs(other)) == hash(found)
    assert parse_specs("window:4,sinks=2") == CacheSpec.parse("window:4,sinks=2")
    assert isinstance(parse_specs("sliding_attention=window:size=4"), PerType)


def test_specs_of_any_length_are_split_or_refused():
    many = ";".join(f"k{index}=h2o:8" for index in range(4000))
    assert split_specs(many) == [many]
    with pytest.raises(SpecError, match="give at most"):
        split_specs(many + many)


def test_lists_of_specs():
    assert split_specs("keep_all;;window:4,sinks=2 ; h2o:8") == [
        *("keep_all", "window:4,sinks=2", "h2o:8")
    ]
    lists = [f"keep_all;{MIXED}", f"{MIXED};keep_all", f"{MIXED};{MIXED}"]
    assert [split_specs(text) for text in lists] == [
        *(["keep_all", MIXED], [MIXED, "keep_all"], [MIXED, MIXED])
    ]
    assert split_specs(" ; ") == []


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("keep_all;window:4", "2 specs in .*one for each type of layer"),
        ("keep_all;full_attention=keep_all", "2 specs"),
        ("full_attention=keep_all;full_attention=window:4", "each type once"),
        ("full_attention=h20:4", "did you mean 'h2o'"),
        ("full_attention=", "no policy ''"),
        ("", "no policy ''"),
        (";", "no policy ''"),
    ],
)
def test_specs_that_are_none(text, match):
    with pytest.raises(SpecError, match=match):
        parse_specs(text)


def test_codecs_given_as_objects_serve_keys_and_values_apart():
    layer = LayerCache(KeepAll(), Int8(), Int8(), Growing())
    assert layer.value_codec == Int8(hadamard=False)
    spec = CacheSpec(KeepAll(), Int8(), Int8())
    assert CacheSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "random:8,seed=99999999999",
        "knorm:8,keep_from=1,keep_to=4294967296",
        "window:8,keep_to=4294967296",
    ],
)
def test_numbers_that_do_not_fit(text):
    with pytest.raises(SpecError):
        CacheSpec.parse(text)
