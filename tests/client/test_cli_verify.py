"""What `resharder verify` says of each worker, and its exit code."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from resharder.client.cli.check import _verify_code, _verify_line
from resharder.client.operator.answers import Uncompared, Verification

WHOLE = Verification(
    rank=0,
    request="r",
    time=datetime(2026, 1, 1, tzinfo=UTC),
    seconds=0.5,
    version=3,
    tensors=12,
    covered_bytes=16 << 20,
    total_bytes=16 << 20,
    different_tensors=0,
    different=(),
    skipped="",
    digested_bytes=16 << 20,
    uncompared=(),
)
PACKED = Uncompared("a kernel has packed them", 5, 11 << 20, ("q", "k", "v", "o"))


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        (WHOLE, 0, "worker 0: holds version 3 (16.0 MiB of 16.0 MiB compared, 12 tensors, 0.50 s)"),
        (
            replace(WHOLE, covered_bytes=5 << 20, digested_bytes=4 << 20, uncompared=(PACKED,)),
            0,
            "worker 0: the part of version 3 that could be compared is correct "
            "(5.0 MiB of 16.0 MiB compared, 12 tensors, 0.50 s)\n"
            "  1.0 MiB compared with their state after the install, because the engine has changed their format\n"
            "  11.0 MiB not compared (5 tensors: q, k, v, …): a kernel has packed them",
        ),
        (
            replace(
                WHOLE, covered_bytes=0, digested_bytes=0, uncompared=(replace(PACKED, bytes=16 << 20, tensors=1, names=("q",)),)
            ),
            4,
            "worker 0: not verified: nothing of version 3 could be compared (0.0 MiB of 16.0 MiB compared, 12 tensors, 0.50 s)\n"
            "  16.0 MiB not compared (1 tensors: q): a kernel has packed them",
        ),
        (
            replace(WHOLE, different_tensors=1, different=("norm",)),
            1,
            "worker 0: 1 tensors differ from version 3: norm (16.0 MiB of 16.0 MiB compared, 12 tensors, 0.50 s)",
        ),
        (replace(WHOLE, skipped="it sleeps"), 4, "worker 0: not verified: it sleeps"),
    ],
)
def test_a_line_says_how_much_was_compared_and_why_the_rest_was_not(found: Verification, code: int, line: str) -> None:
    assert _verify_line(found) == line
    assert _verify_code([WHOLE, found]) == code
