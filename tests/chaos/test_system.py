"""A server counts as booted once it serves, or once an order of an operator holds its gate shut."""

import pytest

from tests.chaos.system import booted
from tests.support.vllm_server import Response


def refused(reason: str) -> Response:
    return Response(503, {}, f'{{"error": {{"message": "not serving: {reason}", "code": 503}}}}'.encode())


@pytest.mark.parametrize(
    "reason", ["an operator put the server to sleep", "an operator put it to sleep", "drained for maintenance"]
)
def test_a_server_that_an_operator_holds_has_booted(reason: str) -> None:
    assert booted(refused(reason))


@pytest.mark.parametrize("reason", ["no version is confirmed yet", "its version is not confirmed yet", "the lease ended"])
def test_a_server_without_a_confirmed_version_has_not_booted(reason: str) -> None:
    assert not booted(refused(reason))


def test_a_server_that_serves_has_booted() -> None:
    assert booted(Response(200, {}, b""))
    assert not booted(Response(500, {}, b""))
