"""Failpoints: each declared one is called in exactly one place, and each kind does what it is called."""

import ast
import errno
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.converters import failpoints
from resharder.converters.failpoints import FILE_POINTS, POINTS, arm, failpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm("")


def calls() -> list[str]:
    """The argument of each call of `failpoint` in the sources, and each file point that an object is given for its own call."""
    found = []
    for side in ("client", "server", "converters"):
        for path in (ROOT / side).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                literals = [each.value for each in arguments if isinstance(each, ast.Constant)]
                if not (isinstance(node.func, ast.Name) and node.func.id == "failpoint"):
                    found += [each for each in literals if each in FILE_POINTS]
                elif not (isinstance(arguments[0], ast.Attribute) and arguments[0].attr == "_point"):
                    assert literals, f"{path}:{node.lineno}: expected a literal, or the point that the object was given"
                    found += literals
    return found


def test_every_declared_failpoint_is_called_in_exactly_one_place_and_no_other_is() -> None:
    assert Counter(calls()) == Counter(POINTS)
    assert len(POINTS) >= 40
    assert set(POINTS) >= FILE_POINTS


def test_without_the_variable_no_point_does_anything() -> None:
    assert failpoints._armed == {}
    for name in POINTS:
        failpoint(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_an_error_is_raised_once_and_on_the_pass_that_was_given(kind: str, number: int) -> None:
    arm(f"claim.write@2={kind}")
    failpoint("claim.write")
    failpoint("commit.sync")
    with pytest.raises(OSError, match=r"failpoint claim\.write") as caught:
        failpoint("claim.write")
    assert caught.value.errno == number
    failpoint("claim.write")


def test_with_a_mark_a_point_acts_once_in_all_processes_that_share_it(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    arm("claim.write=eio", mark)
    with pytest.raises(OSError, match=r"claim\.write"):
        failpoint("claim.write")
    arm("claim.write=eio", mark)  # as another process does
    failpoint("claim.write")


def test_several_points_act_each_for_itself_with_a_mark_of_its_own(tmp_path: Path) -> None:
    spec = "claim.write=eio,journal.write@2=enospc"
    for _ in range(2):  # as another process does
        arm(spec, str(tmp_path / "mark"))
        for point, number in (("journal.write", None), ("claim.write", errno.EIO), ("journal.write", errno.ENOSPC)):
            if number is None or (tmp_path / f"mark.{point}").exists():
                failpoint(point)
                continue
            with pytest.raises(OSError, match=point) as caught:
                failpoint(point)
            assert caught.value.errno == number
    assert {path.name for path in tmp_path.iterdir()} == {"mark.claim.write", "mark.journal.write"}


def test_a_delay_is_one_of_this_thread() -> None:
    arm("lease.renew=delay:0.2")
    began = time.monotonic()
    failpoint("lease.renew")
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("spec", ["no.such=kill", "claim.write=explode", "lease.renew=eio", "claim.write", "claim.write@x=kill"])
def test_a_spec_that_names_no_point_or_kind_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        arm(spec)


def process(spec: str) -> subprocess.Popen[str]:
    program = "from resharder.converters.failpoints import failpoint; failpoint('lease.renew'); print('past it')"
    return subprocess.Popen(
        [sys.executable, "-c", program], env={"RESHARDER_FAILPOINT": spec}, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_a_killed_process_ends_as_by_sigkill() -> None:
    with process("lease.renew=kill") as killed:
        assert killed.communicate(timeout=60) == ("", None)
    assert killed.returncode == -signal.SIGKILL


def test_a_stopped_process_stands_still_and_goes_on_by_itself() -> None:
    with process("lease.renew=stop:1") as stopped:
        end = time.monotonic() + 60
        while Path(f"/proc/{stopped.pid}/stat").read_text().rsplit(") ")[-1][0] != "T":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert stopped.communicate(timeout=60) == ("past it\n", None)
    assert stopped.returncode == 0
