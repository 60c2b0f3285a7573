"""Takes the picture of the server's page that the documents show, with the demo model.

PYTHONPATH=tests python -m support.screenshot docs/page.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from selenium.webdriver.common.keys import Keys as Key

from kvkeep.hf.models import load
from support.browser import browsing
from support.live_server import serving

SIZE = 1280, 1080
SPEC = "h2o:224"
SYSTEM = (
    "You are the keeper of a lighthouse on a rocky island in the north. You have kept it for "
    "thirty years. The tower is forty metres high, and its lamp is seen from twenty miles away. "
    "You know the tides, the fog signals, the ships that pass, and the birds that rest on the "
    "gallery in autumn. Every evening you climb the stairs, wind the clockwork, trim the wick and "
    "light the lamp. Every morning you put it out, clean the lenses and write the log: the wind, "
    "the weather, and what passed in the night. A boat brings letters and bread once a month, if "
    "the sea allows it. Your daughter lives in the harbour town, and you wave to her with a "
    "lantern on Sundays. Answer in a few plain sentences, and say what you see."
)
BEFORE = "Which birds do you see?"
QUESTIONS = "What do you do on a stormy night?", "And what do you do in the morning after it?"


def main() -> None:
    model, tokenizer = load("smollm2-135m")
    with serving(model, tokenizer, cache=SPEC) as (engine, talk), browsing() as tab:
        engine.name = "smollm2-135m"
        tab.resize(SIZE)
        tab.driver.get(str(talk.base_url).removesuffix("v1/"))

        def ask(text: str, tokens: int) -> None:
            tab.until(lambda: tab.find("#send").is_enabled())
            tab.run("document.getElementById('max-tokens').value = arguments[0]", tokens)
            tab.find("#question").send_keys(text + Key.ENTER)
            tab.until(lambda: tab.find("#send").is_enabled())

        tab.run("document.getElementById('system').value = arguments[0]", SYSTEM)
        ask(BEFORE, 24)
        tab.find("#new").click()
        ask(QUESTIONS[0], 56)
        ask(QUESTIONS[1], 96)
        tab.point(tab.find(".map-field"), 330, 190)
        tab.run("return new Promise(requestAnimationFrame)")
        Path(sys.argv[1]).write_bytes(tab.driver.get_screenshot_as_png())


if __name__ == "__main__":
    main()
