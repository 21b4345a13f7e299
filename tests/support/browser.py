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

WIDE, NARROW = (1440, 900), (390, 844)


def needs_browser() -> None:
    """Skip the test if Chromium is not installed."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")


@contextmanager
def browser(folder: Path, *, any_authority: bool = False, hosts: str = "") -> "Iterator[Chrome]":
    """Run Chromium with its own profile in `folder`.

    `any_authority`: accept certificates of any authority. `hosts`: its rules for the resolver of names.
    """
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    # No sandbox: tests may run as root in a container without user namespaces, and only load the daemon's own page.
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-proxy-server",
        f"user-data-dir={folder}",
        f"host-resolver-rules={hosts}",
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
    """Return the visible text of an element; empty if it has none yet."""
    return str(page.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)).replace(
        "\u00a0", " "
    )
