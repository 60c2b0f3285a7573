"""`kvkeep recommend`: which specs are tried, and which are shown."""

from __future__ import annotations

import pytest
from kvkeep_lab.evals.recommended import candidates, front
from support.command_line import last_line, run

from kvkeep.host import LayerKind
from kvkeep.spec import parse_specs


def test_full_layers_of_windowed_models_can_stay_whole_in_4_bits():
    kinds = [LayerKind("sliding", 512), LayerKind("sliding", 512), LayerKind("full", None)]
    specs = candidates(kinds)
    assert "sliding=keep_all+int8;full=keep_all+int4" in specs
    assert all(parse_specs(spec) for spec in specs)
    assert all("=" not in spec for spec in candidates(kinds[2:]))


def test_the_front_has_no_row_that_another_beats():
    rows = [
        {"spec": spec, "bytes": held, "kl": kl}
        for spec, held, kl in [("a", 9, 0.0), ("b", 4, 0.2), ("c", 5, 0.3), ("d", 4, 0.1)]
    ]
    assert [row["spec"] for row in front(rows)] == ["d", "a"]


@pytest.mark.parametrize(
    ("share", "says"), [("60%", '--cache "keep_all+int8"'), ("1%", "no spec holds 1%")]
)
def test_recommend(stand_in_home, monkeypatch, tmp_path, share, says):
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog wonders why. " * 20)
    options = ("--context", "24", "--continuation", "3", "--windows", "2", "--text", str(text))
    specs = ("--specs", "keep_all+int8;window:8", "--bytes", share, "--json")
    result = run("recommend", "--dtype", "float32", *options, *specs)
    found = last_line(result)["front"]
    assert [row["spec"] for row in found] == ["keep_all+int8", "keep_all"]
    assert says in result.stderr
