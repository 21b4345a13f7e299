"""Take docs/images/status*.png: the status page of a real daemon with simulated servers. Needs Debian's Chromium.

python -m tools.screenshot
python -m tools.screenshot --scenes /tmp/scenes     # instead, every scene of tests/support/page_scenes.py, to look at
"""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.support.browser import NARROW, WIDE, browser, resize
from tests.support.daemon import Daemon
from tests.support.page_scenes import SCENES, scene
from tests.support.populated_daemon import populated
from tests.support.ports import free_port

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

ROOT = Path(__file__).parents[1]
SHOTS = (("", WIDE, False), ("-dark", WIDE, True), ("-narrow", NARROW, False), ("-narrow-dark", NARROW, True))


def take(folder: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with (
        tempfile.TemporaryDirectory() as profile,
        Daemon(web_listen=listen, lease_seconds=600) as daemon,
        populated(daemon),
        browser(Path(profile)) as page,
    ):
        page.get(f"http://{listen}/")
        wait_for_link(page, "live")
        shoot(page, folder, "status")


def take_scenes(folder: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        for name in names or SCENES:
            with scene(name) as shown:
                page.get(shown.url)
                wait_for_link(page, "live")
                if "away" in name:
                    shown.end()
                    wait_for_link(page, "not connected")
                shoot(page, folder, name.replace(" ", "-"))


def wait_for_link(page: "Chrome", text: str) -> None:
    WebDriverWait(page, 60).until(lambda page: page.find_element(By.ID, "link").text == text)


def shoot(page: "Chrome", folder: Path, name: str) -> None:
    for suffix, size, dark in SHOTS:
        resize(page, size, dark=dark)
        height = page.execute_script("return document.documentElement.scrollHeight")
        resize(page, (size[0], height), dark=dark)
        page.save_screenshot(str(folder / f"{name}{suffix}.png"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--scenes"]:
        Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
        take_scenes(Path(sys.argv[2]), sys.argv[3:])
        sys.exit()
    with tempfile.TemporaryDirectory() as made:
        take(Path(made))
        for name, height in (("status", 1190), ("status-narrow", 1700)):  # down to the versions
            picture = ROOT / "docs" / "images" / f"{name}.png"
            shot = Image.open(Path(made) / f"{name}.png").convert("RGB")
            shot.crop((0, 0, shot.width, min(height, shot.height))).quantize(128).save(picture, optimize=True)
            print(picture)
