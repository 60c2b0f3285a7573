"""Pictures of a run: how many, and of what."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kvkeep_lab.evals.kept_positions import fed, kept
from kvkeep_lab.page.document import write
from kvkeep_lab.page.inspection import MOST_FRAMES, Frames, inspection
from selenium.webdriver.common.keys import Keys
from support.browser import NARROW, browsing
from support.tiny_models import tiny

from kvkeep.page.picture import Held, Span, Taken, picture

TOKENS = 100


def pictures(spec, chunk, tokens=TOKENS):
    ids = torch.arange(tokens)[None] % 61
    frames = Frames([f"<{token}>" for token in ids[0].tolist()], chunk)
    cache = fed(tiny("llama", max_position_embeddings=4096), ids, spec, chunk, frames)
    counts = [[len(head) for head in heads] for heads in kept(cache)]
    return frames.pictures, counts


def counted(picture):
    """How many tokens each head keeps; a picture says it once if all keep the same."""
    return [one["kept"] * (one["heads"] // len(one["kept"])) for one in picture["layers"]]


@pytest.mark.parametrize("chunk", [2, 50, 99, None])
def test_pictures_of_chunks_are_few_and_end_with_the_last(chunk):
    found, counts = pictures("h2o:9", chunk)
    chunks = -(-TOKENS // (chunk or TOKENS))
    tokens = [one["tokens"] for one in found]
    assert tokens[-1] == TOKENS
    assert len(found) == chunks or MOST_FRAMES / 2 < len(found) <= MOST_FRAMES
    steps = {after - before for before, after in pairwise(tokens[:-1])}
    assert len(steps) <= 1
    assert counted(found[-1]) == counts
    assert found[0]["texts"][0] == "<0>"


def test_all_pictures_have_equally_many_tokens_in_a_column():
    found, _ = pictures("window:9", 1000, tokens=2100)
    assert [(one["tokens"], one["group"]) for one in found] == [(1000, 3), (2000, 3), (2100, 3)]


def test_what_is_compressed_afterwards_is_the_last_picture():
    found, counts = pictures("kvzip:25%", 50)
    assert [one["tokens"] for one in found] == [50, TOKENS]
    assert sum(map(sum, counts)) < TOKENS * sum(map(len, counts)) / 2
    assert counted(found[-1]) == counts


@pytest.fixture(scope="module")
def tab():
    with browsing() as found:
        found.resize(NARROW)
        yield found


@pytest.fixture
def opened(tab, tmp_path):
    """Opens a page of pictures. It must ask for nothing and complain of nothing."""
    file = tmp_path / "page.html"

    def open_page(shown):
        write(file, inspection("A <b>run</b>", {"cache": "window:9"}, shown))
        tab.console(), tab.requested()
        tab.driver.get(file.as_uri())
        return tab

    yield open_page
    assert tab.console() == []
    assert tab.requested() == [file.as_uri()]


def test_the_page_shows_each_chunk(opened):
    tab = opened(pictures("window:9+int8", 50)[0])
    assert tab.driver.title == tab.text("h1") == "A <b>run</b>"
    assert "after 100 of 100 tokens" in tab.text("#time")
    assert "9 of 100 tokens are kept" in tab.text(".map-detail")
    held = tab.text("#summary")
    tab.find("#chunk").send_keys(Keys.ARROW_LEFT)
    assert "after 50 of 100 tokens" in tab.text("#time")
    assert "9 of 50 tokens are kept" in tab.text(".map-detail")
    assert tab.text("#summary") != held
    assert not tab.find("#back").is_enabled()
    tab.find(".map-field").send_keys(Keys.END)
    assert tab.text(".map-detail").startswith("<49> layer 0")
    tab.find("#on").send_keys(Keys.ENTER)
    assert "after 100 of 100 tokens" in tab.text("#time")
    wide = "const root = document.documentElement; return root.scrollWidth - root.clientWidth"
    assert tab.run(wide) == 0


def test_more_than_a_full_cache_is_the_scores(opened):
    (whole,) = pictures("h2o:200", None)[0]
    assert whole["live_bytes"] > whole["full_bytes"]
    tab = opened([whole])
    assert "more than a full cache, for the policy's scores" in tab.text("#summary")
    tab = opened(pictures("window:200", None)[0])
    assert "for a full cache (100 %)" in tab.text("#summary")


def test_a_map_with_more_columns_than_pixels_tells_all_from_most_and_few_from_none(opened):
    quarter, group = 45 * 85, 15  # a column of pixels stands for at least three of the picture
    kept = [
        *range(quarter),
        *(p for p in range(quarter, 2 * quarter) if p % 45),
        *(p for p in range(2 * quarter, 3 * quarter) if not p % 45),
    ]
    held = Held(
        6, "some", torch.tensor([kept], dtype=torch.int32), (Span(len(kept), False, False),), 1
    )
    now = Taken(4 * quarter, (held,), 1, 2)
    tab = opened([picture(now, ["a"] * now.tokens, group=group)])
    colours = tab.run(
        """
        const map = document.querySelector(".map-field canvas");
        const line = map.getContext("2d").getImageData(34, 1, map.width - 34, 1).data;
        return Array.from({length: map.width - 34}, (_, x) => line.slice(4 * x, 4 * x + 3).join());
        """
    )
    for colour in (colours[0], colours[-1]):
        assert colours.count(colour) == pytest.approx(len(colours) / 4, abs=2)
    tab.find(".map-field").send_keys(Keys.HOME)
    assert "layer 6, head 0, tokens 0 to 14: 15 of 15 kept." in tab.text(".map-detail")
    assert tab.text("#layers tr th") == "6"
