"""What mkdocs does besides: pages out of files at the repository's root, which stay where readers of it expect them, and links
that lead out of docs/, where the site has no page: they become text."""

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
GUARANTEES = ("What is guaranteed", "Limits")
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<to>\.\./[^)#]+)(#[^)]*)?\)")
_log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    head, sections = _split(_of_root("README.md"))
    rest = {title: text for title, text in sections.items() if title not in GUARANTEES}
    promised = {title: sections[title] for title in GUARANTEES}
    pages = {
        "index.md": head + "".join(rest.values()),
        "guarantees.md": "# Guarantees and limits\n\n" + "".join(promised.values()),
        "changelog.md": _of_root("CHANGELOG.md"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def as_text(link: re.Match[str]) -> str:
        if not (ROOT / "docs" / link["to"]).exists():
            _log.warning("%s: nothing is at %s", page.file.src_uri, link["to"])
        return link["text"]

    return _LINK.sub(as_text, markdown)


def _of_root(name: str) -> str:
    """With links as from a page in docs/."""
    text = (ROOT / name).read_text().replace("](CHANGELOG.md)", "](changelog.md)").replace("](docs/", "](./")
    return re.sub(r"\]\((?!\./|https?://|#|changelog\.md)", "](../", text).replace("](./", "](")


def _split(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and each section with its heading, by its title."""
    head, *rest = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return head, {part.partition("\n")[0].removeprefix("## "): part for part in rest}
