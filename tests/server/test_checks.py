"""Checks: real commands, in process groups of their own."""

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from resharder.server.config import ConfigError, load
from resharder.server.fleets.canary_checks import Checks, _Run, _Tail, environment
from resharder.server.state.fleet import Fleet, Move, UpdateStrategy
from resharder.v1 import resources_pb2
from structlog.testing import capture_logs

from tests.support.observing import wait_until

Ended = queue.SimpleQueue[tuple[bool, str]]


@pytest.fixture
def run() -> Iterator[Callable[..., Ended]]:
    """Starts one command and gives what it will be told of; `checks` are what it runs in."""
    made: list[Checks] = []

    def start(*command: str, timeout: float = 60, variables: dict[str, str] | None = None) -> Ended:
        ended: Ended = queue.SimpleQueue()
        checks = Checks({"check": command}, timeout)
        made.append(checks)
        checks.start("check", "key", variables or {}, lambda ok, message: ended.put((ok, message)))
        return ended

    yield start
    for checks in made:
        checks.close()


def test_the_exit_code_decides_and_the_last_lines_are_told(run: Callable[..., Ended]) -> None:
    assert run("true").get(timeout=60) == (True, "ended with 0")
    script = "for i in 1 2 3 4 5 6 7; do echo line $i; done; echo it is wrong >&2; exit 3"
    ok, message = run("sh", "-c", script).get(timeout=60)
    assert (ok, message) == (False, "ended with 3: line 4\nline 5\nline 6\nline 7\nit is wrong")
    assert run("sh", "-c", "kill -SEGV $$").get(timeout=60) == (False, "was killed by SIGSEGV")


def test_a_command_is_told_of_its_move_and_gets_nothing_else_of_the_daemon(
    run: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARDERD_SECRET", "no")
    variables = environment("policy", 7, 12, 11, ["10.0.0.1:8000", "10.0.0.2:8000"])
    ok, message = run("sh", "-c", "unset PWD SHLVL _ OLDPWD; env | sort | tail -n 5; env | wc -l", variables=variables).get(
        timeout=60
    )
    assert ok
    assert message.removeprefix("ended with 0: ").splitlines()[:4] == [
        "RESHARDER_FROM_VERSION=11",
        "RESHARDER_MOVE=7",
        "RESHARDER_SERVERS=10.0.0.1:8000,10.0.0.2:8000",
        "RESHARDER_VERSION=12",
    ]
    inherited = {"PATH", "HOME"} & os.environ.keys()
    assert int(message.splitlines()[-1]) == len(variables) + len(inherited)


def test_the_check_of_a_move_starts_once_with_its_fleet_move_versions_and_servers() -> None:
    strategy = UpdateStrategy(resources_pb2.UpdateStrategy.CANARY, check="check")
    move = Move(7, resources_pb2.Move.HOLDING, back_to=11, to=12, strategy=strategy, started=1.0)
    ended: Ended = queue.SimpleQueue()
    script = "unset PATH HOME PWD SHLVL _ OLDPWD; /usr/bin/env | /usr/bin/sort"
    checks = Checks({"check": ["sh", "-c", script]}, 60)
    for fleet in (Fleet("f", "policy"), Fleet("f", "policy", move=move), Fleet("f", "policy", move=move)):
        checks.start_for(fleet, ["10.0.0.1:8000"], lambda ok, message: ended.put((ok, message)))
    expected = "ended with 0: " + "\n".join(
        f"RESHARDER_{name}={value}"
        for name, value in (("FLEET", "f"), ("FROM_VERSION", 11), ("MOVE", 7), ("SERVERS", "10.0.0.1:8000"), ("VERSION", 12))
    )
    assert ended.get(timeout=60) == (True, expected)
    assert list(checks._runs) == ["f/7"]
    checks.close()
    checks.start("check", "later", {}, lambda ok, message: ended.put((ok, message)))
    assert checks._runs == {}
    assert ended.empty()


def test_a_check_whose_end_could_not_be_kept_can_be_started_again() -> None:
    checks, results, refused = Checks({"check": ("true",)}, 60), queue.SimpleQueue[bool](), queue.SimpleQueue[bool]()

    def refuse(ok: bool, message: str) -> None:
        refused.put(ok)
        raise OSError(5, "Input/output error", "fleets/policy.json")

    checks.start("check", "key", {}, refuse)
    assert refused.get(timeout=60)
    wait_until(lambda: not checks._runs)
    checks.start("check", "key", {}, lambda ok, message: results.put(ok))
    assert results.get(timeout=60)
    checks.close()


def test_a_command_runs_in_the_root_folder_and_without_input(run: Callable[..., Ended]) -> None:
    own, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    try:
        ended = run("sh", "-c", "pwd; exec readlink /proc/self/fd/0").get(timeout=60)
    finally:
        os.dup2(own, 0)
        for each in (own, reading, writing):
            os.close(each)
    assert ended == (True, "ended with 0: /\n/dev/null")


def test_no_shell_reads_the_arguments(run: Callable[..., Ended]) -> None:
    assert run("echo", "$HOME", "; false").get(timeout=60) == (True, "ended with 0: $HOME ; false")


def test_a_command_that_takes_too_long_ends_with_all_that_it_started(run: Callable[..., Ended], tmp_path: Path) -> None:
    started = tmp_path / "started"
    ended = run("sh", "-c", f"echo begun; sleep 1000 & echo $! > {started}; wait", timeout=5)
    ok, message = ended.get(timeout=60)
    assert (ok, message) == (False, "did not end within 5 s: begun")
    wait_until(lambda: gone(int(started.read_text())))


def test_what_a_command_leaves_behind_ends_with_it_and_keeps_nobody_waiting(run: Callable[..., Ended], tmp_path: Path) -> None:
    left = tmp_path / "left"
    assert run("sh", "-c", f"sleep 1000 & echo $! > {left}").get(timeout=60) == (True, "ended with 0")
    wait_until(lambda: gone(int(left.read_text())))


def test_a_cancelled_command_is_killed_and_not_told_of(tmp_path: Path) -> None:
    checks, ended = Checks({"slow": ["sh", "-c", f"echo $$ > {tmp_path}/own; exec sleep 1000"]}, 600), Ended()
    for _ in range(2):
        checks.start("slow", "fleets/policy/1", {}, lambda ok, message: ended.put((ok, message)))
        wait_until(lambda: (tmp_path / "own").exists() and (tmp_path / "own").read_text().endswith("\n"))
        process = int((tmp_path / "own").read_text())
        (tmp_path / "own").unlink()
        checks.cancel("fleets/policy/1")
        wait_until(lambda process=process: gone(process), timeout=30)
    checks.close()
    checks.start("slow", "fleets/policy/2", {}, lambda ok, message: ended.put((ok, message)))
    assert ended.empty()
    assert not (tmp_path / "own").exists()


def test_a_killed_command_is_reaped_and_no_signal_is_sent_to_its_id_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run("check", ["sleep", "1000"], {}, timeout=0.2)
    assert run.result() == (False, "did not end within 0.2 s")
    assert run._process is not None
    assert run._process.returncode == -signal.SIGKILL
    sent, plain = list[int](), os.killpg

    def recorded(group: int, number: int) -> None:
        sent.append(group)
        if group != run._process.pid:  # a check that another test cancelled may end now
            plain(group, number)

    monkeypatch.setattr(os, "killpg", recorded)
    run.cancel()
    assert run._process.pid not in sent


def test_a_command_that_is_cancelled_before_it_starts_does_not_run(tmp_path: Path) -> None:
    run = _Run("touch", ["touch", f"{tmp_path}/ran"], {}, 60)
    run.cancel()
    assert run.result() == (False, "it was cancelled")
    assert not (tmp_path / "ran").exists()


def test_the_log_names_each_check_with_its_result_and_why_it_could_not_be_kept() -> None:
    checks, threads = Checks({"check": ("sh", "-c", "echo why; exit 3")}, 60), queue.SimpleQueue[threading.Thread]()

    def refuse(ok: bool, message: str) -> None:
        threads.put(threading.current_thread())
        raise OSError(5, "Input/output error", "fleets/policy.json")

    with capture_logs() as logs:
        checks.start("check", "fleets/logged/1", {}, refuse)
        thread = threads.get(timeout=60)
        thread.join(60)
    assert (thread.name, thread.daemon) == ("check-check", True)  # a check keeps no daemon from its end
    about = {"check": "check", "key": "fleets/logged/1"}
    logs = [line for line in logs if line["key"] == about["key"]]  # a check that another test cancelled may end now
    reason = logs[-1].pop("reason")
    assert "fleets/policy.json" in reason
    assert logs == [
        {"event": "check_started", "log_level": "info", **about},
        {"event": "check_ended", "log_level": "info", "ok": False, "message": "ended with 3: why", **about},
        {"event": "check_not_kept", "log_level": "error", **about},
    ]


def test_a_key_is_run_once_however_often_it_is_started(tmp_path: Path) -> None:
    checks, ended = Checks({"count": ["sh", "-c", f"echo run >> {tmp_path}/runs"]}, 60), Ended()
    for _ in range(3):
        checks.start("count", "fleets/policy/1", {}, lambda ok, message: ended.put((ok, message)))
    assert ended.get(timeout=60)[0]
    checks.start("count", "fleets/policy/1", {}, lambda ok, message: ended.put((ok, message)))
    checks.start("count", "fleets/policy/2", {}, lambda ok, message: ended.put((ok, message)))
    assert ended.get(timeout=60)[0]
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


def test_the_reader_of_outputs_is_a_named_thread_that_keeps_no_daemon_alive() -> None:
    reading, writing = os.pipe()
    tail = _Tail(os.fdopen(reading, "rb"))
    assert (tail._thread.name, tail._thread.daemon) == ("check-output", True)
    os.write(writing, b"one\n\n\xff\n")
    os.close(writing)
    assert tail.lines() == ": one\n\ufffd"


def test_a_message_has_the_last_thousand_characters_of_a_longer_line(run: Callable[..., Ended]) -> None:
    ok, message = run("sh", "-c", "printf a; head -c 1000 /dev/zero | tr '\\0' x").get(timeout=60)
    assert (ok, message) == (True, f"ended with 0: {'x' * 1000}")


def test_endless_output_is_read_and_forgotten(run: Callable[..., Ended]) -> None:
    ok, message = run("sh", "-c", "head -c 50000000 /dev/zero; echo; echo the end").get(timeout=60)
    assert ok
    assert len(message) < 1100
    assert message.endswith("the end")


def test_what_is_no_command_fails_with_a_sentence(run: Callable[..., Ended]) -> None:
    assert run("/no/such/program").get(timeout=60) == (False, "/no/such/program cannot be run: No such file or directory")
    checks, ended = Checks({"one": ["true"], "two": ["true"]}, 60), Ended()
    checks.start("three", "key", {}, lambda ok, message: ended.put((ok, message)))
    assert ended.get(timeout=60) == (False, "the check is not in the daemon's configuration")


def test_commands_are_lists_or_lines_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "resharderd.yaml"
    file.write_text("check_seconds: 30\nchecks:\n  one: [sh, -c, exit 1]\n  two: /bin/check --name 'a b'\n")
    config = load(file, {})
    assert config.checks == {"one": ["sh", "-c", "exit 1"], "two": ["/bin/check", "--name", "a b"]}
    assert config.check_seconds == 30
    for wrong in ("checks: {one: []}", 'checks: {one: "it\'s"}', "checks: [one]", "check_seconds: 0"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="check"):
            load(file, {})


def gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
