"""`--json` of every command: the messages of the protocol as protobuf prints them, except that 64-bit integers are numbers."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import click
import pytest
from resharder.client.cli import watch
from resharder.client.cli.app import app
from resharder.v1 import operator_pb2, resources_pb2
from typer.main import get_command

from tests.support.command import resharder
from tests.support.fake_operator import FakeOperator
from tests.support.proto_json import expected, filled

State = Callable[[FakeOperator], dict[str, Any]]


def fleet(fake: FakeOperator) -> dict[str, Any]:
    return expected(fake.fleet)


def servers(fake: FakeOperator) -> dict[str, Any]:
    return {"servers": [*map(expected, fake.servers)]}


def node(fake: FakeOperator) -> dict[str, Any]:
    return expected(fake.nodes[0])


def state(fake: FakeOperator) -> dict[str, Any]:
    return {"daemon": expected(fake.daemon), "fleets": [fleet(fake)], **servers(fake)}


MESSAGES: dict[str, tuple[tuple[str, ...], State]] = {
    "status": ((), state),
    "watch": ((), state),
    "fleets": ((), lambda fake: {"fleets": [fleet(fake)]}),
    "servers": ((), servers),
    "versions": ((), lambda fake: {"versions": [expected(each) for each in reversed(fake.versions)]}),
    "events": ((), lambda fake: expected(fake.event)),
    "nodes": ((), lambda fake: {"nodes": [node(fake)], "shortages": [*map(expected, fake.shortages)]}),
    "drain-node": (("one",), node),
    "resume-node": (("one",), node),
    "fleet set": (("--rolling", "1"), fleet),
    "fleet show": ((), lambda fake: {"fleet": fleet(fake), **servers(fake)}),
    "update": (("latest",), fleet),
    "pin": (("4",), fleet),
    "rollback": (("3",), fleet),
    "approve": ((), fleet),
    "back": ((), fleet),
    "sleep": (("--fleet", "policy"), servers),
    "wake": (("--fleet", "policy"), servers),
    "drain": (("--fleet", "policy"), servers),
    "resume": (("--fleet", "policy"), servers),
    "archive": (("3",), lambda fake: expected(fake.archive.versions[0])),
    "archived": ((), lambda fake: expected(fake.archive)),
    "restore": (("3",), lambda fake: expected(fake.versions[0])),
    "gc": (("3", "--dry-run"), lambda fake: expected(fake.retired) | {"dry_run": True}),
    "verify": (("a",), lambda fake: expected(fake.verified)),
}
"""Arguments of each command that prints messages, and what it prints."""
OTHERS = {
    "forget", "fleet delete",  # the answer is an empty message: the command prints the name
    "export", "fetch-config", "profile install",  # files that it has written
    "import",  # the version, of a real daemon: test_cli_import.py
    "doctor", "check", "architectures", "probe",  # found on this host
}  # fmt: skip


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The commands that take `--json`."""
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))
    if any("--json" in parameter.opts for parameter in group.params):
        yield " ".join(path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    """Messages with a value in every field, whose names refer to each other."""
    seeds = count(1)
    fleet = filled(resources_pb2.Fleet(), seeds)
    fleet.name = fleet.model = "policy"
    server = filled(resources_pb2.Server(), seeds)
    server.name, server.fleet, server.state = "servers/a", "policy", resources_pb2.Server.SERVING
    with FakeOperator(fleet, servers=[server]) as running:
        running.daemon = filled(operator_pb2.Daemon(), seeds)
        running.daemon.models[:] = ["policy"]
        for number in (3, 4):
            version = filled(resources_pb2.Version(), seeds)
            version.name, version.model, version.number = f"models/policy/versions/{number}", "policy", number
            version.state = resources_pb2.Version.READY
            running.versions.append(version)
        running.nodes.append(filled(resources_pb2.Node(), seeds))
        running.nodes[0].name = "nodes/one"
        running.shortages.append(filled(operator_pb2.ReplicaShortage(), seeds))
        filled(running.retired, seeds)
        filled(running.archive, seeds)
        for each, version in zip(running.archive.versions, running.versions, strict=True):
            each.version = version.name
        filled(running.verified, seeds)
        for verification in running.verified.verifications:
            verification.different_tensors, verification.skipped = 0, ""
        filled(running.event, seeds)
        monkeypatch.setenv("RESHARDER_ENDPOINT", running.endpoint)
        yield running


def test_every_command_that_takes_json_is_known_here() -> None:
    assert sorted(commands(get_command(app))) == sorted({*MESSAGES, *OTHERS})


@pytest.mark.parametrize("command", MESSAGES)
def test_json_is_the_message_as_protobuf_prints_it(fake: FakeOperator, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=interrupted))
    arguments, wanted = MESSAGES[command]
    done = resharder(*command.split(), *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    if command == "watch":
        assert found.pop("watched")
    assert found == wanted(fake)
