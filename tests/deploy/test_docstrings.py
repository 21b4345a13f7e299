"""Public names are documented."""

import pytest

from tools.docstrings import incomplete, sources, undocumented


def test_definitions_have_docstrings() -> None:
    found = [f"{file}:{line}: {rule}" for path in sources() for file, line, rule in undocumented(path)]
    assert found == []


def test_the_public_api_names_arguments_and_results() -> None:
    pytest.importorskip("vllm", reason="a part of the public API needs it")
    assert [f"{file}:{line}: {rule}" for file, line, rule in incomplete()] == []
