"""In peace, a node has what its workers need, and nothing else."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from resharder.client.operator.answers import ServerStatus
from resharder.client.operator.nodes import NodeCopyStatus, NodeLife, NodeStatus

from tests.chaos.kept_node import node_problems

COPY = NodeCopyStatus("models/policy/versions/7", 1, 1, 1, True, "", ("right",))
NODE = NodeStatus("nodes/node", NodeLife.LIVE, "127.0.0.1:1", 100, 10, 0, 0, 0, 0, None, (COPY,), 0, ())


def server(transport: str = "node") -> ServerStatus:
    worker = SimpleNamespace(rank=0, transport=transport, transport_reason="nodes/node: it is lost")
    return cast(ServerStatus, SimpleNamespace(name="servers/right", workers=(worker,)))


def problems(stored: tuple[int, ...] = (6, 7), newest: int = 7, transport: str = "node", **changes: Any) -> list[str]:
    return node_problems([replace(NODE, **changes)], [server(transport)], stored, (6, 7), newest)


def test_a_node_that_serves_its_workers_has_no_problem() -> None:
    assert problems() == []
    assert problems(newest=0, copies=()) == [], "no server reads through it"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"state": NodeLife.LOST}, "expected a live node"),
        ({"copies": ()}, "the node does not hold version 7: None"),
        ({"copies": (replace(COPY, held_pieces=0),)}, "the node does not hold version 7"),
        ({"copies": (replace(COPY, problem="memory full"),)}, "memory full"),
        ({"stored": (5, 7)}, "the node keeps versions [5]"),
        ({"used_bytes": 101}, "the node uses 101 of 100 bytes"),
        ({"transport": "http"}, "servers/right worker 0 read http: nodes/node: it is lost"),
    ],
)
def test_each_deviation_is_a_problem(given: dict[str, Any], problem: str) -> None:
    (found,) = problems(**given)
    assert problem in found
