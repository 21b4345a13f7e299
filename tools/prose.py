"""Check the rules of prose that a machine can check: first words of docstrings, banned words, missing docstrings.

`python -m tools.prose [PATH ...]` prints each violation as `file:line: rule` and then the counts. docs/glossary.md has the terms.
"""

import argparse
import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from resharder import client

ROOT = Path(__file__).parent.parent
PACKAGES = ("client", "server", "converters")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "docs/*.md")
FIRST_WORDS = {"What", "Whoever", "Who", "Of", "Those", "As", "Has", "By"}
BANNED = re.compile(
    r"\b(whoever|nobody|somebody|those (?:that|who|which)"
    r"|says|said|hears|heard|knows|knew|wants|tells|told|speaks|thinks|forgets|remembers"
    r"|turnstile|undisturbed|unswept|lanes|by the way|rooms?"
    r"|proves?|proven|proving|anybody|no more|any more)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.DOTALL)


class Violation(NamedTuple):
    file: str
    line: int
    rule: str


def check(path: Path) -> Iterator[Violation]:
    """Yield the violations of one Python file or Markdown page."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    if path.suffix == ".md":
        yield from _banned(name, _blanked(text), 1)
        return
    tree = ast.parse(text)
    docstrings = list(_docstrings(tree))
    for docstring in docstrings:
        first = docstring.value.split()[0] if docstring.value.split() else ""
        if first in FIRST_WORDS:
            yield Violation(name, docstring.lineno, f"docstring begins with {first!r}")
        yield from _banned(name, _blanked(docstring.value), docstring.lineno)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
            and node.value.count(" ") >= 2
        ):
            yield from _banned(name, _blanked(node.value), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _banned(name, _blanked(token.string), token.start[0])


def undocumented(path: Path) -> Iterator[Violation]:
    """Yield the public classes and functions of a file that have no docstring."""
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    for owner, node in _definitions(tree):
        if not node.name.startswith("_") and not owner.startswith("_") and ast.get_docstring(node) is None:
            yield Violation(name, node.lineno, f"no docstring: {node.name}")


def incomplete() -> Iterator[Violation]:
    """Yield the functions of the public API, `resharder.client`, that lack `Args:` or `Returns:`."""
    for name in client.__all__:
        exported = getattr(client, name)
        members = [inspect.getattr_static(exported, name) for name in dir(exported)] if inspect.isclass(exported) else [exported]
        functions = (member.__func__ if isinstance(member, classmethod) else member for member in members)
        for function in functions:
            if inspect.isfunction(function) and function.__module__.startswith("resharder") and function.__name__[0] != "_":
                yield from _incomplete(inspect.unwrap(function))


def _incomplete(function: FunctionType) -> Iterator[Violation]:
    signature, text = inspect.signature(function), inspect.getdoc(function) or ""
    where = str(Path(function.__code__.co_filename).relative_to(ROOT)), function.__code__.co_firstlineno
    if signature.parameters.keys() - {"self", "cls"} and "Args:" not in text:
        yield Violation(*where, f"no Args: {function.__qualname__}")
    if signature.return_annotation not in (None, "None", signature.empty) and not re.search(r"\b(Returns?|Yields?)\b", text):
        yield Violation(*where, f"no Returns: {function.__qualname__}")


def sources(folders: Iterable[str] = PACKAGES) -> list[Path]:
    """Return the Python files below folders of the root, without generated code."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def pages() -> list[Path]:
    """Return the pages of the documentation. The changelog and results keep the words of their time."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (name of the class, definition) of a module's definitions and of its classes' methods."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield "", node
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from ((node.name, method) for method in methods)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module: its own, and those of definitions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.value


def _blanked(text: str) -> str:
    """Return the text without code, links' targets and comments, its lines kept."""
    return _CODE.sub(lambda found: "\n" * found.group().count("\n") + " ", text)


def _banned(name: str, text: str, first_line: int) -> Iterator[Violation]:
    for found in BANNED.finditer(text):
        yield Violation(name, first_line + text.count("\n", 0, found.start()), f"banned word: {found.group()!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="also list definitions without docstring, Args or Returns")
    arguments = parser.parse_args()
    given = [file for path in arguments.paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    files = [path.resolve() for path in given if "_pb2" not in path.name] or [*sources(), *pages()]
    counts = Counter[str]()
    for path in files:
        missing = list(undocumented(path)) if path.suffix == ".py" else []
        found = list(check(path))
        counts.update(violation.rule.partition(":")[0].partition(" '")[0] for violation in [*found, *missing])
        for violation in [*found, *(missing if arguments.all else [])]:
            print(f"{violation.file}:{violation.line}: {violation.rule}")
    if not arguments.paths:
        found = list(incomplete())
        counts.update(violation.rule.partition(":")[0] for violation in found)
        for violation in found if arguments.all else []:
            print(f"{violation.file}:{violation.line}: {violation.rule}")
    print(*(f"{count:6} {rule}" for rule, count in counts.most_common()), sep="\n")


if __name__ == "__main__":
    main()
