"""What holds for every framework: it is a healthy job."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test, no version of its daemon has a warning in its record."""
    yield
    if "daemon" in request.fixturenames:
        from resharder.client.operator import Operator

        with Operator(request.getfixturevalue("daemon").endpoint) as operator:
            assert {version.name: version.warnings for version in operator.versions() if version.warnings} == {}
