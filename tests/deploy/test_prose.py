"""Docstrings, comments, messages and pages keep the rules of prose that a machine can check (`python -m tools.prose`)."""

from tools.prose import check, incomplete, pages, sources, undocumented


def test_prose_keeps_the_rules() -> None:
    violations = [violation for path in [*sources(), *pages()] for violation in check(path)]
    assert [f"{file}:{line}: {rule}" for file, line, rule in violations] == []


def test_definitions_have_docstrings() -> None:
    found = [f"{file}:{line}: {rule}" for path in sources() for file, line, rule in undocumented(path)]
    print(f"{len(found)} public definitions have no docstring")
    assert found == []


def test_the_public_api_names_arguments_and_results() -> None:
    assert [f"{file}:{line}: {rule}" for file, line, rule in incomplete()] == []
