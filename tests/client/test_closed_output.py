"""Outputs that nobody reads: `| head -1`, `>&-` and a full disk, for every command and for the daemons' help."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
import structlog
from resharder.client import cli
from resharder.converters.printable import CLOSED, printable_output
from resharder.server import main
from resharder.server.logs import configure_logs
from resharder.server.node import main as node_main

from tests.support.command import Done, running
from tests.support.fake_operator import FakeOperator
from tests.support.hostile_operator import COMMANDS, Hostile, command_id
from tests.support.variants import sampled

FOLLOWING = (("watch",), ("watch", "--json"), ("watch", "--wide"), ("events", "--follow"), ("fleet", "show", "--watch"))
HELP = (("--help",), ("--version",), ("gc", "--help"))
SILENT = ("import", "update")  # they end before they print anything


@pytest.fixture(scope="module")
def daemon() -> Iterator[FakeOperator]:
    with Hostile() as fake:
        yield fake


def into_broken_pipe(run: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> Done:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken, redirect_stdout(broken), pytest.raises(SystemExit) as end:
        run()
    return Done(int(end.value.code or 0), *capsys.readouterr())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] not in SILENT], ids=command_id)
def test_a_command_whose_reader_has_gone_ends_without_a_word(
    daemon: Hostile, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = into_broken_pipe(lambda: cli.main([*command, "--endpoint", daemon.endpoint]), capsys)
    if done.code in (2, 4):
        assert done.err.startswith("resharder: "), "it failed before it had anything to write"
    else:
        assert (done.code, done.err) == (CLOSED, "")


@pytest.mark.parametrize("command", HELP, ids=command_id)
def test_help_whose_reader_has_gone_ends_without_a_word(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert into_broken_pipe(lambda: cli.main(command), capsys) == (CLOSED, "", "")


def shell(line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the shell's `line`, in which "$@" is the command."""
    command = ["bash", "-o", "pipefail", "-c", line, "bash", sys.executable, "-m", "resharder.client", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


SHELL = ['"$@" >&-', '"$@" >&- <&-', '"$@" >&- 2>&-']


@pytest.mark.parametrize("line", sampled(SHELL, SHELL[:1]))
def test_a_command_with_closed_outputs_does_its_work(daemon: Hostile, line: str) -> None:
    done = shell(line, "status", "--endpoint", daemon.endpoint)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_one_line(daemon: Hostile) -> None:
    done = shell('"$@" >/dev/full', "status", "--endpoint", daemon.endpoint)
    assert done.returncode == 2
    assert done.stderr == "resharder: cannot write the output: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("main", [main.main, node_main.main], ids=["resharderd", "resharder-node"])
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_daemons_help_whose_reader_has_gone_ends_without_a_word(
    main: Callable[[], None], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", option])
    assert into_broken_pipe(main, capsys) == (CLOSED, "", "")


def test_daemons_start_with_closed_outputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (main.main, node_main.main):
        monkeypatch.setattr(sys, "argv", ["command", "--help"])
        monkeypatch.setattr(sys, "stdout", None)
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == 0
    monkeypatch.setattr(sys, "stderr", None)
    with printable_output("resharderd"):
        configure_logs("console", "info")
        structlog.get_logger().info("listening")
    structlog.reset_defaults()


def test_a_log_without_a_reader_fails_no_call() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken, redirect_stderr(broken):
        configure_logs("console", "info")
        structlog.get_logger().info("listening")
        structlog.reset_defaults()
        with suppress(BrokenPipeError):
            broken.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), broken.fileno())


@pytest.mark.parametrize("command", FOLLOWING, ids="-".join)
def test_a_follower_ends_when_its_reader_goes_not_at_the_next_change(daemon: Hostile, command: tuple[str, ...]) -> None:
    with running([*command, "--endpoint", daemon.endpoint], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == CLOSED
        assert process.stderr.read() == ""
