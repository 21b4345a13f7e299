"""Edit the family tables one place at a time and run the tests: an edit that no test notices is a survivor.

    python -m tools.mutants [--only gemma2.py] [--guards] [TEST ...]

Edits: a call of `refuse` deleted, one of its options renamed, a name at the end of a call changed, a number or a boolean
changed, a `+` or `*` exchanged, a side of `a | b` dropped. Functions that build models (recipes) are left
out. The heavy modules are imported once; each edit is tested in a fork, which reads the edited source instead of the file: no
file is ever changed. Exit code 1 if an edit survives.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "resharder.converters.architectures"
FOLDER = ROOT / "converters/resharder/converters/architectures"
TESTS = ("tests/converters/test_tables.py", "tests/converters/test_checkpoint.py", "tests/converters/test_agreement.py")
LIMIT = 120  # seconds for one edit
LEFT_OUT = {"agreement.py", "recipe.py", "__init__.py"}


class Mutant(NamedTuple):
    file: Path
    line: int
    edit: str
    source: str


def mutants(file: Path) -> Iterator[Mutant]:
    """Every edit of a file."""
    text = file.read_text()
    tree = ast.parse(text)
    for node in (inner for top in tree.body if not _is_recipe(top) for inner in ast.walk(top)):
        for edit, start, end, new in _edits(node, text):
            yield Mutant(file, text.count("\n", 0, start) + 1, edit, text[:start] + new + text[end:])


def _is_recipe(node: ast.stmt) -> bool:
    return (isinstance(node, ast.FunctionDef) and "recipe" in node.name) or isinstance(node, ast.Import | ast.ImportFrom)


def _edits(node: ast.AST, text: str) -> Iterator[tuple[str, int, int, str]]:
    """What is edited, from where to where, and the new text."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id="refuse"))):
            yield "refuse deleted", *_span(node, text), "pass"
        case ast.Call(func=ast.Name(id="refuse"), args=[_, *options]):
            for option in options:
                yield "option renamed", *_span(option, text), "'no_such_option'"
        case ast.Call(args=[*_, ast.Constant(value=str(name))]) if name.isidentifier():
            yield f"{name} renamed", *_span(node.args[-1], text), repr(f"{name}_x")
        case ast.Constant(value=bool(value)):
            yield f"{value} negated", *_span(node, text), repr(not value)
        case ast.Constant(value=int(value)):
            yield f"{value} made {value + 1}", *_span(node, text), repr(value + 1)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield "right side dropped", *_span(node, text), f"({_text(left, text)})"
            yield "left side dropped", *_span(node, text), f"({_text(right, text)})"
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            sign = "*" if isinstance(op, ast.Add) else "+"
            yield f"made {sign}", *_span(node, text), f"({_text(left, text)} {sign} {_text(right, text)})"
        case _:
            return


def _span(node: ast.expr | ast.stmt, text: str) -> tuple[int, int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _text(node: ast.expr, text: str) -> str:
    start, end = _span(node, text)
    return text[start:end]


class _Edited(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another source."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.mutant = f"{PACKAGE}.{mutant.file.stem}", mutant

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, str(self.mutant.file), "exec"), vars(module))


def survives(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether every test passes on the edit."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.meta_path.insert(0, _Edited(mutant))
        import pytest

        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="FILE", help="a file's name, or several")
    parser.add_argument("--guards", action="store_true", help="the edits of refuse() alone")
    parser.add_argument("tests", nargs="*", default=TESTS, metavar="TEST")
    asked = parser.parse_args()
    import tests.support.megatron_shim  # noqa: F401, I001
    import megatron.core.models.gpt  # noqa: F401
    import transformers  # noqa: F401

    same = FOLDER / "gemma2.py"
    if not survives(Mutant(same, 0, "none", same.read_text()), asked.tests):
        print("the tests fail without an edit")
        return 2
    files = [
        file for file in sorted(FOLDER.glob("*.py")) if file.name not in LEFT_OUT and (not asked.only or file.name in asked.only)
    ]
    wanted = [
        mutant
        for file in files
        for mutant in mutants(file)
        if not asked.guards or mutant.edit in ("refuse deleted", "option renamed")
    ]
    alive = 0
    for mutant in wanted:
        if survives(mutant, asked.tests):
            alive += 1
            print(f"survived: {mutant.file.name}:{mutant.line}: {mutant.edit}", flush=True)
    print(f"{len(wanted) - alive} killed, {alive} survived")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
