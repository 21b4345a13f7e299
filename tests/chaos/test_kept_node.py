"""In peace, a node has what its host needs, and nothing else."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from resharder.client.operator.answers import Node, NodeCopy, Server

from tests.chaos.kept_node import NodeMemory, NodeUse, node_problems
from tests.chaos.peace import suspended_seconds

COPY = NodeCopy("models/policy/versions/7", held_pieces=1, wanted_pieces=1, pieces=1, wanted=True, servers=("right",))
NODE = Node("nodes/node", Node.State.LIVE, "127.0.0.1:1", capacity_bytes=100, used_bytes=10, copies=(COPY,))


def server(transport: str = "node") -> Server:
    worker = SimpleNamespace(rank=0, transport=transport, transport_reason="nodes/node: it is lost")
    return cast(Server, SimpleNamespace(name="servers/right", workers=(worker,)))


def problems(
    stored: tuple[int, ...] = (6, 7),
    version: int = 7,
    transport: str = "node",
    writes: bool = False,
    sets: int = 0,
    name: str = "node",
    **changes: Any,
) -> list[str]:
    use, memory = NodeUse(version, writes, (server(transport),)), NodeMemory(stored, sets)
    other = replace(NODE, name="nodes/other", state=Node.State.LOST)
    return node_problems(name, [other, replace(NODE, **changes)], use, memory, (6, 7))


def test_a_node_that_serves_its_host_has_no_problem() -> None:
    assert problems() == []
    assert problems(version=0, copies=()) == [], "no worker reads through it, and no rank writes"
    for sets in (1, 2):
        assert problems(writes=True, sets=sets) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"state": Node.State.LOST}, "expected node to be live"),
        ({"name": "other"}, "expected other to be live"),
        ({"copies": ()}, "node does not hold version 7: None"),
        ({"copies": (replace(COPY, held_pieces=0),)}, "node does not hold version 7"),
        ({"copies": (replace(COPY, problem="memory full"),)}, "memory full"),
        (
            {"copies": (COPY, replace(COPY, version="models/policy/versions/8", uploading=True))},
            "still write models/policy/versions/8",
        ),
        ({"stored": (5, 7)}, "node keeps versions [5]"),
        ({"sets": 1}, "expected 0 to 0 sets of files on node, got 1"),
        ({"writes": True}, "expected 1 to 2 sets of files on node, got 0"),
        ({"writes": True, "sets": 3}, "expected 1 to 2 sets of files on node, got 3"),
        ({"used_bytes": 101}, "node uses 101 of 100 bytes"),
        ({"transport": "http"}, "servers/right worker 0 read http: nodes/node: it is lost"),
    ],
)
def test_each_deviation_is_a_problem(given: dict[str, Any], problem: str) -> None:
    (found,) = problems(**given)
    assert problem in found


def test_a_node_from_which_the_daemon_could_not_copy_is_suspended_for_twice_as_long_each_time() -> None:
    def aborted(why: str) -> dict[str, Any]:
        return {"kind": "version", "state": "ABORTED", "why": why}

    events = [aborted("model.safetensors, bytes 0 to 9: nodes/far: timed out"), aborted("nodes/far is gone")]
    assert suspended_seconds(events, "far") == 60.0
    assert suspended_seconds(events, "node") == 0.0
    assert suspended_seconds([*events, *events, *events], "far") == 240.0
    assert suspended_seconds([*events, {"kind": "ready", "process": "far"}], "far") == 0.0
