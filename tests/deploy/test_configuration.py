"""Options are declared once: pages and the example are made from their declarations, and one module reads the environment."""

import ast
from pathlib import Path

import pytest

from tools.configuration_page import files

ROOT = Path(__file__).parents[2]
READERS = {"converters/resharder/converters/environment.py"}
GRPC = """os.environ.setdefault('GRPC_VERBOSITY', 'NONE')"""
"""Written before the first import of grpc, which reads it then."""


@pytest.mark.parametrize(("path", "text"), [pytest.param(*each, id=each[0].name) for each in files()])
def test_a_table_of_options_is_that_of_their_declarations(path: Path, text: str) -> None:
    assert path.read_text() == text, "run `make docs-configuration`"


def test_clients_and_converters_read_the_environment_in_one_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for side in ("client", "converters")
        for path in sorted((ROOT / side).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in READERS
        for node in reads(ast.parse(path.read_text()))
    ]
    assert found == []


def reads(tree: ast.Module) -> list[ast.Attribute]:
    allowed = {id(inner) for node in ast.walk(tree) if ast.unparse(node) == GRPC for inner in ast.walk(node)}
    named = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    return [node for node in named if id(node) not in allowed]
