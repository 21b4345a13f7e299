"""Commands on fleets: what they ask for, what they print while they wait, and how they exit."""

import io
import sys
from collections.abc import Iterator

import pytest
from resharder.client.cli import complete, format
from resharder.client.operator import answers
from resharder.client.operator.convert import answer as converted
from resharder.v1 import operator_pb2, resources_pb2

from tests.support.command import answer, resharder
from tests.support.fake_operator import FakeOperator

Fleet, UpdateStrategy, Move, Server, VersionTarget = (
    resources_pb2.Fleet,
    resources_pb2.UpdateStrategy,
    resources_pb2.Move,
    resources_pb2.Server,
    resources_pb2.VersionTarget,
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    """One fleet that serves version 1 on two servers."""
    fleet = Fleet(
        name="policy",
        model="policy",
        settled_version=1,
        wanted_version=1,
        target=VersionTarget(kind=VersionTarget.LATEST, every_seconds=9),
    )
    servers = [
        Server(name=f"servers/{id}", fleet="policy", state=Server.SERVING, version=1, power=resources_pb2.AWAKE) for id in "ab"
    ]
    with FakeOperator(fleet, servers=servers) as running:
        monkeypatch.setenv("RESHARDER_ENDPOINT", running.endpoint)
        yield running


def moving(fake: FakeOperator, state: int, reason: str = "") -> None:
    fake.fleet.wanted_version = 2
    fake.fleet.move.CopyFrom(Move(id=5, state=state, from_version=1, to_version=2, reason=reason))


def arrived(fake: FakeOperator) -> None:
    moving(fake, Move.DONE)
    fake.fleet.settled_version = 2
    for server in fake.servers:
        server.version = 2


def test_update_waits_for_the_end_of_the_move_and_says_how_it_goes(fake: FakeOperator) -> None:
    def one_there() -> None:
        fake.servers[0].version = 2

    fake.later(lambda: None, lambda: moving(fake, Move.MOVING), one_there, one_there, lambda: arrived(fake))
    done = resharder("update", "2", "--wait", "--timeout", 60)
    assert (done.code, done.out) == (0, "policy targets version 2, is at 2\n")
    assert done.err.splitlines() == [
        "policy: 1 → 2 MOVING, 0/2 serve 2; servers/a SERVING; servers/b SERVING",
        "policy: 1 → 2 MOVING, 1/2 serve 2; servers/b SERVING",
        "policy: 1 → 2 DONE, 2/2 serve 2",
    ]
    assert fake.asked[0].update_mask.paths == ["target"]


def test_a_move_that_fails_exits_5_and_going_back_as_asked_exits_0(fake: FakeOperator) -> None:
    def failed() -> None:
        moving(fake, Move.FAILED)
        fake.fleet.reason = "canary servers/a could not install version 2: no room"

    moving(fake, Move.TRYING)
    fake.later(lambda: None, failed)
    done = resharder("update", "--wait")
    assert (done.code, done.out) == (
        5,
        "policy targets latest, one move in 9 s, is at 1: canary servers/a could not install version 2: no room\n",
    )
    moving(fake, Move.HOLDING)
    fake.later(lambda: None, lambda: moving(fake, Move.BACK), failed)
    assert resharder("back", "--reason", "slow", "--wait").code == 0
    decision = fake.asked[-1]
    assert (decision.move, decision.go_on, decision.reason) == (5, False, "slow")
    moving(fake, Move.HOLDING)
    fake.later(lambda: None, lambda: arrived(fake))
    assert resharder("approve", "--wait").code == 0
    assert fake.asked[-1].go_on


def test_what_does_not_come_in_time_exits_6_with_the_reason(fake: FakeOperator) -> None:
    moving(fake, Move.HOLDING)
    fake.fleet.reason = "canaries serve; an operator is waited for"
    done = resharder("update", "--wait", "--timeout", 0.1)
    assert (done.code, done.out) == (6, "")
    assert "the move has not ended after 0.1 s; canaries serve; an operator is waited for" in done.err


def test_pin_takes_what_is_served_and_update_keeps_the_pace(fake: FakeOperator) -> None:
    assert resharder("pin").out == "policy targets version 1, is at 1\n"
    assert resharder("update").code == 0
    assert answer("fleet", "set", "--want", "latest", "--every", 60)["target"] == {
        "kind": "LATEST", "version": 0, "every_seconds": 60.0,
    }  # fmt: skip
    assert resharder("update").code == 0
    wants = [request.fleet.target for request in fake.asked]
    assert wants == [
        VersionTarget(kind=VersionTarget.NUMBER, version=1),
        VersionTarget(kind=VersionTarget.LATEST),
        VersionTarget(kind=VersionTarget.LATEST, every_seconds=60),
        VersionTarget(kind=VersionTarget.LATEST, every_seconds=60),
    ]


def test_fleet_set_asks_for_what_is_given_alone(fake: FakeOperator) -> None:
    resharder("fleet", "set", "--canary", 1, "--hold", 30, "--approve", "--rolling", 4, "--max-skew", 0, "--pause-mode", "wait")
    request = fake.asked[-1]
    assert sorted(request.update_mask.paths) == ["max_skew", "pause_mode", "strategy"]
    assert request.fleet.strategy == UpdateStrategy(
        kind=UpdateStrategy.CANARY, canaries=1, hold_seconds=30, approval=True, at_a_time=4
    )
    assert request.fleet.pause_mode == resources_pb2.WAIT
    resharder("fleet", "set", "policy", "--accept-refused")
    assert (list(fake.asked[-1].update_mask.paths), fake.asked[-1].accept_refused) == ([], True)
    for flag, ahead in (("--serve-ahead", True), ("--no-serve-ahead", False)):
        resharder("fleet", "set", flag)
        assert (list(fake.asked[-1].update_mask.paths), fake.asked[-1].fleet.serve_ahead) == (["serve_ahead"], ahead)
    resharder("fleet", "set", "--serve-ahead-auto")
    asked = fake.asked[-1]
    assert (list(asked.update_mask.paths), asked.fleet.serve_ahead_setting) == (
        ["serve_ahead_setting"],
        resources_pb2.SERVE_AHEAD_AUTO,
    )
    assert "pass only one of --serve-ahead" in resharder("fleet", "set", "--serve-ahead-auto", "--no-serve-ahead").err


@pytest.mark.parametrize(
    ("options", "confirmed"),
    [
        (("--rolling", 2), "moves 2 at a time, stops after 1 failure"),
        (("--want", 1, "--pause-mode", "wait"), "wants version 1; pause mode wait"),
        (("--max-skew", 0), "max skew no bound"),
        (("--no-serve-ahead",), "serves READY versions only"),
        (("--accept-refused",), "refused versions are allowed"),
        (("--model", "policy", "--rolling", 1), "moves 1 at a time, stops after 1 failure; model policy"),
    ],
)
def test_fleet_set_confirms_what_it_has_set(fake: FakeOperator, options: tuple[object, ...], confirmed: str) -> None:
    done = resharder("fleet", "set", "policy", *options)
    assert done.out.startswith("policy targets ")
    assert done.out.endswith(f"; set: {confirmed}\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sleep", ("free their GPU memory", "answer 503 until `wake`", "pause mode", "2 drops them")),
        ("drain", ("finish their requests", "answer 503 to new ones until `resume`", "keeps its weights")),
    ],
)
def test_help_says_what_taking_servers_out_of_service_does(command: str, words: tuple[str, ...]) -> None:
    text = " ".join(resharder(command, "--help").out.split())
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("ahead", "reason", "expected"),
    [
        (
            True,
            "default of a fleet that moves ALL_AT_ONCE without a skew bound",
            "versions that are not READY yet, where it can (default",
        ),
        (False, "set by an operator", "READY versions only (set by an operator)"),
        (False, "", "READY versions only"),
    ],
)
def test_a_fleet_is_shown_with_the_rule_by_which_it_serves_ahead(ahead: bool, reason: str, expected: str) -> None:
    fleet = converted(answers.Fleet, resources_pb2.Fleet(name="policy", serve_ahead=ahead, serve_ahead_reason=reason))
    assert format.serves(fleet).startswith(expected)


def test_what_is_served_ahead_is_shown_as_such() -> None:
    server = converted(answers.Server, Server(name="servers/a", state=Server.SERVING, ahead=True))
    assert format.state(server) == "SERVING, ahead"
    states = {3: resources_pb2.Version.UPLOADING, 2: resources_pb2.Version.READY, 4: resources_pb2.Version.UPLOADING}
    shown = [
        converted(answers.Version, resources_pb2.Version(model="policy", number=number, state=state, servers_following=2))
        for number, state in states.items()
    ]
    servers = [
        converted(answers.Server, Server(name=f"servers/{number}", model="policy", version=number, state=Server.SERVING))
        for number in (3, 2)
    ]
    assert [row[6] for row in format.version_rows(shown, servers)] == ["1/2, ahead", "1/2", "–"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("fleet", "set"), 2, "nothing to set was given"),
        (("fleet", "set", "--rolling", "0"), 2, "'--rolling'"),
        (("fleet", "set", "--pause-mode", "maybe"), 2, "maybe"),
        (
            ("fleet", "set", "polcy", "--want", "3"),
            4,
            "there is no fleet polcy: the daemon has policy. To create it, pass --model MODEL",
        ),
        (("update", "newest"), 2, "expected `latest`"),
        (("update", "--fleet", "other"), 4, "there is no fleet other: the daemon has policy"),
        (("pin", "x"), 2, "'N'"),
        (("approve",), 4, "has made no move yet"),
        (("sleep",), 2, "servers stop answering: pass --server ID, or --fleet NAME"),
        (("drain",), 2, "servers stop answering: pass --server ID, or --fleet NAME"),
        (("sleep", "--server", "c"), 4, "there is no server servers/c: the daemon has servers/a, servers/b"),
        (
            ("drain", "--server", "a", "--fleet", "other"),
            2,
            "servers/a is not a server of fleet other: it belongs to fleet policy",
        ),
        (("sleep", "--fleet", "policy", "--level", "3"), 2, "'--level'"),
        (("gc",), 2, "--keep N"),
        (("gc", "1", "--keep", "1"), 2, "--keep N"),
        (("gc", "1", "--json"), 2, "--json cannot ask for confirmation: pass --yes or --dry-run"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_a_mistake_is_said_in_one_place_and_asks_for_nothing(
    fake: FakeOperator, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = resharder(*arguments)
    assert (done.code, done.out) == (code, "")
    assert message in " ".join(done.err.split())
    assert fake.asked == []


def test_a_fleet_has_to_be_named_where_there_are_several(fake: FakeOperator) -> None:
    fake.fleets.append(Fleet(name="tests", model="policy"))
    done = resharder("update")
    assert (done.code, done.err) == (2, "resharder: the daemon has several fleets, policy, tests: pass --fleet\n")
    assert resharder("update", "--fleet", "tests").code == 0


def test_sleep_and_drain_wait_for_the_servers_that_are_meant(fake: FakeOperator) -> None:
    def asleep() -> None:
        fake.servers[0].state, fake.servers[0].power = Server.ASLEEP, resources_pb2.ASLEEP_2

    def shut(in_flight: int) -> None:
        fake.servers[1].state, fake.servers[1].in_flight = Server.DRAINED, in_flight

    fake.later(lambda: None, asleep)
    done = resharder("sleep", "--server", "a", "--level", 2, "--wait", "--timeout", 60)
    assert done.code == 0
    assert done.err.splitlines()[-1] == "servers/a ASLEEP, level 2"
    assert fake.asked[-1] == operator_pb2.SetPowerRequest(fleet="policy", server="servers/a", power=resources_pb2.ASLEEP_2)
    fake.later(lambda: shut(2), lambda: shut(2), lambda: shut(0))
    done = resharder("drain", "--server", "servers/b", "--wait", "--timeout", 60)
    assert (done.code, "DRAINED, 2 in flight" in done.err) == (0, True)
    assert resharder("wake", "--tag", "weights").code == 0
    assert fake.asked[-1] == operator_pb2.SetPowerRequest(fleet="policy", power=resources_pb2.WEIGHTS_AWAKE)


def test_gc_says_what_goes_and_drops_nothing_unless_told_to(fake: FakeOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    Version = resources_pb2.Version
    fake.retired.retired.add(name="models/policy/versions/1", number=1, step=10, state=Version.READY)
    fake.retired.kept.add(name="models/policy/versions/2", number=2, step=20, state=Version.READY, used_by=["servers/a"])
    fake.retired.freed_bytes = 3 << 20
    done = resharder("gc", "--keep", 1)
    assert (done.code, "pass --yes or --dry-run" in done.err) == (2, True)
    assert done.out.splitlines() == [
        "models/policy/versions/2 (step 20) is kept: in use by servers/a",
        "models/policy/versions/1 (step 10) would be dropped",
        "1 version, 3.0 MiB would be dropped",
    ]
    assert [request.dry_run for request in fake.asked] == [True]
    for typed, dry_runs in (("n\n", [True, True]), ("y\n", [True, True, True, False])):
        keyboard = io.StringIO(typed)
        keyboard.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", keyboard)
        assert resharder("gc", "--keep", 1).code == 0
        assert [request.dry_run for request in fake.asked] == dry_runs
    assert (list(fake.asked[-1].versions), fake.asked[-1].keep) == ([1], 0), "what was shown is what goes"
    fake.versions = [
        Version(model="policy", number=1, state=Version.READY),
        Version(model="policy", number=2, state=Version.READY),
    ]
    fake.fleet.settled_version = 2
    keyboard = io.StringIO("\n")
    keyboard.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", keyboard)
    done = resharder("gc", "--keep", 1)
    assert "This leaves no version to roll policy back to. Drop 1 version? [y/N]" in done.out
    assert fake.asked[-1].dry_run, "without an answer nothing is deleted"
    assert answer("gc", 1, 2, "--yes")["freed_bytes"] == 3 << 20
    assert list(fake.asked[-1].versions) == [1, 2]


def test_the_shell_completes_what_the_daemon_knows(fake: FakeOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "SECONDS", 60.0)
    fake.versions.append(resources_pb2.Version(model="policy", number=12, state=resources_pb2.Version.READY))
    fake.versions.append(resources_pb2.Version(model="policy", number=11, state=resources_pb2.Version.RETIRED))

    def completed(line: str) -> set[str]:
        monkeypatch.setenv("_RESHARDER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return set(resharder().out.split())

    assert completed("resharder update --fleet ") == {"policy"}
    assert completed("resharder update ") >= {"latest", "12"}
    assert completed("resharder pin 1") == {"12"}
    assert completed("resharder drain --server ") == {"a", "b"}
    monkeypatch.setenv("RESHARDER_ENDPOINT", "127.0.0.1:1")
    assert completed("resharder update --fleet ") == set()
