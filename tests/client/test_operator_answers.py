"""Answers hold all that the daemon's messages do, and `--json` prints them as protobuf's JSON would."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from resharder.client.operator import answers
from resharder.client.operator.answers import Server, UpdateStrategy, VersionTarget
from resharder.client.operator.convert import answer, keywords, plain
from resharder.v1 import resources_pb2

from tools.answers import ALWAYS_SENT, NAMES, PAGE, messages, render

PAIRS: list[tuple[type[Message], type[Any]]] = [
    (GetMessageClass(message), getattr(answers, NAMES.get(message.name, message.name))) for message in messages()
]
MOMENTS = (1_700_000_000_000_000_000, 1_700_000_000_120_000_000, 1_700_000_000_123_456_000)


def test_the_answers_are_those_of_the_proto() -> None:
    """After a change of a .proto file: `make proto`."""
    assert PAGE.read_text() == render()


def expected(message: Message) -> dict[str, Any]:
    """Protobuf's JSON, with numbers for its 64-bit integers: `--json` before there were dataclasses."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(message, found)


def _numbers(message: Any, found: dict[str, Any]) -> dict[str, Any]:
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if field.message_type is not None:
            if field.message_type.full_name.startswith("resharder.") and not field.message_type.GetOptions().map_entry:
                inner = getattr(message, field.name)
                if isinstance(value, list):
                    for one, dictionary in zip(inner, value, strict=True):
                        _numbers(one, dictionary)
                elif isinstance(value, dict):
                    _numbers(inner, value)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and value is not None:
            found[field.name] = [int(v) for v in value] if isinstance(value, list) else int(value)
    return found


def filled(message: Any, seeds: Iterator[int]) -> Any:
    """Another value in every field, two in every list."""
    for field in message.DESCRIPTOR.fields:
        many, value = field.is_repeated, getattr(message, field.name)
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                value[f"key {next(seeds)}"] = f"value {next(seeds)}"
            elif field.message_type.full_name == "google.protobuf.Timestamp":
                value.FromNanoseconds(MOMENTS[next(seeds) % len(MOMENTS)])
            elif many:
                filled(value.add(), seeds)
                filled(value.add(), seeds)
            else:
                value.SetInParent()
                filled(value, seeds)
        elif many:
            value.extend([_scalar(field, seeds), _scalar(field, seeds)])
        else:
            setattr(message, field.name, _scalar(field, seeds))
    return message


def _scalar(field: Any, seeds: Iterator[int]) -> Any:
    seed = next(seeds)
    if field.enum_type is not None:
        numbers = sorted(field.enum_type.values_by_number)
        return numbers[1 + seed % (len(numbers) - 1)]
    if field.cpp_type == field.CPPTYPE_STRING:
        return f"text {seed}" if field.type == field.TYPE_STRING else bytes([seed % 256, 255])
    if field.cpp_type == field.CPPTYPE_BOOL:
        return True
    return seed + 0.25 if field.cpp_type == field.CPPTYPE_DOUBLE else seed


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
