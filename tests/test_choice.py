"""Which calls torch computes instead of the native library: tables, their file, their effect."""

from __future__ import annotations

import json
import random
import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from typer.testing import CliRunner

from kvkeep import choice, linears, native_library
from kvkeep.attention import Segment, View, attend, native, plain
from kvkeep.choice import torch_is_faster
from kvkeep.cli import measure
from kvkeep.cli.app import app
from kvkeep.codec import Plain
from kvkeep.planes import POSITION

FLOATS = torch.float32


@pytest.fixture(autouse=True)
def path(home, monkeypatch):
    monkeypatch.setattr(choice, "measured_file", lambda: home / "measured.json")
    choice.forget()
    yield home / "measured.json"
    choice.forget()


def plant(path, table, machine=None):
    name = machine or choice.machine(native_library.instructions())
    path.write_text(json.dumps({name: table}))
    choice.forget()


def boxed(*boxes, operation="attention"):
    return {operation: {"float32": boxes}}


def test_every_instruction_set_has_a_table_for_every_operation():
    for instructions in (*native_library.INSTRUCTION_SETS, ""):
        assert set(choice.defaults(instructions)) == set(choice.SIZES)


def test_the_kernel_computes_many_rows_where_torch_has_no_fast_product(monkeypatch):
    monkeypatch.setattr(choice, "is_slow", lambda dtype: dtype == torch.bfloat16)
    for instructions in native_library.INSTRUCTION_SETS:
        linears = choice.defaults(instructions)["linears"]
        assert len(linears["float32"]) == 3
        assert len(linears["bfloat16"]) == (3 if instructions == "portable" else 2)


def test_sizes_are_compared_with_both_ends(path):
    plant(path, boxed([[2, 16], [0, 256], [4, None], [0, None]]))
    for size, expected in (
        ((2, 256, 4, 64), True),
        ((16, 1, 99, 512), True),
        ((1, 256, 4, 64), False),
        ((17, 256, 4, 64), False),
        ((2, 257, 4, 64), False),
        ((2, 256, 3, 64), False),
    ):
        assert torch_is_faster("attention", FLOATS, *size) == expected
    assert not torch_is_faster("attention", torch.bfloat16, 2, 256, 4, 64)
    assert torch_is_faster("linears", FLOATS, 64, 1 << 20)  # what was not measured: by default
    assert [choice.rounded(x) for x in (1, 2, 3, 4, 5, 33)] == [1, 2, 4, 4, 8, 64]


def test_a_table_of_another_machine_is_not_used(path):
    plant(path, boxed([[0, None]] * 4), machine="another processor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch_is_faster("attention", FLOATS, 1, 256, 1, 64)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"HERE": []}',
        '{"HERE": {"convolution": {"float32": [[[0, 1]]]}}}',
        '{"HERE": {"attention": {"float32": [[[0, 1]]]}}}',
        '{"HERE": {"attention": {"float32": [[[0, 1], [0, 1], [0, 1], [0, "1"]]]}}}',
        '{"HERE": {"attention": {"float32": [[[0, 1], [0, 1], [0, 1], [0, 1, 2]]]}}}',
        "[" * 100_000,
        " " * ((1 << 20) + 1),
    ],
    ids=range(9),
)
def test_a_file_of_something_else_is_ignored_with_a_warning(path, text):
    path.write_text(text.replace("HERE", choice.machine(native_library.instructions())))
    with pytest.warns(UserWarning, match=r"measured\.json is ignored: .*kvkeep doctor --measure"):
        assert not torch_is_faster("attention", FLOATS, 1, 256, 1, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch_is_faster("linears", FLOATS, 64, 1 << 20)


def test_boxes_hold_what_was_measured():
    grid = ((1, 4, 16), (8, 64), (2, 3, 9))
    sizes, chosen = list(product(*grid)), random.Random(0)
    for _ in range(50):
        slow = {size for size in sizes if chosen.random() < 0.6}
        found = measure.boxes(slow, grid)
        for size in sizes:
            held = [
                all(
                    low <= x and (high is None or x <= high)
                    for x, (low, high) in zip(size, box, strict=True)
                )
                for box in found
            ]
            assert sum(held) == (size in slow)
    assert measure.boxes(set(sizes), grid) == [((0, None),) * 3]
    assert measure.boxes({(4, 64, 2), (4, 64, 3)}, grid) == [((2, 4), (9, None), (0, 3))]


# -- what reads it --------------------------------------------------------------------------

needs_library = pytest.mark.skipif(not native_library.available, reason=native_library.reason)


@needs_library
@torch.no_grad()
def test_attention_is_computed_in_the_way_that_the_table_says(path, monkeypatch):
    ran = []
    for module in (native, plain):
        monkeypatch.setattr(module, "CALL", Counted(module.CALL, ran))
    q, (k, v) = torch.randn(1, 4, 3, 64), torch.randn(2, 1, 2, 40, 64)
    position = torch.arange(40, dtype=torch.int32)
    segment = Segment({"k": k, "v": v, POSITION: position.view(1, 1, -1)}, Plain(), Plain())
    view = View((segment,), position[-3:], ragged=False)
    mask = torch.ones(3, 40, dtype=torch.bool).tril(37)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.1, enable_gqa=True)
    for boxes, count in (
        ([], 1),
        ([[[4, 4], [64, 64], [2, 2], [64, 64]]], 0),
        ([[[4, 4], [64, 64], [1, 1], [64, 64]]], 1),
    ):
        plant(path, boxed(*boxes))
        ran.clear()
        torch.testing.assert_close(attend(q, view, scale=0.1)[0], expected)
        assert len(ran) == count
    plant(path, boxed([[0, None]] * 4))
    for change in (
        {"need_mass": True},
        {"softcap": 30.0},
        {"window": 9},
        {"backend": "native"},
    ):
        ran.clear()
        attend(q, view, scale=0.1, **change)
        assert len(ran) == 1, change


class Counted:
    """A struct that notes when it packs."""

    def __init__(self, struct, packed):
        self.struct, self.packed = struct, packed

    def pack(self, *fields):
        self.packed.append(fields)
        return self.struct.pack(*fields)


@needs_library
@torch.no_grad()
def test_linear_layers_are_computed_in_the_way_that_the_table_says(path, monkeypatch):
    rows = []
    multiply = linears.multiply
    monkeypatch.setattr(linears, "multiply", lambda call: rows.append(call[4]) or multiply(call))
    x = torch.randn(70, 200)
    for boxes, expected in (
        ([], [1, 2, 3, 70]),
        ([[[2, 2], [0, None]], [[100, None], [0, None]]], [1, 3]),
        ([[[0, 4], [200 * 300 * 4, None]]], [70]),
        ([[[0, 4], [200 * 300 * 4 + 1, None]]], [1, 2, 3, 70]),
    ):
        plant(path, boxed(*boxes, operation="linears"))
        layer = nn.Linear(200, 300)
        assert linears.route(layer) == 1
        rows.clear()
        for count in (1, 2, 3, 70):
            found = layer(x[:count])
            torch.testing.assert_close(found, linear(x[:count], layer.weight, layer.bias))
        assert rows == expected
    plant(path, boxed([[0, None], [0, None]], operation="linears"))
    assert linears.route(nn.Linear(200, 300)) == 0


# -- kvkeep doctor --------------------------------------------------------------------------


@needs_library
def test_doctor_measures_for_later_processes(path, monkeypatch):
    monkeypatch.setattr(measure, "_ATTENTION", ((1, 4), (4, 8), (1,), (64,)))
    monkeypatch.setattr(measure, "_ROWS", (1, 2))
    monkeypatch.setattr(measure, "_ELEMENTS", (64,))
    monkeypatch.setattr(measure, "_COLD", 4096)
    calls = []
    monkeypatch.setattr(measure, "_torch_is_faster", lambda *some: calls.append(some) or True)
    path.write_text('{"another": {"attention": {}}}')
    report = run("--measure", "--json")
    assert report["measured"]
    assert report["torch_is_faster"]["attention"]["float32"] == [[[0, None]] * 4]
    assert report["torch_is_faster"]["linears"]["bfloat16"] == [[[0, None]] * 2]
    assert report["torch_is_faster"]["linears"]["float16"] == as_lists(
        choice.defaults(native_library.instructions())["linears"]["float16"]
    )
    with torch.inference_mode():
        for native_call, torch_call in calls:
            native_call(), torch_call()
    choice.forget()  # as in a later process
    assert run("--json") == report | {name: run("--json")[name] for name in ("load", "threads_now")}
    assert set(json.loads(path.read_text())) > {"another"}
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert "as measured" in shown
    assert "all" in shown


def run(*arguments):
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def as_lists(boxes):
    return json.loads(json.dumps(boxes))


def test_a_measurement_needs_a_clear_win(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure, "perf_counter", lambda: clock[0])

    def taking(seconds):
        def call():
            clock[0] += seconds

        return call

    for native_s, torch_s, expected in ((1, 0.5, True), (1, 1, False), (1, 0.97, False)):
        assert measure._torch_is_faster(taking(native_s), taking(torch_s)) == expected
