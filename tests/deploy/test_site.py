"""The documentation's site: what its hooks make of the pages."""

import importlib.util
import re
from html import unescape
from pathlib import Path

import markdown

SITE = Path(__file__).parents[2] / "docs" / "site.py"
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
