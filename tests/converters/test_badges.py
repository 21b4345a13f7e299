"""Badges: the words and colours of states, the same in the command, on the page and in its data."""

from collections.abc import Iterator

import pytest
from resharder.converters.badges import Badge, ServerState, badge, health, publisher_badge, server_badge
from resharder.v1 import resources_pb2

ENUMS = {
    "server": resources_pb2.Server.State,
    "move": resources_pb2.Move.State,
    "version": resources_pb2.Version.State,
    "publisher": resources_pb2.Publisher.State,
    "node": resources_pb2.Node.State,
    "install": resources_pb2.Install.State,
}


def states() -> Iterator[tuple[str, str]]:
    for kind, enum in ENUMS.items():
        yield from ((kind, name) for name, _ in enum.items() if not name.endswith("_UNSPECIFIED"))


@pytest.mark.parametrize(("kind", "state"), [*states()])
def test_every_state_of_the_protocol_has_a_badge_of_its_name(kind: str, state: str) -> None:
    found = badge(kind, state)
    assert found.text == state
    assert found.severity in ("good", "busy", "idle", "warn", "bad")


@pytest.mark.parametrize(("kind", "state"), [*states()])
def test_failed_lost_stopped_aborted_and_rejected_are_red_and_nothing_else_is(kind: str, state: str) -> None:
    assert (badge(kind, state).severity == "bad") == (state in ("FAILED", "LOST", "STOPPED", "ABORTED", "REJECTED"))


def test_a_server_is_shown_with_what_its_state_leaves_out() -> None:
    assert server_badge("SERVING") == Badge("SERVING", "good")
    assert server_badge("SERVING", ahead=True) == Badge("SERVING, ahead", "good")
    assert server_badge("ASLEEP", power="ASLEEP_2") == Badge("ASLEEP, level 2", "idle")
    assert server_badge("ASLEEP", power="WEIGHTS_AWAKE") == Badge("ASLEEP, weights awake", "idle")
    assert server_badge("DRAINED", in_flight=3) == Badge("DRAINED, 3 in flight", "idle")


def test_an_import_that_has_ended_is_finished_and_a_trainer_that_is_gone_is_a_warning() -> None:
    assert publisher_badge("GONE", "import-step-200-0f") == Badge("FINISHED", "idle")
    assert publisher_badge("GONE", "run-42") == Badge("GONE", "warn")
    assert publisher_badge("ACTIVE", "import-step-200-0f") == Badge("ACTIVE", "good")


@pytest.mark.parametrize(
    ("servers", "wanted", "move", "failed", "counts", "shown"),
    [
        ({"a": ("SERVING", 4), "b": ("SERVING", 4)}, 4, "DONE", (), (2, 2, 0, 0, 0), ("UP TO DATE", "good")),
        ({"a": ("SERVING", 4), "b": ("LOST", 4)}, 4, "", (), (2, 1, 0, 0, 1), ("1 LOST", "bad")),
        ({"a": ("FAILED", 0), "b": ("LOST", 0)}, 4, "MOVING", (), (2, 0, 0, 1, 1), ("1 LOST, 1 FAILED", "bad")),
        ({"a": ("SERVING", 4), "b": ("SERVING", 3)}, 4, "DONE", ("b",), (2, 2, 1, 1, 0), ("1 FAILED", "bad")),
        ({"a": ("SERVING", 4)}, 4, "DONE", ("a",), (1, 1, 0, 0, 0), ("UP TO DATE", "good")),
        ({"a": ("SERVING", 4), "b": ("SERVING", 3)}, 4, "STOPPED", (), (2, 2, 1, 0, 0), ("STOPPED", "bad")),
        ({"a": ("SERVING", 4), "b": ("SERVING", 3)}, 4, "STOPPED", ("b",), (2, 2, 1, 1, 0), ("1 FAILED, STOPPED", "bad")),
        ({"a": ("SERVING", 4), "b": ("STAGING", 3)}, 4, "MOVING", (), (2, 2, 1, 0, 0), ("MOVING", "busy")),
        ({"a": ("WAITING", 3, True), "b": ("WAITING", 3)}, 4, "STAGING", (), (2, 1, 2, 0, 0), ("STAGING", "busy")),
        ({"a": ("SERVING", 3)}, 4, "BACK", (), (1, 1, 1, 0, 0), ("BACK", "warn")),
        ({"a": ("SERVING", 3)}, 4, "", (), (1, 1, 1, 0, 0), ("BEHIND", "warn")),
        ({"a": ("BOOTING", 0)}, 4, "", (), (1, 0, 1, 0, 0), ("UPDATING", "busy")),
        ({"a": ("ASLEEP", 3), "b": ("DRAINED", 3)}, 4, "", (), (2, 0, 0, 0, 0), ("OUT OF SERVICE", "idle")),
        ({}, 4, "", (), (0, 0, 0, 0, 0), ("NO SERVERS", "idle")),
        ({"a": ("BOOTING", 0)}, 0, "", (), (1, 0, 0, 0, 0), ("NO VERSION", "idle")),
    ],
)
def test_the_health_of_a_fleet_counts_its_servers_and_names_the_worst(
    servers: dict[str, tuple[str, int, bool] | tuple[str, int]],
    wanted: int,
    move: str,
    failed: tuple[str, ...],
    counts: tuple[int, ...],
    shown: tuple[str, str],
) -> None:
    found = health({id: ServerState(*one) for id, one in servers.items()}, wanted, move, failed)
    assert (found.servers, found.serving, found.behind, found.failed, found.lost) == counts
    assert found.badge == Badge(*shown)  # type: ignore[arg-type]
