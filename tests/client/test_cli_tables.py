"""Output for operators: tables on a terminal of 80 columns, colours, lost servers first, events as sentences."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.client.cli.format import SERVERS, VERSIONS, event_line, problems, publisher_table, server_rows, version_table
from resharder.client.cli.terminal import Columns, lines, short
from resharder.client.operator import answers
from resharder.client.operator.answers import Event
from resharder.client.operator.convert import answer as converted
from resharder.v1 import operator_pb2, resources_pb2

from tests.support.command import answer, resharder, running
from tests.support.fake_operator import FakeOperator
from tests.support.terminal import COLUMNS, on_terminal

Fleet, Server, Version = resources_pb2.Fleet, resources_pb2.Server, resources_pb2.Version
Node, NodeCopy, NodeLink = resources_pb2.Node, resources_pb2.NodeCopy, resources_pb2.NodeLink
GREEN, RED = "\x1b[32m", "\x1b[31m"
LOST = "fleet policy: 1 of 3 servers LOST: servers/policy-rollout-replica-12: its control side has been silent for 40 s"
LONG = (
    "serving version 4; version 5 failed once: worker 3: the transfer over the direct path ended after 9.9 s; tries again in 2 s"
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    """Two fleets, one of which has lost a server."""
    well = Fleet(name="evaluation", model="policy", settled_version=4, wanted_version=4, servers=["servers/one"])
    names = [f"servers/policy-rollout-replica-{number}" for number in (10, 11, 12)]
    hurt = Fleet(name="policy", model="policy", settled_version=4, wanted_version=5, servers=names, reason="from version 4 to 5")
    servers = [
        Server(name=names[0], fleet="policy", state=Server.SERVING, version=4, wanted_version=5, reason=LONG),
        Server(name=names[1], fleet="policy", state=Server.ASLEEP, version=4, reason="asleep by order"),
        Server(name=names[2], fleet="policy", state=Server.LOST, reason="its control side has been silent for 40 s"),
        Server(name="servers/one", fleet="evaluation", state=Server.SERVING, version=4, wanted_version=4),
    ]
    with FakeOperator(well, hurt, servers=servers) as running:
        running.versions = [
            Version(name="models/policy/versions/5", model="policy", number=5, state=Version.UPLOADING, size_bytes=3 << 30),
            Version(name="models/policy/versions/4", model="policy", number=4, state=Version.READY, size_bytes=3 << 30),
            Version(name="models/policy/versions/3", model="policy", number=3, state=Version.ABORTED, reason="a rank was lost"),
        ]
        monkeypatch.setenv("RESHARDER_ENDPOINT", running.endpoint)
        yield running


@pytest.mark.parametrize("command", [("status",), ("fleets",), ("servers",), ("fleet", "show", "policy")])
def test_a_fleet_that_lost_servers_is_shown_first_and_in_red(fake: FakeOperator, command: tuple[str, ...]) -> None:
    assert resharder(*command).out.splitlines()[0] == LOST
    seen = on_terminal(*command)
    assert seen.text.startswith("\x1b[1;31mfleet policy: 1 of 3 servers LOST")
    rows = [line for line in seen.lines if line.startswith(("policy-", "one"))]
    if "fleet" not in command[0]:
        assert rows[0].split()[:3] == ["policy-rollout-replica-12", "policy", "LOST"]
        assert f"{RED}LOST" in seen.text
    if command != ("servers",):
        fleets = [line.split()[0] for line in seen.lines if line.startswith(("policy ", "evaluation "))]
        assert fleets[:1] in ([], ["policy"])


def test_no_line_exceeds_80_columns_or_breaks_a_word(fake: FakeOperator) -> None:
    words = set(resharder("status").out.split()) | set(resharder("versions").out.split())
    for command in (("status",), ("servers",), ("fleets",), ("versions",), ("fleet", "show", "policy")):
        for line in on_terminal(*command).lines:
            assert len(line) <= COLUMNS, (command, line)
    shown = on_terminal("servers").lines
    text = " ".join(line.strip() for line in shown)
    assert LONG in text, "the reason is there in full, wrapped between words"
    assert {word for word in LONG.split() if word not in words} == set()
    wide = on_terminal("servers", "--wide").lines
    assert any("servers/policy-rollout-replica-10" in line and LONG in line for line in wide)


def test_states_have_colours_on_a_terminal_alone(fake: FakeOperator) -> None:
    seen = on_terminal("status").text
    assert all(wanted in seen for wanted in (f"{GREEN}SERVING", f"{RED}LOST", f"{RED}1 LOST"))
    assert "\x1b[3" not in on_terminal("status", environment={"NO_COLOR": "1"}).text
    assert "\x1b" not in resharder("status").out


@given(st.lists(st.lists(st.text("abc-", min_size=1, max_size=70), min_size=4, max_size=4), min_size=1, max_size=4))
def test_any_table_keeps_within_80_columns(rows: list[list[str]]) -> None:
    columns = Columns(("first", "second", "third", "reason"))
    for line in lines(columns, rows, COLUMNS):
        assert len(line) <= COLUMNS


def test_a_wide_terminal_has_all_columns_and_the_reason_beside_them() -> None:
    server = answers.Server(name="servers/a", fleet="policy", state=answers.Server.State.SERVING, version=4, wanted_version=5)
    shown = [line.plain for line in lines(SERVERS, server_rows([replace(server, reason=LONG)]), 140)]
    assert shown[0].split() == ["server", "fleet", "state", "serves", "wants", "workers", "apply", "pause", "reason"]
    assert " ".join(" ".join(shown[1:]).split()) == f"a policy SERVING 4 5 0/0 0.000 s 0.000 s {LONG}"
    assert all(line.startswith(" " * shown[0].index("reason")) for line in shown[2:])
    narrow = [line.plain for line in lines(SERVERS, server_rows([replace(server, reason="it is next")]), 80)]
    assert narrow[1].split() == ["a", "policy", "SERVING", "4", "5", "0/0", "it", "is", "next"]


def test_a_check_that_finds_nothing_wrong_takes_one_line() -> None:
    checks = Columns(("", "check", "found", "hint"), texts=2)
    rows = [
        ("ok", "huge pages in shared memory", "huge=always at /dev/shm", ""),
        ("warn", "clocks", "3 s apart", "run NTP"),
    ]
    assert [line.plain for line in lines(checks, rows, 80)] == [
        "      check                        found",
        "ok    huge pages in shared memory  huge=always at /dev/shm",
        "warn  clocks                       3 s apart",
        "                                   run NTP",
    ]


def test_tables_name_the_base_of_adapters_where_there_are_any() -> None:
    own = answers.Version(model="policy", number=12)
    adapters = [answers.Version(model="lora", base="policy", base_version=number) for number in (12, 0)]
    columns, rows = version_table([own, *adapters])
    assert columns.titles[:3] == ("model", "base", "version")
    assert [row[:2] for row in rows] == [("policy", ""), ("lora", "policy 12"), ("lora", "policy")]
    assert version_table([own])[0] is VERSIONS
    publishers = [answers.PublisherStatus(name="models/lora/publishers/1", base="policy")]
    columns, rows = publisher_table(publishers)
    assert (columns.titles[:2], rows[0][1]) == (("publisher", "base"), "policy")


def test_a_table_without_rows_says_what_there_is_none_of() -> None:
    assert VERSIONS.nothing == "no versions"
    assert SERVERS.nothing == "no servers"
    assert Columns(("bytes", "largest"), noun="bytes to send").nothing == "no bytes to send"


def test_failed_servers_and_a_stopped_move_are_red_lines_that_come_first() -> None:
    failed = answers.Server(name="servers/left", fleet="policy", state=answers.Server.State.FAILED, reason="out of memory")
    stopped = answers.Move(id=5, state=answers.Move.State.STOPPED, from_version=3, to_version=4)
    fleet = answers.Fleet(
        name="policy", move=stopped, reason="from version 3 to 4, 0 of 1 servers there; stopped: too many failures"
    )
    found = [*problems([failed], [fleet])]
    assert [line.plain for line in found] == [
        "fleet policy: 1 of 1 server FAILED: servers/left: out of memory",
        f"fleet policy: its move has STOPPED: {fleet.reason}",
    ]
    assert {str(line.style) for line in found} == {"bold red"}


def test_a_name_is_shortened_in_its_middle() -> None:
    assert short("policy-rollout-12", 17) == "policy-rollout-12"
    assert short("policy-rollout-12", 9) == "poli…t-12"
    assert len(short("x" * 64, 8)) == 8


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            {"subject": "models/policy/versions/3", "what": "ready", "details": {"step": "30", "epoch": "1"}},
            "models/policy/versions/3  ready (epoch 1, step 30)",
        ),
        (
            {
                "subject": "fleets/policy",
                "what": "update",
                "details": {
                    "request": json.dumps(
                        {
                            "fleet": {
                                "name": "policy",
                                "target": {"kind": "NUMBER", "version": "3"},
                                "strategy": {"kind": "CANARY", "canaries": 1, "hold_seconds": 60.0, "approval": True},
                            },
                            "update_mask": "target,strategy",
                        }
                    )
                },
            },
            "fleets/policy  update (target number version 3, strategy canary canaries 1 hold seconds 60.0 approval)",
        ),
        (
            {
                "subject": "fleets/policy",
                "what": "failed",
                "reason": "canary servers/a could not install version 2: no room",
                "details": {"from": "1", "to": "2"},
            },
            "fleets/policy  failed (1 → 2): canary servers/a could not install version 2: no room",
        ),
        ({"subject": "fleets/policy", "what": "update", "details": {"request": '{"fleet": {"na'}}, "fleets/policy  update"),
        (
            {"subject": "fleets/policy", "what": "done", "details": {"back_to": "1", "to": "2", "strategy": "ALL_AT_ONCE"}},
            "fleets/policy  done (1 → 2, strategy all at once)",
        ),
        (
            {"subject": "servers/a", "what": "staging", "details": {"from": "1", "to": "2", "version": "1", "fleet": "policy"}},
            "servers/a  staging (1 → 2, fleet policy)",
        ),
        (
            {"subject": "servers/a", "what": "serving", "details": {"from": "2", "to": "2", "version": "2", "fleet": "policy"}},
            "servers/a  serving (version 2, fleet policy)",
        ),
        (
            {"subject": "servers/a", "what": "booting", "details": {"from": "0", "to": "2", "version": "0"}},
            "servers/a  booting (no version → 2)",
        ),
    ],
)
def test_events_are_sentences_without_lists_and_json(event: dict[str, object], sentence: str) -> None:
    made = converted(Event, operator_pb2.Event(**event))  # type: ignore[arg-type]
    assert event_line(made).plain == f"1970-01-01 00:00:00Z  {sentence}"


def test_watch_prints_one_json_object_a_line_for_each_change(fake: FakeOperator) -> None:
    arguments = ["watch", "--json", "--every", "0.1", "--endpoint", fake.endpoint]
    with running(arguments, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert [server["state"] for server in first["servers"]] == ["SERVING", "ASLEEP", "LOST", "SERVING"]
        fake.servers[2].state = Server.SERVING
        second = json.loads(watching.stdout.readline())
        assert second["servers"][2]["state"] == "SERVING"
        assert {**second, "servers": [], "watched": ""} == {**first, "servers": [], "watched": ""}


def test_fleets_prints_json(fake: FakeOperator) -> None:
    assert [fleet["name"] for fleet in answer("fleets")["fleets"]] == ["evaluation", "policy"]


def test_nodes_are_shown_with_their_versions_lost_ones_first_and_drained_by_their_id(fake: FakeOperator) -> None:
    version = "models/policy/versions/4"
    fake.nodes = [
        Node(
            name="nodes/gpu-1", state=Node.LIVE, capacity_bytes=64 << 30, used_bytes=3 << 30, received_daemon_bytes=1 << 30,
            received_peer_bytes=2 << 30, received_engine_bytes=1 << 30, sent_bytes=5 << 30,
            links=[
                NodeLink(peer="daemon", delta_bytes=1 << 20, delta_part_bytes=1 << 30),
                NodeLink(peer="nodes/gpu-3", delta_bytes=2 << 20, delta_part_bytes=1 << 29, delta_failures=3, delta_problem="b"),
            ],
            copies=[
                NodeCopy(version=version, held_pieces=96, wanted_pieces=192, pieces=192, wanted=True),
                NodeCopy(version=version[:-1] + "5", held_pieces=24, wanted_pieces=96, pieces=192, wanted=True),
            ],
        ),
        Node(name="nodes/gpu-2", state=Node.LOST, copies=[NodeCopy(version=version, pieces=192, problem="memory full")]),
    ]  # fmt: skip
    *lines, refused = resharder("nodes", "--wide").out.splitlines()[1:]
    assert refused == "nodes/gpu-1: refused deltas of nodes/gpu-3: 3; the last one: b"
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows] == [["nodes/gpu-2", "LOST"], ["nodes/gpu-1", "LIVE"]]
    assert " ".join(rows[0]).endswith("policy/4: memory full")
    assert (
        " ".join(rows[1][2:]) == "3.00 GiB of 64.00 GiB 3.00 GiB (1.50 GiB as 3.0 MiB of deltas) 2.00 GiB "
        "(1.00 GiB by transfer engine) 5.00 GiB policy/4 50 %; policy/5 25 % of 96 of 192 pieces"
    )
    found = json.loads(resharder("nodes", "--json").out)["nodes"]
    assert [(node["name"], node["state"]) for node in found] == [("nodes/gpu-1", "LIVE"), ("nodes/gpu-2", "LOST")]
    assert resharder("drain-node", "gpu-1").out == "nodes/gpu-1: drained\n"
    assert resharder("resume-node", "nodes/gpu-1").out == "nodes/gpu-1: resumed\n"
    requests = [operator_pb2.SetNodeDrainedRequest(node="nodes/gpu-1", drained=drained) for drained in (True, False)]
    assert fake.asked == requests


def test_nodes_are_followed_by_the_versions_that_have_too_few_replicas(fake: FakeOperator) -> None:
    fake.nodes = [Node(name="nodes/gpu-1", state=Node.LIVE)]
    problem = "12 of 48 pieces have fewer than 3 holders"
    given = {"short_pieces": 12, "pieces": 48, "replicas": 3, "problem": problem}
    names = [f"models/policy/versions/{number}" for number in (4, 5)]
    fake.shortages = [
        operator_pb2.ReplicaShortage(version=name, waits=waits, **given)  # type: ignore[arg-type]
        for name, waits in zip(names, (False, True), strict=True)
    ]
    assert resharder("nodes").out.splitlines()[2:] == [f"{names[0]}: {problem}", f"{names[1]} is not READY: {problem}"]
    found = json.loads(resharder("nodes", "--json").out)["shortages"]
    assert [(each["version"], each["waits"], each["short_pieces"]) for each in found] == [
        (names[0], False, 12),
        (names[1], True, 12),
    ]
