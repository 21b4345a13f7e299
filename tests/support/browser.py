"""Debian's Chromium, without a window and with nothing to download.

with browser() as page:
    page.get(url)
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WIDE, NARROW = (1280, 900), (400, 850)


def needs_browser() -> None:
    """Skips where there is none."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")


@contextmanager
def browser(folder: Path, *, any_authority: bool = False) -> "Iterator[Chrome]":
    """With a profile of its own in `folder`. `any_authority`: pages may have a certificate of a test's own."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    # No sandbox: tests may run as root, in a container without user namespaces; what is shown is the daemon's own page.
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-proxy-server",
        f"user-data-dir={folder}",
    ):
        options.add_argument(f"--{flag}")
    options.accept_insecure_certs = any_authority
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = Chrome(options, ChromeService(shutil.which("chromedriver")))
    try:
        page.set_page_load_timeout(120)
        page.set_script_timeout(120)
        resize(page, WIDE)
        yield page
    finally:
        page.quit()


def resize(page: "Chrome", size: tuple[int, int], *, dark: bool = False) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def text(page: "Chrome", selector: str) -> str:
    """What a person reads there; empty where there is nothing yet."""
    return str(page.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)).replace(
        "\u00a0", " "
    )
