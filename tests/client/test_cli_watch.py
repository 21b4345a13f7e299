"""`watch` and `events --follow`, as processes: they go on until Ctrl-C."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from resharder.client.cli.watch import Lasting
from resharder.client.errors import DaemonUnreachable
from resharder.v1 import resources_pb2
from rich.console import Console, Group

from tests.support.command import running
from tests.support.fake_operator import FakeOperator
from tests.support.observing import wait_until


@pytest.fixture
def fake() -> Iterator[FakeOperator]:
    server = resources_pb2.Server(name="servers/a", fleet="policy", state=resources_pb2.Server.SERVING, version=1)
    with FakeOperator(resources_pb2.Fleet(name="policy", model="policy", servers=["servers/a"]), servers=[server]) as fake:
        yield fake


def test_on_a_terminal_watch_draws_the_picture_and_ctrl_c_gives_the_screen_back(fake: FakeOperator) -> None:
    ours, theirs = pty.openpty()
    arguments = ["watch", "--every", "0.1", "--endpoint", fake.endpoint]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    with running(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as watching:
        os.close(theirs)
        seen = bytearray()

        def shows(text: bytes) -> bool:
            try:
                seen.extend(os.read(ours, 1 << 16))
            except OSError as error:  # nobody has the terminal open any more
                raise AssertionError(f"watch ended with {watching.wait(60)}, having shown {bytes(seen)!r}") from error
            return text in seen

        wait_until(lambda: shows(b"SERVING"), "the server's state")
        fake.servers[0].reason = "a worker says no"
        wait_until(lambda: shows(b"a worker says no"), "the change")
        watching.send_signal(signal.SIGINT)
        wait_until(lambda: shows(b"\x1b[?1049l"), "the old screen")
        assert watching.wait(60) == 0
    os.close(ours)


def test_watch_keeps_its_last_picture_and_says_since_when_the_daemon_is_away() -> None:
    asked = []

    def look() -> Group:
        asked.append(1)
        if len(asked) == 2:
            raise DaemonUnreachable("connection refused")
        return Group(f"picture {len(asked)}")

    def lines() -> list[str]:
        (to := Console(width=200, file=io.StringIO())).print(lasting())
        return to.file.getvalue().splitlines()  # type: ignore[attr-defined]

    lasting = Lasting(look)
    away = lines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
    assert re.fullmatch(rf"the daemon last answered at {time}; below is what was known then: connection refused", away[0])
    assert away[1:] == ["", "picture 1"]
    assert lines() == ["picture 3"]


def test_events_follow_goes_on_after_what_it_has_told_and_ends_by_ctrl_c(fake: FakeOperator) -> None:
    arguments = ["events", "--follow", "--endpoint", fake.endpoint]
    with running(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        for _ in range(2):  # the fake ends its stream after one event, as a daemon does that restarts
            assert following.stdout.readline() == "1970-01-01 00:00:00Z  models/policy/versions/1  ready\n"
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=60)
        assert following.returncode == 0
    first, second, *_ = fake.asked
    assert [(first.last, first.after), (second.last, second.after)] == [(20, 0), (0, 7)]  # type: ignore[attr-defined]


INTERRUPTED_IN_NEXT = """
import sys, time
from resharder.client import cli

def interrupt(frame, event, argument):
    inside = frame.f_code.co_filename.endswith("grpc/_channel.py") and frame.f_code.co_name == "_next"
    if inside and event == "c_return" and getattr(argument, "__name__", "") == "add":
        sys.setprofile(None)
        raise KeyboardInterrupt

sys.setprofile(interrupt)
try:
    cli.main(["events", "--follow", "--endpoint", sys.argv[1]])
finally:
    time.sleep(0.5)  # in which another thread would poll the closed channel
"""


def test_ctrl_c_that_arrives_within_a_stream_ends_the_command(fake: FakeOperator) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IN_NEXT, fake.endpoint], capture_output=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, b"")


INTERRUPTED_IN_DEL = """
import os, signal, sys, time
from resharder.client import cli

class Call:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def wait(arguments, prog_name):
    call = Call()
    del call
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.app = wait
cli.main()
"""


def test_ctrl_c_that_arrives_in_a_finalizer_ends_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IN_DEL], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (130, "")
