"""The server's page in a real browser: a conversation, and the cache that is shown meanwhile."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys as Key
from support.browser import NARROW, WIDE, browsing
from support.live_server import serving, small

from kvkeep.hf.models import load
from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits

LONG, LONGEST = 7000, 30_000  # tokens: answers that outlast a test


@pytest.fixture(scope="module")
def tab():
    with browsing() as browser:
        yield browser


def page_of(talk):
    return str(talk.base_url).removesuffix("v1/")


def opened(tab, talk, size=WIDE):
    """Open the page, as new, and wait until it knows the model."""
    tab.resize(size)
    tab.driver.get("about:blank")
    tab.console(), tab.requested()
    tab.driver.get(page_of(talk))
    tab.until(lambda: tab.find("#send").is_enabled())


def settings(tab, **values):
    for name, value in values.items():
        tab.run("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))


def answers(tab):
    return tab.texts(".message.assistant .said")


def done(tab):
    return tab.run("return document.getElementById('stop').disabled")


def asked(tab, text, tokens=24):
    settings(tab, **{"max-tokens": tokens})
    tab.find("#question").send_keys(text + Key.ENTER)
    tab.until(lambda: done(tab))
    tab.run("return new Promise(requestAnimationFrame)")
    return answers(tab)[-1]


def cells(tab):
    """The pixels of the heat map."""
    return tab.run("return document.querySelector('.map-field canvas').toDataURL()")


def unspoilt(tab, talk):
    """Nothing was logged, and nothing but the server was asked."""
    assert tab.console() == []
    urls = [url for url in tab.requested() if not url.startswith(("data:", "about:", "chrome:"))]
    assert urls
    assert all(url.startswith(page_of(talk)) for url in urls)


@pytest.fixture(scope="module")
def evicting(tokenizer):
    """A server whose cache keeps 24 tokens, and whose answers do not end."""
    model = small(max_position_embeddings=1 << 15)
    model.generation_config.eos_token_id = None
    limits = Limits(answer_tokens=LONGEST)
    with serving(model, tokenizer, cache="h2o:24", limits=limits) as both:
        yield both


@pytest.mark.parametrize("size", ["small", pytest.param("real", marks=pytest.mark.slow)])
def test_an_answer_streams_and_the_slots_change(tab, evicting, tokenizer, size):
    if size == "real":
        model, _ = load("smollm2-135m")
        with serving(model, tokenizer, cache="h2o:24") as (_, talk):
            _watch(tab, talk, LONG)
    else:
        _watch(tab, evicting[1], LONGEST)


def _watch(tab, talk, tokens):
    opened(tab, talk)
    blank = cells(tab)
    settings(tab, **{"max-tokens": tokens})
    tab.find("#question").send_keys("Tell of the sea." + Key.ENTER)
    first = tab.until(lambda: answers(tab) and answers(tab)[0])
    maps = {tab.until(lambda: (now := cells(tab)) != blank and now)}
    assert not done(tab)
    second = tab.until(lambda: len(now := answers(tab)[0]) > len(first) and now)
    assert second.startswith(first)
    maps.add(tab.until(lambda: (now := cells(tab)) not in maps and now))
    tab.until(lambda: "24 of" in tab.text(".map-detail"))
    tab.until(lambda: "running1" in tab.text("#server").replace(" ", ""))
    tab.find("#stop").click()
    tab.until(lambda: done(tab))
    assert "stopped" in tab.text(".message.assistant .about")
    kept = answers(tab)
    assert asked(tab, "And then?", 3) != ""  # the conversation goes on
    assert answers(tab)[:1] == kept
    tab.until(lambda: "running0" in tab.text("#server").replace(" ", ""))
    unspoilt(tab, talk)


def test_cells_tell_their_tokens(tab, evicting):
    opened(tab, evicting[1])
    asked(tab, "Tell of the sea.")
    field = tab.find(".map-field")
    texts = tab.texts(".map-text span")
    assert texts[0] == "<|im_start|>"
    assert tab.text("#spec") == "h2o:24+plain@growing"
    tab.point(field, 40, 5)  # the first column, right of the layers' numbers
    assert tab.text(".map-detail").startswith("<|im_start|> layer 0, head 0, token 0: ")
    tab.point(tab.find("h1"), 1, 1)
    assert "Point at a cell" in tab.text(".map-detail")
    tab.run("arguments[0].focus()", field)
    last = len(texts) - 1
    assert f"token {last}: kept. 100 % of all heads" in tab.text(".map-detail")
    tab.press(Key.ARROW_LEFT, Key.ARROW_DOWN)
    assert f"layer 0, head 1, token {last - 1}: " in tab.text(".map-detail")
    tab.press(Key.PAGE_DOWN, Key.PAGE_DOWN, Key.HOME)
    assert "layer 1, head 0, token 0: " in tab.text(".map-detail")
    tab.press(Key.ARROW_RIGHT)
    assert tab.text(".map-text .shown") == tab.text(".map-text span:nth-child(2)")
    tab.press(*[Key.ARROW_LEFT] * 3, *[Key.ARROW_UP] * 9, Key.END)
    assert f"layer 0, head 0, token {last}: " in tab.text(".map-detail")
    assert "this head keeps 24 of" in tab.text(".map-detail")
    unspoilt(tab, evicting[1])


def test_a_conversation_begins_with_what_is_stored(tab, served):
    opened(tab, served[1])
    settings(tab, system="You keep a lighthouse.")
    asked(tab, "Hello.", 4)
    assert "0 found" in tab.text(".message.assistant .about")
    assert "0 of" in tab.text("#summary")
    asked(tab, "And then?", 4)
    about = [text for text in tab.texts(".message .about") if text]
    prompt, found = [int(word) for word in about[-1].split() if word.isdigit()][:2]
    assert 10 < found < prompt
    assert f"{found} of {prompt} tokens" in tab.text("#summary")
    assert len(tab.all(".prefixes li.own")) > 1
    assert "keep a lighthouse" in tab.text(".prefixes")
    asked(tab, "What else?", 4)
    tab.find("#new").click()
    assert not tab.all(".message")
    assert tab.text(".map-detail") == "The cache is empty."
    asked(tab, "Something else.", 4)
    assert "of another prompt" in tab.text(".prefixes")
    unspoilt(tab, served[1])


def test_text_is_shown_as_text(tab, served):
    evil = "<img src=x onerror=alert(1)><b>bold</b>&amp;</script>"
    opened(tab, served[1])
    settings(tab, mode="text")
    asked(tab, evil, 4)
    assert tab.find(".message.user .said").text == evil
    assert not tab.all("#talk img, #cache img, #talk b, .map-text b, .prefixes b")
    assert evil in tab.text(".map-text") + tab.text(".prefixes")
    unspoilt(tab, served[1])


def test_enter_sends_and_shift_enter_breaks_the_line(tab, served):
    opened(tab, served[1])
    settings(tab, **{"max-tokens": 2})
    tab.find("#question").send_keys("One" + Key.SHIFT + Key.ENTER + Key.NULL + "two" + Key.ENTER)
    tab.until(lambda: done(tab) and answers(tab))
    assert tab.find(".message.user .said").text == "One\ntwo"
    assert tab.find("#question").get_property("value") == ""
    tab.press("  ", Key.ENTER)
    assert len(tab.all(".message")) == 2


def test_errors_are_shown_in_full_and_the_question_stays(tab, served, tokenizer):
    opened(tab, served[1])
    settings(tab, temperature=3)
    tab.find("#question").send_keys("Hello." + Key.ENTER)
    problem = tab.until(lambda: tab.find("#problem").text)
    assert problem.startswith("temperature is 3: ")
    assert problem.endswith("less than or equal to 2 (status 400)")
    assert not tab.all(".message")
    assert tab.find("#question").get_property("value") == "Hello."
    settings(tab, temperature=0, **{"max-tokens": 2})
    tab.find("#send").click()
    tab.until(lambda: done(tab) and answers(tab))
    assert not tab.find("#problem").is_displayed()
    assert all("status of 400" in line for line in tab.console())


def test_a_model_without_a_template_says_what_to_do(tab, model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with serving(model, tokenizer) as (_, talk):
        opened(tab, talk)
        tab.find("#question").send_keys("Once upon" + Key.ENTER)
        problem = tab.until(lambda: tab.find("#problem").text)
        assert "tiny has no chat template" in problem
        assert 'Choose "Plain text" in the settings.' in problem
        settings(tab, mode="text")
        tab.find("#question").clear()
        asked(tab, "Once upon", 4)
        asked(tab, " a time", 4)
        told = "".join(one.text for one in tab.all(".map-text span"))
        assert told.startswith("Once upon")
        assert " a time" in told
        assert "<|im_start|>" not in told


SCRIPTED = """
    const wait = window.setTimeout, given = window.fetch;
    window.setTimeout = (call, milliseconds) => wait(call, milliseconds / 100);
    window.models = [503, "first"];  // in turn: a model's name, or a status
    window.answers = [];  // in turn: what is sent of each, then it ends, or waits; or a status
    window.asked = [];  // the messages of each request
    const refused = (status) =>
        new Response(JSON.stringify({error: {message: "refused", code: null}}), {status});
    window.fetch = async (path, options) => {
        if (path.endsWith("models")) {
            const next = window.models.shift();
            return typeof next === "number" ? refused(next) : Response.json({data: [{id: next}]});
        }
        if (!path.endsWith("completions")) return given(path, options);
        window.asked.push(JSON.parse(options.body).messages.map((one) => one.content));
        const next = window.answers.shift();
        if (typeof next === "number") return refused(next);
        return new Response(new ReadableStream({
            start(stream) {
                const write = (data) => stream.enqueue(new TextEncoder().encode(data));
                options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
                for (const content of next.pieces) {
                    write(`data: ${JSON.stringify({choices: [{delta: {content}}]})}\\n\\n`);
                }
                if (next.done) write("data: [DONE]\\n\\n");
                if (!next.waits) stream.close();
            },
        }));
    };
"""


@pytest.fixture
def scripted(tab, served):
    """The page, whose server's answers the test gives."""
    command = tab.driver.execute_cdp_cmd
    name = command("Page.addScriptToEvaluateOnNewDocument", {"source": SCRIPTED})
    opened(tab, served[1])
    yield tab
    command("Page.removeScriptToEvaluateOnNewDocument", name)
    unspoilt(tab, served[1])


def answered(tab, text, answer):
    """Ask, when the server has the answer ready, and wait until it ends, unless it waits."""
    tab.run("window.answers.push(arguments[0])", answer)
    tab.find("#question").send_keys(text + Key.ENTER)
    if answer != {"pieces": [], "waits": True}:
        tab.until(lambda: done(tab))


WHOLE = {"pieces": ["Yes."], "done": True}


def test_a_stream_without_an_end_was_cut_off(scripted):
    answered(scripted, "Who?", {"pieces": ["It ", "is"]})
    assert "The answer was cut off" in scripted.text("#problem")
    assert scripted.text(".message.assistant .about") == "cut off"
    assert answers(scripted) == ["It is"]
    answered(scripted, "Go on.", WHOLE)
    assert not scripted.find("#problem").is_displayed()
    assert scripted.run("return window.asked[1]") == ["Who?", "It is", "Go on."]
    answered(scripted, "More.", {"pieces": []})
    assert "The answer was cut off" in scripted.text("#problem")
    assert scripted.find("#question").get_property("value") == "More."
    assert answers(scripted) == ["It is", "Yes."]


def test_a_question_that_is_stopped_before_its_answer_comes_back(scripted):
    answered(scripted, "Who?", {"pieces": [], "waits": True})
    scripted.find("#stop").click()
    scripted.until(lambda: done(scripted))
    assert not scripted.all(".message")
    assert scripted.find("#hint").is_displayed()
    assert scripted.find("#question").get_property("value") == "Who?"
    answered(scripted, " Who?", WHOLE)
    assert scripted.run("return window.asked[1]") == ["Who? Who?"]


def test_the_model_is_asked_for_until_it_is_known_and_when_it_has_changed(scripted):
    assert scripted.text("#model") == "first"  # though it was refused once
    assert not scripted.find("#problem").is_displayed()
    scripted.run("window.models.push(503, 'second')")
    answered(scripted, "Who?", 404)
    scripted.until(lambda: scripted.text("#model") == "second")
    assert scripted.find("#question").get_property("value") == "Who?"
    answered(scripted, "", WHOLE)
    assert answers(scripted) == ["Yes."]


def test_a_key_is_asked_for_and_not_kept(tab, model, tokenizer):
    keys = Keys({"secret": "ada", "other": "ben"})
    with serving(model, tokenizer, keys=keys, key="secret") as (_, talk):
        tab.resize(WIDE)
        tab.driver.get("about:blank")
        tab.console()
        tab.driver.get(page_of(talk))
        tab.until(lambda: tab.find("#key-form").is_displayed())
        assert "no API key" in tab.find("#problem").text
        tab.press("schlüssel", Key.ENTER)
        tab.until(lambda: "printable ASCII" in tab.find("#problem").text)
        tab.press("wrong", Key.ENTER)
        tab.until(lambda: "a wrong API key" in tab.find("#problem").text)
        tab.press("secret", Key.ENTER)
        tab.until(lambda: tab.find("#send").is_enabled())
        assert not tab.find("#key-form").is_displayed()
        assert not tab.find("#problem").is_displayed()
        asked(tab, "Hello.", 4)
        tab.find("#forget").click()
        assert tab.run("return sessionStorage.length") == 0
        assert not tab.find("#send").is_enabled()
        assert not tab.find("#forget").is_displayed()
        tab.press("other", Key.ENTER)
        tab.until(lambda: tab.find("#send").is_enabled())
        asked(tab, "And then?", 4)
        assert tab.run("return localStorage.length") == 0
        assert not tab.driver.get_cookies()
        assert tab.text("#server") == ""  # figures of all are for the operator
        refused = ("status of 401", "status of 403")
        logged = tab.console()
        assert [line for line in logged if not any(one in line for one in refused)] == []
        tab.run("sessionStorage.clear()")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_narrow_screen(tab, served, scheme):
    opened(tab, served[1], NARROW)
    tab.resize(NARROW, scheme)
    tab.find("summary").click()
    asked(tab, "Hello. " + "long" * 60, 12)
    for width in (360, 700, 1000):
        tab.resize((width, 740), scheme)
        wide = tab.run("return document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0
    tab.resize(NARROW, scheme)
    talk, cache = tab.find("#talk").rect, tab.find("#cache").rect
    assert cache["y"] >= talk["y"] + talk["height"]
    reached = set()
    tab.run("document.activeElement.blur()")
    for _ in range(40):
        tab.press(Key.TAB)
        active = tab.driver.switch_to.active_element
        reached.add(active.get_attribute("id") or active.get_attribute("class") or active.tag_name)
        outline = active.value_of_css_property("outline-style")
        assert outline != "none" or active.tag_name == "body"
    controls = {"log", "question", "send", "new", "summary", "mode", "temperature", "max-tokens"}
    assert controls | {"system", "map-field", "map-text"} <= reached
    unspoilt(tab, served[1])


def test_colours_have_contrast(tab, served):
    """Of text to what it stands on, at least 4.5 to 1; in both schemes."""
    for scheme in ("light", "dark"):
        opened(tab, served[1])
        tab.resize(WIDE, scheme)
        for ink, page in (
            ("ink", "page"),
            ("ink", "panel"),
            ("ink", "raised"),
            ("dim", "page"),
            ("dim", "panel"),
            ("accent", "panel"),
            ("on-accent", "accent"),
            ("bad", "bad-page"),
        ):
            pair = (_light(tab, ink), _light(tab, page))
            assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5, (scheme, ink, page)


def _light(tab, name):
    """The relative luminance of a colour, as WCAG defines it."""
    style = "getComputedStyle(document.documentElement)"
    text = tab.run(f"return {style}.getPropertyValue('--{name}').trim()")
    parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
