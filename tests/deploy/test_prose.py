"""Docstrings, comments, messages and pages keep the rules of prose that a machine can check (`python -m tools.prose`)."""

from tools.prose import check, incomplete, pages, sources, undocumented

UNDOCUMENTED, INCOMPLETE = 450, 0
"""Bounds on definitions without docstring, and on functions of the public API without Args or Returns. They only shrink."""


def test_prose_keeps_the_rules() -> None:
    violations = [violation for path in [*sources(), *pages()] for violation in check(path)]
    assert [f"{file}:{line}: {rule}" for file, line, rule in violations] == []


def test_definitions_have_docstrings() -> None:
    found = [violation for path in sources() for violation in undocumented(path)]
    print(f"{len(found)} public definitions have no docstring")
    assert len(found) <= UNDOCUMENTED, "document new definitions: python -m tools.prose --all"


def test_the_public_api_names_arguments_and_results() -> None:
    found = [f"{file}:{line}: {rule}" for file, line, rule in incomplete()]
    assert len(found) <= INCOMPLETE, found
