"""A release of Resharder: the number in every file that names it, and the notes made of the changelog. docs/releasing.md.

python -m tools.release 0.3.0     # write the number everywhere, and cut the changelog's unreleased part under it
python -m tools.release notes     # print the notes of the number in pyproject.toml
"""

import datetime
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NUMBER = r"\d+\.\d+\.\d+"
_NAMED = re.compile(
    r'(?P<before>^version = "|^version: |^appVersion: "|resharderd:|resharder-(?:vllm|sglang):|newTag: |\bresharder-|'
    r"user-agent: resharder/)"
    rf"(?P<number>{_NUMBER})",
    re.M,
)
"""The project's version, the chart's, images and their tags in manifests, wheels, and what clients call themselves."""
_UNRELEASED = "## [Unreleased]\n"
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]+)[^)]*\)")


def number(root: Path = ROOT) -> str:
    """Return the release in pyproject.toml."""
    found: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return found


def named(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield each file that names a release, with the number it names."""
    for path in (root / "pyproject.toml", *sorted((root / "docs").rglob("*.md")), *sorted((root / "deploy").rglob("*"))):
        if path.is_file():
            yield from ((path, found["number"]) for found in _NAMED.finditer(path.read_text()))


def begin(release: str, root: Path = ROOT) -> None:
    """Write the number of a release everywhere, and put what the changelog has as unreleased under it.

    Raises:
        ValueError: it is no number of a release, or nothing is unreleased.
    """
    if not re.fullmatch(_NUMBER, release):
        raise ValueError(f"{release} is not a version such as 0.3.0")
    changelog = root / "CHANGELOG.md"
    before, found, after = changelog.read_text().partition(_UNRELEASED)
    if not found or after.lstrip().startswith("## "):
        raise ValueError(f"CHANGELOG.md has nothing under {_UNRELEASED.strip()}: write what users will notice")
    changelog.write_text(f"{before}{_UNRELEASED}\n## {release} - {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n{after}")
    for path in {path for path, _ in named(root)}:
        path.write_text(_NAMED.sub(rf"\g<before>{release}", path.read_text()))


def notes(root: Path = ROOT) -> str:
    """Return the notes of the release in pyproject.toml. Links into the repository become text: notes are read elsewhere.

    Raises:
        ValueError: the changelog does not have the release, or this commit has the tag of another one.
    """
    release = number(root)
    found = re.search(
        rf"^## {re.escape(release)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(), re.M | re.S
    )
    if not found:
        raise ValueError(f"CHANGELOG.md has no dated heading for {release}: run `python -m tools.release {release}`")
    listed = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=root, capture_output=True, text=True)
    if (tags := listed.stdout.split()) and f"v{release}" not in tags:
        raise ValueError(f"this commit is tagged {', '.join(tags)}, and pyproject.toml has {release}: tag it v{release}")
    return f"# Resharder {release}\n\n" + _LINK.sub(r"\1 (\2)", found[1]).strip() + "\n"


def main(what: str) -> None:
    try:
        if what == "notes":
            print(notes(), end="")
        else:
            begin(what)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
