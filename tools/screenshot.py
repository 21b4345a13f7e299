"""Take docs/images/status*.png: the status page of a real daemon with simulated servers. Needs Debian's Chromium.

python -m tools.screenshot
"""

import tempfile
from pathlib import Path

from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.support.browser import NARROW, WIDE, browser, resize
from tests.support.daemon import Daemon
from tests.support.populated_daemon import populated
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]


def take(folder: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with (
        tempfile.TemporaryDirectory() as profile,
        Daemon(web_listen=listen, lease_seconds=600) as daemon,
        populated(daemon),
        browser(Path(profile)) as page,
    ):
        page.get(f"http://{listen}/")
        WebDriverWait(page, 60).until(lambda page: page.find_element(By.ID, "link").text == "live")
        for name, size, dark in (("status", WIDE, False), ("status-dark", WIDE, True), ("status-narrow", NARROW, False)):
            resize(page, size, dark=dark)
            height = page.execute_script("return document.documentElement.scrollHeight")
            resize(page, (size[0], height), dark=dark)
            page.save_screenshot(str(folder / f"{name}.png"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        take(Path(made))
        for shot in sorted(Path(made).iterdir()):
            picture = ROOT / "docs" / "images" / shot.name
            Image.open(shot).convert("RGB").quantize(64).save(picture, optimize=True)
            print(picture)
