"""The page of an evaluation, in a real browser."""

from __future__ import annotations

import json
import math
import re

import pytest
from kvkeep_lab.evals.tradeoff import rows_of
from kvkeep_lab.page.document import write
from kvkeep_lab.page.evaluation import evaluation
from selenium.webdriver.common.keys import Keys
from support.browser import NARROW, WIDE, browsing

HOSTILE = "<img src=x onerror=alert(1)>"


def row(spec, context, mib, kl, accuracy, **more):
    tasks = {"needle": {"accuracy": accuracy, "low": 0.1, "high": 0.9, "samples": 5}}
    known = {"perplexity": 6.0, "perplexity_ratio": 1 + kl, "top1": 1 - kl, "tokens_per_s": 9.5}
    known |= {"bytes": mib * 2**20, "kl": kl, "kl_95": [kl * 0.8, kl * 1.25], "tasks": tasks}
    return {"spec": spec, "context": context, **known, **more}


def result():
    """Of two contexts; kvpress at one. On the front of the divergence at 2,000 tokens are the full
    cache, `h2o:500`, `h2o:250` and `window:100`."""
    return {
        "model": "tiny",
        "dtype": "float32",
        "continuation": 2560,
        "chunk": None,
        "late_question": False,
        "baseline": [row("keep_all", 2000, 80, 0.0, 1.0), row("keep_all", 4000, 160, 0.0, 1.0)],
        "rows": [
            row("h2o:250", 2000, 10, 0.1, 0.5),
            row("h2o:500", 2000, 20, 0.05, 0.8),
            row("window:500", 2000, 20, 0.4, 0.2),
            row("window:100", 2000, 4, 0.8, 0.0, perplexity=math.inf),
            row("h2o:250", 4000, 10, 0.2, 0.5),
        ],
        "against": [
            row(f"kvpress {HOSTILE}", 2000, 20, 0.07, 0.9),
            {"spec": "kvpress none", "context": 2000, "failed": "out of memory"},
        ],
        "environment": {"cpu": "some cores", "triton": "none"},
    }


def page():
    found = result()
    return evaluation("Quality", rows_of(found), [found])


def test_what_is_not_finite_was_not_measured():
    data = json.loads(re.search(r'id="data">(.*)</script>', page())[1])
    figures = {one["spec"]: one["figures"] for one in data["rows"] if one["context"] == 2000}
    assert figures["window:100"]["perplexity"] is None
    assert figures["keep_all"]["kl"] == [0.0]
    assert figures["h2o:250"]["kl"] == pytest.approx([0.1, 0.08, 0.125])


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


@pytest.fixture
def tab(browser, tmp_path):
    """The page, as new; afterwards it must have asked for nothing and complained of nothing."""
    file = tmp_path / "page.html"
    write(file, page())
    browser.resize(WIDE)
    browser.console(), browser.requested()
    browser.driver.get(file.as_uri())
    yield browser
    assert browser.console() == []
    assert browser.requested() == [file.as_uri()]


def specs(tab):
    return [one.get_property("textContent") for one in tab.all("#table tbody th")]


def on_front(tab, chart=0):
    names = tab.all(f"#chart-{chart} .on-front")
    return {one.get_attribute("aria-label").split()[0] for one in names}


def test_the_table_is_sorted_by_keyboard(tab):
    assert len(specs(tab)) == 8
    header = next(one for one in tab.all("#table thead th") if one.text.startswith("KL"))
    header.find_element("css selector", "button").send_keys(Keys.ENTER)
    assert header.get_attribute("aria-sort") == "ascending"
    assert [name.partition(",")[0] for name in specs(tab)[-3:]] == [
        "h2o:250",
        "window:500",
        "window:100",
    ]
    tab.press(Keys.ENTER)
    assert header.get_attribute("aria-sort") == "descending"
    assert specs(tab)[0].startswith("window:100")
    perplexity = next(one for one in tab.all("#table thead button") if one.text == "perplexity")
    for _ in range(2):
        perplexity.send_keys(Keys.ENTER)
        assert specs(tab)[-1].startswith("window:100")  # what was not measured comes last
    assert HOSTILE in tab.text("#table")


def test_points_are_reached_by_keyboard_and_tell_their_figures(tab):
    tab.find("#measure-0").send_keys(Keys.TAB)
    tab.press(Keys.HOME)
    assert tab.text("#chart-0 .chart-detail").startswith("window:100 2,000 tokens: 4 MiB")
    tab.press(Keys.END)
    assert tab.text("#chart-0 .chart-detail").startswith("keep_all 4,000 tokens: 160 MiB")
    tab.press(Keys.ARROW_LEFT)
    said = tab.text("#chart-0 .chart-detail")
    assert said.startswith("keep_all 2,000 tokens: 80 MiB, 100 % of the full cache. KL 0;")
    assert tab.text("#chart-1 .chart-detail") == said
    assert tab.text("#table tr.marked th").startswith("keep_all")


def test_the_front_is_of_what_is_shown(tab):
    held = {"keep_all", "h2o:500", "h2o:250", "window:100"}
    assert on_front(tab) == held
    points = len(tab.all("#chart-0 .point"))
    tab.find("#search").send_keys("window")
    assert on_front(tab) == {"window:100", "window:500"}
    tab.find("#search").clear()
    tab.find("#search").send_keys("0", Keys.BACKSPACE)
    assert len(tab.all("#chart-0 .point")) == points == 8
    # kvpress holds as much as `h2o:500`, and is more accurate.
    assert on_front(tab, 1) == {"keep_all", "kvpress", "h2o:250", "window:100"}
    tab.find("#best").click()
    assert not any("window:500" in name for name in specs(tab))


def test_series_and_axes(tab):
    buttons = tab.all("#legend button")
    assert [one.text for one in buttons] == [
        "2,000 tokens",
        "4,000 tokens",
        "2,000 tokens, kvpress",
    ]
    assert len(tab.all("#chart-0 .family")) == 2  # budgets of h2o and window, at 2,000 tokens
    buttons[2].send_keys(Keys.SPACE)
    assert buttons[2].get_attribute("aria-pressed") == "false"
    assert HOSTILE not in tab.text("#table")
    tab.all("#across input")[2].click()
    assert len(tab.all("#chart-0 .family")) == 2  # contexts of h2o:250 and keep_all
    assert not tab.all("#chart-0 .front")


def test_narrow_screens_need_no_scrolling_sideways(tab):
    tab.resize(NARROW, "dark")
    wide = "const root = document.documentElement; return root.scrollWidth - root.clientWidth"
    assert tab.run(wide) <= 0
    width = tab.run("return document.querySelector('#chart-0 svg').getBoundingClientRect().width")
    assert 200 < width < NARROW[0]
