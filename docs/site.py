"""MkDocs hooks: make pages of files outside docs/, and turn links to files that have no page into text."""

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


def _from_root(name: str) -> str:
    """Return a file of the root with its links rewritten for a page in docs/."""
    folder = Path(name).parent

    def moved(link: re.Match[str]) -> str:
        to = (folder / link["to"]).as_posix()
        page = next((page for page, source in PAGES.items() if source == to), None)
        return f"]({page or (to.removeprefix('docs/') if to.startswith('docs/') else '../' + to)}"

    return re.sub(r"\]\((?!https?://|#)(?P<to>[^)#]+)", moved, (ROOT / name).read_text())
