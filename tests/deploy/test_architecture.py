"""The pages about the tree name files that exist, and the tree keeps to its bounds."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:client|server|converters)/[\w/.]+)`")
SOURCES = [path for side in ("client", "server", "converters") for path in (ROOT / side).rglob("*.py")]
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if "fake_te" not in path.parts]
LINES, TEST_LINES, METHODS = 400, 600, 20


@pytest.mark.parametrize("page", ["one-tensor.md", "architecture.md"])
def test_every_path_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 10
    folders = {path: (ROOT / path.partition("/")[0] / "resharder", ROOT / "tests", ROOT) for path in named}
    assert [path for path in named if not any((folder / path).exists() for folder in folders[path])] == []


def test_every_folder_says_what_it_is_for() -> None:
    packages = {path.parent for path in SOURCES} - {ROOT / side / "resharder" / side for side in ("server", "converters")}
    without = [folder for folder in packages if not (folder / "__init__.py").read_text().startswith('"""')]
    assert without == []


def classes() -> list[tuple[str, ast.ClassDef]]:
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}
    return [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_a_class_name_is_used_once() -> None:
    names = Counter(node.name for _, node in classes())
    assert [name for name, count in names.items() if count > 1] == []


def test_files_and_classes_keep_to_their_bounds() -> None:
    long = {str(path.relative_to(ROOT)) for path in SOURCES if path.read_text().count("\n") > LINES}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    big = {name for name, node in classes() if sum(isinstance(inner, functions) for inner in node.body) > METHODS}
    assert long | big == set()


def test_test_files_keep_to_their_bound() -> None:
    assert [str(path.relative_to(ROOT)) for path in TESTS if path.read_text().count("\n") > TEST_LINES] == []


def test_no_test_module_imports_another() -> None:
    imports = re.compile(r"^from tests(?!\.support)[.\w]*\.test_|^from tests(?!\.support)[.\w]+ import test_", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in TESTS if imports.search(path.read_text())] == []
