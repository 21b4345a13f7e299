"""Commands that bring something about, on a real daemon with simulated servers: each test has a fleet of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import Server, UpdateStrategy, VersionTarget

from tests.client.models import connected, equal, exported, publish_all, weights
from tests.support.command import answer, resharder, running
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.secure import Authority
from tests.support.simulated_server import Order, SimulatedServer

WAIT = ("--wait", "--timeout", 120)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With versions 1 to 3, and an archive."""
    with Daemon(archive_url=tmp_path_factory.mktemp("archive"), keep_count=3) as running:
        publishers = connected(running.endpoint, 1, "cli")
        for number in (1, 2, 3):
            publish_all(publishers, 10 * number, weights(number))[0].wait_ready(60)
        for publisher in publishers:
            publisher.close()
        yield running


@pytest.fixture(autouse=True)
def _endpoint(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)


@pytest.fixture
def operator(daemon: Daemon) -> Iterator[Operator]:
    with Operator(daemon.endpoint) as operator:
        yield operator


def output(*arguments: object) -> str:
    """What the command prints when all goes well."""
    done = resharder(*arguments)
    assert done.code == 0, (done.out, done.err)
    return done.out


def test_a_fleet_is_made_moved_pinned_and_rolled_back(daemon: Daemon) -> None:
    assert "there is no fleet moved" in resharder("update", 1, "--fleet", "moved").err
    assert (
        output("fleet", "set", "moved", "--model", "policy", "--want", 1)
        == "moved targets version 1, is at 1: pinned to version 1; set: wants version 1; model policy\n"
    )
    with SimulatedServer(daemon, "moved-a", fleet="moved"), SimulatedServer(daemon, "moved-b", fleet="moved"):
        done = resharder("update", 2, "--fleet", "moved", *WAIT)
        assert (done.code, done.out) == (0, "moved targets version 2, is at 2: pinned to version 2\n")
        assert done.err.splitlines()[-1] == "moved: 1 → 2 DONE, 2/2 serve 2; pinned to version 2"
        output("fleet", "set", "moved", "--rolling", 1, "--max-failures", 1, "--pause-mode", "wait", "--max-skew", 2)
        assert output("update", "latest", "--fleet", "moved", *WAIT).startswith("moved targets latest, is at 3")
        assert output("rollback", "--fleet", "moved", "--reason", "too slow", *WAIT).startswith("moved targets latest, is at 2")
        shown = output("fleet", "show", "moved").splitlines()
        assert "refused     version 3: too slow" in shown
        assert "moves       1 at a time, stops after 1 failure" in shown
        assert output("pin", "--fleet", "moved", *WAIT).startswith("moved targets version 2")
        servers = answer("servers", "--fleet", "moved")["servers"]
        assert {(server["name"], server["state"], server["version"]) for server in servers} == {
            ("servers/moved-a", "SERVING", 2),
            ("servers/moved-b", "SERVING", 2),
        }
        assert output("update", "--accept-refused", "--fleet", "moved", *WAIT).startswith("moved targets latest, is at 3")


def test_a_canary_is_approved_or_sent_back(daemon: Daemon) -> None:
    output("fleet", "set", "tried", "--model", "policy", "--want", 1)
    with SimulatedServer(daemon, "tried-a", fleet="tried"), SimulatedServer(daemon, "tried-b", fleet="tried"):
        output("fleet", "set", "tried", "--canary", 1, "--approve")
        output("update", 2, "--fleet", "tried")
        wait_until(lambda: answer("fleet", "show", "tried")["fleet"]["move"]["state"] == "HOLDING", "the canary serves")
        assert output("approve", "--fleet", "tried", *WAIT).startswith("tried targets version 2, is at 2")
        output("update", 3, "--fleet", "tried")
        wait_until(lambda: answer("fleet", "show", "tried")["fleet"]["move"]["state"] == "HOLDING", "the canary serves")
        done = resharder("update", 3, "--fleet", "tried", "--wait", "--timeout", 0.1)
        assert (done.code, done.out) == (6, "")
        assert "operator" in done.err
        back = answer("back", "--fleet", "tried", "--reason", "rude", *WAIT)
        assert (back["move"]["state"], back["refused"]) == ("FAILED", [{"version": 3, "reason": "rude"}])
    done = resharder("back", "--fleet", "tried")
    assert (done.code, "[NOTHING_TO_DECIDE]" in done.err) == (4, True)


@pytest.mark.parametrize(("verb", "dies_at"), [("sleep", Order.SLEEP), ("wake", Order.WAKE), ("drain", Order.CLOSE)])
def test_a_command_that_waits_for_servers_says_when_one_was_lost(
    daemon: Daemon, operator: Operator, verb: str, dies_at: int
) -> None:
    fleet = f"losing-{verb}"
    output("fleet", "set", fleet, "--model", "policy")
    with SimulatedServer(daemon, f"{fleet}-a", fleet=fleet) as dies, SimulatedServer(daemon, f"{fleet}-b", fleet=fleet):
        wait_until(lambda: [s.state for s in operator.servers(fleet)] == [Server.State.SERVING] * 2, "both serve")
        if verb == "wake":
            output("sleep", "--fleet", fleet, *WAIT)
        dies.dies_at = {dies_at}
        done = resharder(verb, "--fleet", fleet, *WAIT)
        assert done.code == 5
        assert f"servers/{fleet}-a LOST: its engine died, " in done.out
        assert operator.server(f"{fleet}-b").state != Server.State.LOST


def test_servers_are_drained_resumed_put_to_sleep_and_woken(daemon: Daemon) -> None:
    output("fleet", "set", "kept", "--model", "policy", "--want", 2)
    with SimulatedServer(daemon, "kept-a", fleet="kept"), SimulatedServer(daemon, "kept-b", fleet="kept") as busy:
        output("update", 2, "--fleet", "kept", *WAIT)
        busy.in_flight = 2
        wait_until(lambda: "2 in flight" in output("drain", "--server", "kept-b"), "its requests are seen")
        assert resharder("drain", "--server", "kept-b", "--wait", "--timeout", 0.1).code == 6
        busy.in_flight = 0
        assert output("drain", "--server", "kept-b", *WAIT).startswith("servers/kept-b DRAINED: ")
        assert output("resume", "--server", "kept-b", *WAIT).startswith("servers/kept-b SERVING: ")
        slept = output("sleep", "--fleet", "kept", "--level", 2, *WAIT).splitlines()
        assert [line.partition(":")[0] for line in slept] == ["servers/kept-a ASLEEP, level 2", "servers/kept-b ASLEEP, level 2"]
        woken = answer("wake", "--server", "kept-a", "--tag", "weights", *WAIT)["servers"]
        assert [(server["name"], server["power"]) for server in woken] == [("servers/kept-a", "WEIGHTS_AWAKE")]
        woken = answer("wake", "--fleet", "kept", *WAIT)["servers"]
        assert [(server["state"], server["version"]) for server in woken] == [("SERVING", 2), ("SERVING", 2)]


def test_what_the_daemon_refuses_is_said_with_its_reason_and_exits_4() -> None:
    output("fleet", "set", "refusing", "--model", "policy", "--want", "none")
    for arguments, reason in (
        (("pin", 99, "--fleet", "refusing"), "VERSION_NOT_READY"),
        (("rollback", "--fleet", "refusing"), "NO_EARLIER"),
        (("fleet", "set", "refusing", "--canary", 1, "--check", "nobody"), "CHECK_UNKNOWN"),
        (("fleet", "set", "refusing", "--model", "other"), "FLEET_MODEL"),
        (("gc", 99, "--yes"), "VERSION_UNKNOWN"),
    ):
        done = resharder(*arguments)
        assert (done.code, done.out) == (4, ""), done
        assert f"[{reason}]" in done.err


def test_status_and_events_tell_what_was_done() -> None:
    output("fleet", "set", "told", "--model", "policy", "--want", "none")
    status = output("status")
    assert any(line.split()[:5] == ["told", "NO", "SERVERS", "policy", "none"] for line in status.splitlines())
    output("sleep", "--fleet", "told")
    output("update", "latest", "--fleet", "told")

    def latest_events() -> list[str]:
        return [line.split()[3] for line in output("events", "--subject", "fleets/told", "--last", 5).splitlines()]

    wait_until(
        lambda: latest_events() == ["update", "sleep", "update", "moving", "done"], "what was asked for, then what came of it"
    )


def test_versions_are_archived_dropped_and_restored() -> None:
    policy = ("--model", "policy")
    assert output("archive", 1, *policy).startswith("models/policy/versions/1: ")
    (archived,) = answer("archived", *policy)["versions"]
    assert archived["version"] == "models/policy/versions/1"
    assert "models/policy/versions/1 (step 10) would be dropped" in output("gc", 1, *policy, "--dry-run")
    dropped = answer("gc", 1, *policy, "--yes")
    assert [version["number"] for version in dropped["retired"]] == [1]
    done = resharder("restore", 2, *policy)
    assert (done.code, "archived versions: models/policy/versions/1" in done.err) == (4, True)
    assert answer("restore", "latest", *policy)["state"] == "READY"
    assert {version["number"]: version["state"] for version in answer("versions", *policy)["versions"]}[1] == "READY"


def test_an_exported_folder_is_imported_as_it_was(tmp_path: Path) -> None:
    output("export", 2, tmp_path / "two", "--model", "policy")
    output("fetch-config", "policy", tmp_path / "config")
    done = resharder("import", tmp_path / "two", "--model", "imported", "--step", 7)
    assert done.code == 0, done.err
    assert done.out.startswith("models/imported/versions/1 (step 7): ")
    assert done.err.startswith("importing ")
    assert equal(exported(os.environ["RESHARDER_ENDPOINT"], "models/imported/versions/1", tmp_path / "one"), weights(2))
    (trainer,) = connected(os.environ["RESHARDER_ENDPOINT"], 1, "trainer")
    refused = resharder("import", tmp_path / "two", "--model", "policy", "--step", 7)
    trainer.close()
    assert (refused.code, "would fence that trainer" in refused.err) == (4, True)
    assert resharder("import", tmp_path / "config", "--model", "imported").code == 2
    assert "pass --model NAME: the daemon has " in resharder("import", tmp_path / "two", "--step", 7).err


def test_a_pipe_that_watches_gets_a_picture_for_every_change() -> None:
    with running(["watch", "--every", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert next(line for line in watching.stdout if line.startswith("store ")).endswith(" used\n")
        output("fleet", "set", "watched", "--model", "policy", "--want", "none")
        assert "policy" in next(line for line in watching.stdout if line.startswith("watched "))
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60)
        assert (watching.returncode, errors) == (0, "")


def test_what_is_waited_for_and_followed_goes_on_over_a_restart_of_the_daemon() -> None:
    with Daemon() as daemon, Operator(daemon.endpoint) as operator, ThreadPoolExecutor(1) as pool:
        publishers = connected(daemon.endpoint, 1, "cli")
        seen = operator.events(follow=True)
        assert next(seen).what == "started"
        for number in (1, 2):
            publish_all(publishers, 10 * number, weights(number))[0].wait_ready(60)
        publishers[0].close()
        operator.set_fleet("policy", target=VersionTarget(VersionTarget.Kind.NUMBER, version=1))
        with SimulatedServer(daemon, "a"):
            operator.set_fleet("policy", strategy=UpdateStrategy(UpdateStrategy.Kind.CANARY, approval=True))
            asked = operator.set_fleet("policy", target=VersionTarget(VersionTarget.Kind.NUMBER, version=2))
            moved = pool.submit(operator.wait_moved, asked, timeout=120)
            next(event for event in seen if event.what == "holding")
            daemon.kill()
            daemon.start()
            next(event for event in seen if event.what == "started")
            operator.approve("policy")
            assert moved.result().settled_version == 2


def test_what_grpcs_core_logs_stays_out_of_what_the_command_says(daemon: Daemon, tmp_path: Path) -> None:
    """Its core logs every handshake that fails, as it does where a client speaks TLS and the daemon does not."""
    authority = Authority(tmp_path / "pki")
    environment = os.environ | {"RESHARDER_TLS_CA": str(authority.folder / "ca.pem")}
    environment.pop("GRPC_VERBOSITY", None)  # which the command sets in this process too
    command = [sys.executable, "-m", "resharder.client.cli", "status"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("resharder: cannot reach a Resharder daemon at ")
    assert line.endswith("it does not speak TLS, this client does; unset RESHARDER_TLS_CA, or secure the daemon")
