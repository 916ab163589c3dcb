"""A real headless Chromium, driven by Selenium through Debian's chromedriver; nothing is downloaded."""

import base64
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]")  # invisible and control characters
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def why_none() -> str | None:
    """Why no browser can be used here; None where one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not any(shutil.which(name) for name in CHROMIUM):
        return "no Chromium is installed here; `make browser-packages` does that (as root)"
    return None if shutil.which("chromedriver") else "chromedriver is not installed; `make browser-packages` does that"


needs_browser = pytest.mark.skipif(why_none() is not None, reason=why_none() or "")


class Page:
    """A page open in the browser, with what tests ask of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Opens a file, after clearing the browser's console log."""
        self.driver.get_log("browser")
        self.driver.get(path.absolute().as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        """Runs a script in the page and returns its result."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The URLs of everything that the page has loaded besides itself."""
        return self.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")

    def broken_links(self) -> list[str]:
        """The links whose targets are not in the page."""
        return self.run("""
            return [...document.querySelectorAll("a")]
                .filter((link) => !document.querySelector(link.getAttribute("href"))).map((link) => link.href);""")

    def words_without_script(self, path: Path) -> str:
        """The text of a page that is opened with scripts disabled."""
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        try:
            self.open(path)
        finally:
            self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        return self.run("return document.querySelector('noscript').textContent + document.body.innerText")

    def refuses_changed_script(self) -> bool:
        """Whether the console says that a script was refused because its hash is not the one that the page names."""
        return any("script-src" in line or "sha256" in line for line in self.complaints())

    def check_hostile(self, tags: str = "img, iframe, object") -> str:
        """Asserts that hostile texts in the page were not executed; returns the page's text.

        No script of these texts has run, none became one of the elements ``tags``, and no invisible character is shown.
        """
        assert self.run("return window.stolen === undefined")
        assert self.run("return document.querySelectorAll(arguments[0]).length", tags) == 0
        shown = self.run("return document.body.innerText")
        assert not UNSEEN.search(shown)
        return shown

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the viewport in CSS pixels, also narrower than a window can be, as on a telephone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def emulate(self, **features: str) -> None:
        """Sets CSS media features, as in prefers_color_scheme='dark'."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Writes a PNG of the whole page, or of its visible part."""
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(taken["data"]))

    def print_pdf(self) -> bytes:
        """The page printed as a PDF, in bytes."""
        printed = self.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
        return base64.b64decode(printed["data"])


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A new browser without network, whose profile lies in ``folder``; it is closed when the context ends."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(found for name in CHROMIUM if (found := shutil.which(name)))
    profile = folder / "profile"
    offline = ("--proxy-server=127.0.0.1:9", "--disable-background-networking", "--disable-component-update")
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium refuses to run sandboxed as root
    for argument in ("--headless=new", "--disable-gpu", f"--user-data-dir={profile}", *offline, *sandbox):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    try:
        yield Page(driver)
    finally:
        driver.quit()
