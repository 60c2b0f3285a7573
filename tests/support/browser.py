"""Debian's Chromium without a window, driven by selenium, as one user at a time has it."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDE, NARROW = (1280, 800), (360, 740)


@contextmanager
def browsing():
    """A browser, which is skipped where it is not installed."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver are installed; `make programs` installs Debian's")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with TemporaryDirectory(ignore_cleanup_errors=True) as place:  # it leaves sockets there
        service = Service(DRIVER, env=os.environ | {"TMPDIR": place})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()


class Browser:
    """A tab, with what tests ask of it."""

    def __init__(self, driver):
        self.driver, self.run = driver, driver.execute_script

    def resize(self, size, scheme="light"):
        """Give the page so many pixels, and light or dark colours."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        """The text of an element, shown or not; read at once, because a page may replace it."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector):
        """The texts of all such elements, as they are shown; read at once."""
        script = "return [...document.querySelectorAll(arguments[0])].map((x) => x.innerText)"
        return self.run(script, selector)

    def press(self, *keys):
        """Press keys, wherever the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def point(self, element, right, down):
        """Move the pointer to a place in an element, in pixels from its top left corner."""
        from selenium.webdriver import ActionChains

        size = element.size
        offset = int(right - size["width"] / 2), int(down - size["height"] / 2)
        ActionChains(self.driver).move_to_element_with_offset(element, *offset).perform()

    def until(self, condition, seconds=60):
        """Wait for what is to come about; returns it."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    def console(self):
        """What the browser has logged since the last call: errors, warnings and messages."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self):
        """The URLs that the tab has asked for since the last call."""
        events = (
            json.loads(one["message"])["message"] for one in self.driver.get_log("performance")
        )
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]
