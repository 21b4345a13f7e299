"""The number of a release and its notes: one number everywhere, and notes from the changelog."""

import subprocess
from pathlib import Path

import pytest

from tools.release import ROOT, begin, named, notes, number

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- A thing. [Install](docs/install.md#wheel), [elsewhere](https://example.org).

## 0.2.0 - 2026-11-27

- Older.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("docs", "deploy"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\ndependencies = ["grpcio>=1.71.2"]\n')
    (tmp_path / "docs" / "install.md").write_text("pip install 'dist/resharder-0.2.0-py3-none-any.whl', a daemon of 0.1.0\n")
    (tmp_path / "deploy" / "compose.yaml").write_text("image: resharderd:0.2.0\nimage: grafana/grafana:11.6.0\n")
    (tmp_path / "deploy" / "Chart.yaml").write_text(
        'apiVersion: v2\nversion: 0.2.0\nappVersion: "0.2.0"\nkubeVersion: ">=1.29.0-0"\n'
    )
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_pages_and_manifests_name_the_release_of_pyproject() -> None:
    other = {f"{path.relative_to(ROOT)}: {found}" for path, found in named() if found != number()}
    assert not other, "python -m tools.release writes them"


def test_a_release_has_one_number_everywhere_and_what_was_unreleased(root: Path) -> None:
    begin("0.3.0", root)
    assert number(root) == "0.3.0"
    assert {found for _, found in named(root)} == {"0.3.0"}
    assert "a daemon of 0.1.0" in (root / "docs" / "install.md").read_text()
    assert (root / "deploy" / "Chart.yaml").read_text().count("0.3.0") == 2
    assert "grafana:11.6.0" in (root / "deploy" / "compose.yaml").read_text()
    assert ">=1.71.2" in (root / "pyproject.toml").read_text()
    headings = [line for line in (root / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    assert headings[1].startswith("## 0.3.0 - 20")
    assert (
        notes(root)
        == "# Resharder 0.3.0\n\n### Added\n\n- A thing. Install (docs/install.md), [elsewhere](https://example.org).\n"
    )


@pytest.mark.parametrize("release", ["v0.3.0", "0.3", "notes"])
def test_what_is_no_number_of_a_release_is_refused(root: Path, release: str) -> None:
    with pytest.raises(ValueError, match="not a version such as"):
        begin(release, root)


def test_a_release_of_nothing_is_refused(root: Path) -> None:
    begin("0.3.0", root)
    with pytest.raises(ValueError, match="nothing under"):
        begin("0.4.0", root)


def test_a_number_without_a_part_of_the_changelog_has_no_notes(root: Path) -> None:
    (root / "pyproject.toml").write_text('[project]\nversion = "0.4.0"\n')
    with pytest.raises(ValueError, match=r"no dated heading for 0\.4\.0"):
        notes(root)


def test_a_commit_that_is_tagged_as_another_release_has_no_notes(root: Path) -> None:
    commit = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "commit", "-q", "--allow-empty", "-m", "Release"]
    for command in (["init", "-q"], commit, ["tag", "v0.3.0"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    with pytest.raises(ValueError, match=r"tagged v0\.3\.0, and pyproject\.toml has 0\.2\.0"):
        notes(root)
    subprocess.run(["git", "tag", "v0.2.0"], cwd=root, check=True)
    assert notes(root).startswith("# Resharder 0.2.0")
