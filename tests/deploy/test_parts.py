"""The runner of `make test`: what it does when a part fails or takes too long, and where continuous integration begins."""

import re
import sys
from pathlib import Path

import pytest
from resharder.converters.models.megatron.release import TESTED

from tests.support.observing import wait_until
from tools import parts
from tools.parts import REST, TEST, VLLM, Part, Run, rotated, vllm_in_turn


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LOGS", tmp_path)


def shell(name: str, script: str, minutes: float = 1.0, *, beside: bool = False) -> Part:
    return Part(name, ["sh", "-c", script], minutes, beside)


def test_a_part_that_fails_keeps_no_other_from_running_and_the_exit_code_tells(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.all([shell("checks", "exit 3", beside=True), shell("first", "echo the reason; exit 1"), shell("second", "true")])
    assert run.report() == 1
    output = capfd.readouterr().out
    assert "FAILED with 3" in output
    assert "FAILED with 1" in output
    assert "the reason" in output
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("  second")] == ["passed"]


def test_a_command_that_is_not_there_fails(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.all([Part("missing", ["/no/such/program"], 1.0), shell("next", "true")])
    assert run.report() == 1
    assert "/no/such/program" in capfd.readouterr().out


def test_a_part_whose_program_is_not_here_or_does_not_start_is_said_not_to_have_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "python9.9"
    launcher.write_text("#!/bin/sh\nexit 127\n")
    launcher.chmod(0o755)
    run = Run()
    run.all([Part(needs, ["false"], 1.0, needs=needs) for needs in ("/no/such/program", str(launcher))])
    run.all([Part("shell", ["true"], 1.0, needs=sys.executable)])
    assert run.report() == 0
    told = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("  ")]
    assert [" ".join(line[2:]) for line in told] == [
        "not run: there is no /no/such/program here",
        f"not run: there is no {launcher} here",
        "passed",
    ]


def test_a_run_of_parts_that_pass_passes() -> None:
    run = Run()
    run.all([shell("one", "true"), shell("two", "true")])
    assert run.report() == 0


def test_a_part_that_hangs_is_ended_with_its_children_and_fails(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    run = Run()
    run.all([shell("hangs", f"sleep 1000 & echo $! > {pid}; wait", minutes=1 / 120)])
    assert run.report() == 1
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z", "the child has ended")


def test_the_end_of_the_time_cuts_a_part_off_and_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(end=0.2)
    run.while_time_is_left([shell("long", "sleep 1000"), shell("never", "false")], 0.1)
    assert run.report() == 0
    output = capfd.readouterr().out
    assert "long: cut off" in output
    assert "not run, for want of time: never" in output


def test_every_part_comes_first_for_some_commit() -> None:
    orders = [[part.name for part in rotated(REST, f"{number:040x}".replace("0" * 28, "", 1))] for number in range(len(REST))]
    assert {order[0] for order in orders} == {part.name for part in REST}
    assert all(sorted(order) == sorted(part.name for part in REST) for order in orders)


def test_every_release_of_vllm_runs_for_some_commit_or_in_every_run_of_all_tests() -> None:
    in_turn = {vllm_in_turn(f"{number:012x}").name for number in range(len(VLLM))}
    in_all = {part.name for part in REST}
    newest = re.search(r"^VLLM := (.+)$", (parts.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VLLM[-1], "the rest of all parts runs with it"
    assert {f"vLLM {release}" for release in VLLM[:-1]} <= in_turn | in_all


def test_the_newest_megatron_core_that_is_supported_runs_in_every_run_of_all_tests() -> None:
    (part,) = [part for part in REST if "test-megatron" in part.command]
    assert [word for word in part.command if word.startswith(f"VERSION={TESTED[-1]}.")]


def test_every_test_is_in_make_test_or_in_the_rest() -> None:
    """By their marks and folders."""
    others = {"gpu", "integrations", "sglang"}
    folders = {path.name for path in (parts.ROOT / "tests").iterdir() if list(path.glob("test_*.py"))} - others
    given = [part.command for part in REST if part.command[0].endswith("pytest")]
    for mark, where in (("full and not storm", folders), ("full and storm", {"chaos", "failpoints"})):
        paths = {argument for command in given if mark in command for argument in command if argument.startswith("tests/")}
        assert {path.removeprefix("tests/") for path in paths} >= where - {"soak"}, mark
    marks = {
        argument
        for part in TEST
        if part.command[0].endswith("pytest")
        for argument in part.command
        if argument.startswith("not full")
    }
    assert marks == {"not full"}
