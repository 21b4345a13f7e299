"""The documentation's site: the hooks' changes to its pages, and the copy button in a real Chromium."""

import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import markdown
import pytest

from tests.support.browser import browser, needs_browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site.py"
PAGE = """
```console
$ resharder status
daemon … at 127.0.0.1:7677, started …Z

…
$ for i in "1"; do \\
    resharder update --wait; done
policy targets latest
```

```python
print("$ stays")
```
"""


def test_the_copy_button_of_a_session_copies_its_commands_without_prompts_and_output() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", SITE)
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    made = hooks.with_commands_to_copy(markdown.markdown(PAGE, extensions=["pymdownx.highlight", "pymdownx.superfences"]))
    copied = [unescape(each) for each in re.findall(r'data-copy="([^"]*)"', made)]
    assert copied == ['resharder status\nfor i in "1"; do \\\n    resharder update --wait; done']


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Serve files over plain HTTP, and return the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("secure", [True, False], ids=["secure context", "plain HTTP"])
@pytest.mark.process  # Chromium
def test_a_click_on_the_copy_button_of_the_quickstart_copies_commands_that_can_be_pasted(secure: bool, tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from selenium.webdriver import Keys
    from selenium.webdriver.common.by import By

    needs_browser()
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "start.md", tmp_path / "docs")
    paths = {"docs_dir": str(tmp_path / "docs"), "site_dir": str(tmp_path / "site")}
    build(load_config(str(ROOT / "mkdocs.yml"), **paths, nav=[{"Start": "start.md"}], plugins=["search"], strict=False))
    # A page that has no clipboard of its own: Chromium takes 127.0.0.1 for a secure context, and another name for none.
    host = "127.0.0.1" if secure else "docs.test"
    with served(tmp_path / "site") as port, browser(tmp_path / "profile", hosts="MAP docs.test 127.0.0.1") as page:
        page.get(f"http://{host}:{port}/start.html")
        assert page.execute_script("return window.isSecureContext") == secure
        block = page.find_element(By.XPATH, "//pre[contains(., 'vllm.entrypoints')]/..")
        block.find_element(By.CSS_SELECTOR, "button").click()
        page.execute_script("document.body.replaceChildren(document.createElement('textarea'))")
        box = page.find_element(By.CSS_SELECTOR, "textarea")
        box.send_keys(Keys.CONTROL, "v")
        copied = box.get_property("value")
    assert copied == "\n".join(
        [
            "resharder fetch-config config",
            "export VLLM_PLUGINS=resharder",
            "python -m vllm.entrypoints.openai.api_server --model config --load-format resharder --port 8000 \\",
            "    --dtype float32 --enforce-eager --kv-cache-memory-bytes 64M &",
            "until curl -sf localhost:8000/health; do sleep 1; done",
            "curl -si localhost:8000/v1/completions -H 'Content-Type: application/json' \\",
            """    -d '{"prompt": "Who are you ?", "temperature": 0}'""",
        ]
    )
