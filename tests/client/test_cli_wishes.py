"""What operators type becomes a Want and a Motion, or one clear error."""

import pytest
from resharder.client.cli import format
from resharder.client.cli.options import MotionOptions, motion_of, want_of
from resharder.client.errors import UsageError
from resharder.v1 import resources_pb2

Motion, Want = resources_pb2.Motion, resources_pb2.Want


@pytest.mark.parametrize(
    ("text", "every", "want", "said"),
    [
        ("latest", None, Want(kind=Want.LATEST), "latest"),
        ("latest", 60.0, Want(kind=Want.LATEST, every_seconds=60), "latest, one move in 60 s"),
        ("12", None, Want(kind=Want.NUMBER, version=12), "version 12"),
        ("none", None, Want(kind=Want.NONE), "none"),
    ],
)
def test_a_want_is_typed_and_said_again(text: str, every: float | None, want: resources_pb2.Want, said: str) -> None:
    assert want_of(text, every) == want
    assert format.want(want) == said


@pytest.mark.parametrize(
    ("options", "motion", "said"),
    [
        (MotionOptions(), None, ""),
        (MotionOptions(all_at_once=True), Motion(kind=Motion.ALL_AT_ONCE), "all at once"),
        (MotionOptions(atomic=True), Motion(kind=Motion.ATOMIC), "atomically"),
        (
            MotionOptions(rolling=2, max_failures=3),
            Motion(kind=Motion.ROLLING, at_a_time=2, max_failures=3),
            "2 at a time, stops after 3 failures",
        ),
        (
            MotionOptions(canary=1, rolling=4, hold=30, approve=True, check="smoke"),
            Motion(kind=Motion.CANARY, canaries=1, at_a_time=4, hold_seconds=30, approval=True, check="smoke"),
            "1 server first, held for 30 s and approval and check smoke, then 4 at a time, stops after 1 failure",
        ),
    ],
)
def test_a_motion_is_typed_and_said_again(options: MotionOptions, motion: resources_pb2.Motion | None, said: str) -> None:
    assert motion_of(options) == motion
    assert motion is None or format.motion(motion) == said


@pytest.mark.parametrize("text", ["newest", "0", "-1", "1.5", ""])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected `latest`, a version's number or `none`"):
        want_of(text)


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="--every with `latest` alone, got it with '3'"):
        want_of("3", 60)
    for ways in (MotionOptions(all_at_once=True, rolling=1), MotionOptions(atomic=True, canary=1)):
        with pytest.raises(UsageError, match="expected one of --all-at-once"):
            motion_of(ways)
    with pytest.raises(UsageError, match="with --canary K"):
        motion_of(MotionOptions(rolling=1, approve=True))
    with pytest.raises(UsageError, match="--max-failures with"):
        motion_of(MotionOptions(all_at_once=True, max_failures=2))
