"""The log of refused calls."""

from typing import Any
from unittest.mock import sentinel

from resharder.server.security.access import Access
from resharder.server.security.limits import Limits
from resharder.server.state.errors import FailedPrecondition
from structlog.testing import capture_logs

JOIN = "/resharder.v1.DirectService/JoinTransfer"


def noted(*reasons: str, at: tuple[float, ...] = ()) -> list[Any]:
    """The reasons that are logged, of refusals of one method at these times."""
    times = iter(at or range(len(reasons)))
    access = Access(None, Limits(0, 1024), 1 << 30, sentinel.world, clock=lambda: next(times))
    with capture_logs() as logs:
        for port, reason in enumerate(reasons):
            access.note(JOIN, f"ipv4:127.0.0.1:{port}", FailedPrecondition(reason, "because"))
    return [log["reason"] for log in logs]


def test_a_refusal_is_logged_once_a_minute_for_a_method_and_a_host() -> None:
    assert noted("TOO_MANY_KEYS", "TOO_MANY_KEYS") == ["TOO_MANY_KEYS"]
    assert noted("TOO_MANY_KEYS", "TOO_MANY_KEYS", at=(0.0, 60.0)) == ["TOO_MANY_KEYS", "TOO_MANY_KEYS"]


def test_a_refusal_that_a_worker_answers_with_its_next_step_is_no_warning() -> None:
    assert noted("MEMORY_UNKNOWN", "NOT_OFFERED", "TOO_MANY_KEYS") == ["TOO_MANY_KEYS"]
