"""MkDocs hooks: make pages of files outside docs/, turn links to files that have no page into text, and let the copy button of a
session copy its commands alone.
"""

import html
import logging
import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security-policy.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<to>\.\./[^)#]+)(#[^)]*)?\)")
_SESSION = re.compile(r'<pre>(?P<code>(?:(?!</pre>).)*<span class="gp">(?:(?!</pre>).)*)</pre>', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=_from_root(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = PurePosixPath(page.file.src_uri).parent

    def on_site(link: re.Match[str]) -> str:
        to = posixpath.normpath(f"docs/{folder}/{link['to']}")
        made = next((name for name, source in PAGES.items() if source == to), None)
        if made or to.startswith("docs/"):
            return f"[{link['text']}]({posixpath.relpath(made or to.removeprefix('docs/'), folder)}{link[3] or ''})"
        if not (ROOT / to).exists():
            _log.warning("%s: nothing is at %s", page.file.src_uri, link["to"])
        return link["text"]

    return _LINK.sub(on_site, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return with_commands_to_copy(content)


def with_commands_to_copy(content: str) -> str:
    """Give each session its commands as `data-copy`, which the theme's button copies in place of prompts and output."""

    def session(block: re.Match[str]) -> str:
        commands = _commands(html.unescape(_TAG.sub("", block["code"])))
        if not commands:
            return block[0]
        return f'<pre data-copy="{html.escape(commands)}">{block["code"]}</pre>'

    return _SESSION.sub(session, content)


def _commands(text: str) -> str:
    found: list[str] = []
    goes_on = False
    for line in text.splitlines():
        if goes_on or line.startswith("$ "):
            found.append(line if goes_on else line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(found)


def _from_root(name: str) -> str:
    """Return a file of the root with its links rewritten for a page in docs/."""
    folder = Path(name).parent

    def moved(link: re.Match[str]) -> str:
        to = (folder / link["to"]).as_posix()
        page = next((page for page, source in PAGES.items() if source == to), None)
        return f"]({page or (to.removeprefix('docs/') if to.startswith('docs/') else '../' + to)}"

    return re.sub(r"\]\((?!https?://|#)(?P<to>[^)#]+)", moved, (ROOT / name).read_text())
