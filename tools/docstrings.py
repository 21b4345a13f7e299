"""Find public names without documentation: docstrings, and `Args:` and `Returns:` in the public API.

A method of one statement needs none where it would only repeat the name.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from resharder import client

ROOT = Path(__file__).parent.parent
PACKAGES = ("client", "server", "converters")


class Violation(NamedTuple):
    file: str
    line: int
    rule: str


def undocumented(path: Path) -> Iterator[Violation]:
    """Yield the public classes and functions of a file that have no docstring, except methods of one statement."""
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    for owner, node in _definitions(tree):
        if node.name.startswith("_") or owner.startswith("_") or (owner and len(node.body) == 1):
            continue
        if ast.get_docstring(node) is None:
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


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (name of the class, definition) of a module's definitions and of its classes' methods."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield "", node
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from ((node.name, method) for method in methods)
