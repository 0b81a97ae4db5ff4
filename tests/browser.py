"""A headless Chromium for tests of pages, and ``python -m tests.browser PAGE PICTURE``, which photographs one."""

import argparse
import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
MISSING = "needs Chromium and its driver: apt-get install chromium chromium-driver"
LOGGED = {"browser": "ALL", "performance": "ALL"}
PATIENCE = 60.0  # seconds for a page to draw its figures on a busy machine
DRAWN = """
const seen = (one) => one.offsetParent && one.getBoundingClientRect().top < innerHeight;
return [...document.querySelectorAll(".plot")].filter(seen).every((one) => one.querySelector(".scatterlayer"));
"""
FLAGS = (
    "headless=new",
    "no-sandbox",  # it will not start as root without
    "disable-gpu",
    "disable-dev-shm-usage",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "hide-scrollbars",
)


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[webdriver.Chrome]:
    """Starts a headless browser with a profile of its own, which knows no page and keeps none.

    Errors: ``RuntimeError`` where there is no Chromium.
    """
    if CHROMIUM is None or DRIVER is None:
        raise RuntimeError(MISSING)
    options = Options()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", LOGGED)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"window-size={width},{height}", f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            resize(driver, width, height)
            driver.get("about:blank")
            for log in LOGGED:
                driver.get_log(log)  # what the browser's own first page asked for
            yield driver
        finally:
            driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    """Gives the page a size in pixels, also one that is narrower than a window can be."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: webdriver.Chrome, scheme: str) -> None:
    """Makes the machine one that prefers a "light" or a "dark" scheme."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def requested(driver: webdriver.Chrome) -> list[str]:
    """Returns every address that was asked for since the last call."""
    messages: list[dict[str, Any]] = [
        json.loads(entry["message"])["message"] for entry in driver.get_log("performance")
    ]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


def photograph(page: Path, picture: Path, *, width: int, height: int, scheme: str) -> None:
    """Writes the top of a page, its figures drawn, as PNG."""
    with chromium(width, height) as driver:
        prefer(driver, scheme)
        driver.get(page.resolve().as_uri())
        WebDriverWait(driver, PATIENCE).until(lambda one: one.execute_script(DRAWN))
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    picture.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description="Photographs the top of a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1680)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    chosen = parser.parse_args()
    photograph(chosen.page, chosen.picture, width=chosen.width, height=chosen.height, scheme=chosen.scheme)


if __name__ == "__main__":
    main()
