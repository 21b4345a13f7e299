"""Answers hold all that the daemon's messages do, and `--json` prints them as protobuf's JSON would."""

from dataclasses import FrozenInstanceError, fields
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from resharder.client.operator import answers
from resharder.client.operator.answers import Server, UpdateStrategy, VersionTarget
from resharder.client.operator.convert import answer, keywords, plain
from resharder.v1 import resources_pb2

from tests.support.proto_json import MOMENTS, expected, filled
from tools.answers import ALWAYS_SENT, NAMES, PAGE, messages, render

PAIRS: list[tuple[type[Message], type[Any]]] = [
    (GetMessageClass(message), getattr(answers, NAMES.get(message.name, message.name))) for message in messages()
]


def test_the_answers_are_those_of_the_proto() -> None:
    """After a change of a .proto file: `make proto`."""
    assert PAGE.read_text() == render()


@pytest.mark.parametrize(("message", "kind"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_in_its_answer_and_every_state_in_its_enumeration(
    message: type[Message], kind: type[Any]
) -> None:
    assert [field.name for field in message.DESCRIPTOR.fields if field.name not in {f.name for f in fields(kind)}] == []
    for field in message.DESCRIPTOR.fields:
        for number in field.enum_type.values_by_number if field.enum_type is not None else ():
            one = message(**{field.name: number})
            assert expected(one)[field.name] == plain(answer(kind, one))[field.name]


@pytest.mark.parametrize(("message", "kind"), PAIRS, ids=lambda kind: kind.__name__)
def test_json_is_what_protobuf_prints(message: type[Message], kind: type[Any]) -> None:
    full = filled(message(), iter(range(1, 10_000)))
    assert plain(answer(kind, full)) == expected(full)
    # What the daemon always sends of a fleet and a move is not optional in their answers.
    empty = message()
    for name in ("target", "strategy"):
        if f"{message.DESCRIPTOR.name}.{name}" in ALWAYS_SENT:
            getattr(empty, name).SetInParent()
    assert plain(answer(kind, empty)) == expected(empty)


def test_answers_are_frozen_and_of_plain_types() -> None:
    message = resources_pb2.Server(name="servers/a", state=resources_pb2.Server.SERVING)
    message.lease_expire_time.FromNanoseconds(MOMENTS[1])
    server = answer(answers.Server, message)
    assert (server.state, server.install, server.workers) == (Server.State.SERVING, None, ())
    assert server.lease_expire_time == datetime(2023, 11, 14, 22, 13, 20, 120_000, UTC)
    with pytest.raises(FrozenInstanceError):
        server.version = 3  # type: ignore[misc]


def test_a_state_of_a_newer_daemon_is_unspecified() -> None:
    assert answer(answers.Server, resources_pb2.Server(state=99)).state == Server.State.UNSPECIFIED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (VersionTarget(VersionTarget.Kind.LATEST, every_seconds=9), resources_pb2.VersionTarget),
        (UpdateStrategy(UpdateStrategy.Kind.CANARY, 2, 1, 3, 60.0, True, "eval"), resources_pb2.UpdateStrategy),
    ],
)
def test_an_order_arrives_as_it_was_given(value: Any, message: type[Message]) -> None:
    assert answer(type(value), message(**keywords(value))) == value
