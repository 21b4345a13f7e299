"""The listed faults fit the code as it is, so that `make sabotage` does not learn of a renamed line after minutes."""

import re

import pytest

from tools.sabotage.main import ROOT, Sabotage, sabotages


@pytest.mark.parametrize("sabotage", sabotages(), ids=lambda sabotage: sabotage.name)
def test_a_fault_replaces_a_text_that_its_file_has_once_and_names_a_test_that_exists(sabotage: Sabotage) -> None:
    for edit in sabotage.edits:
        assert (ROOT / edit.file).read_text().count(edit.find) == 1, f"{edit.file}: {edit.find!r}"
    if sabotage.test:
        file, _, name = sabotage.test.partition("::")
        written = (ROOT / file).read_text()  # a whole file, or one test of it
        if name:
            found = re.search(rf"^def {re.escape(name.partition('[')[0])}\(", written, re.MULTILINE)
            assert found
            assert "mark.full" not in written[: found.start()].rpartition("\n\n\n")[2], "`make test` finds it"
