"""The revision of the protocol: who is refused by it, and that it is raised when the wire changes its meaning."""

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from resharder.client import Operator
from resharder.client.errors import Refused
from resharder.client.rpc import channel
from resharder.server.rpc.dispatch import refusal
from resharder.v1 import direct_pb2, operator_pb2, operator_pb2_grpc, publisher_pb2, resources_pb2, server_pb2, server_pb2_grpc
from resharder.v1.revision import OLDEST, REVISION, named, user_agent

from tests.support.daemon import Daemon

BEGINNING = Path(__file__).with_name(f"protocol_{REVISION}.json")
"""Wire format at the beginning of the revision. A new revision gets its own file: `wire()` as JSON."""


def speaking(agent: str, daemon: Daemon) -> grpc.Channel:
    return grpc.insecure_channel(
        daemon.endpoint, options=[("grpc.primary_user_agent", agent), ("grpc.use_local_subchannel_pool", 1)]
    )


@pytest.mark.parametrize(
    ("agent", "hint"),
    [
        (user_agent("0.1.0"), ""),
        (f"resharder/9.9 protocol/{REVISION} grpc-python/1.80.0", ""),
        ("grpcurl/1.9.3", ""),
        ("somebody resharder/1 protocol/99", ""),
        ("", ""),
        (f"resharder/9.9 protocol/{REVISION + 1} grpc-python/1.80.0", "(release 9.9): upgrade the daemon first"),
        (f"resharder/0.0.1 protocol/{OLDEST - 1}", "(release 0.0.1): upgrade the client"),
    ],
)
def test_clients_of_another_revision_are_told_which_side_to_upgrade(agent: str, hint: str) -> None:
    found = refusal((("te", "trailers"), ("user-agent", agent)))
    assert found.endswith(hint)
    assert bool(found) == bool(hint)


def test_a_client_names_its_release_and_revision() -> None:
    assert named(user_agent("0.1.0") + " grpc-python/1.80.0 grpc-c/50 (linux; chttp2)") == ("0.1.0", REVISION)


def test_a_later_client_is_refused_in_every_form_of_call_and_health_is_not(daemon: Daemon) -> None:
    with speaking(f"resharder/9.9 protocol/{REVISION + 1}", daemon) as later:
        operator, server = operator_pb2_grpc.OperatorServiceStub(later), server_pb2_grpc.ServerServiceStub(later)
        calls = [
            lambda: operator.GetDaemon(operator_pb2.GetDaemonRequest(), timeout=60),
            lambda: next(operator.ListEvents(operator_pb2.ListEventsRequest(), timeout=60)),
            lambda: next(server.Attend(iter([server_pb2.ControlReport(server="one")]), timeout=60)),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert channel.error_of(refused.value, "").reason == "PROTOCOL"
        asked = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(later).Check(asked, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_sdk_says_so(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with Operator(daemon.endpoint) as operator:
        assert operator.daemon().release
    monkeypatch.setattr(channel, "user_agent", lambda release: f"resharder/{release} protocol/{REVISION + 1}")
    with Operator(daemon.endpoint) as operator, pytest.raises(Refused, match="upgrade the daemon first") as refused:
        operator.daemon()
    assert refused.value.reason == "PROTOCOL"


def wire() -> dict[str, object]:
    """{name: meaning} of every field, enum value and call."""
    found: dict[str, object] = {}
    for module in (resources_pb2, publisher_pb2, server_pb2, operator_pb2, direct_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            _add(message.name, message, found)
        for enum in file.enum_type:
            found |= {f"{enum.name}.{value.name}": value.number for value in enum.value}
        for service in file.service:
            for call in service.method:
                streams = [call.client_streaming, call.server_streaming]
                found[f"{service.name}.{call.name}"] = [call.input_type, call.output_type, *streams]
    return found


def _add(name: str, message: descriptor_pb2.DescriptorProto, found: dict[str, object]) -> None:
    for field in message.field:
        found[f"{name}.{field.name}"] = [field.number, field.type, field.label, field.type_name]
    for enum in message.enum_type:
        found |= {f"{name}.{enum.name}.{value.name}": value.number for value in enum.value}
    for nested in message.nested_type:
        _add(f"{name}.{nested.name}", nested, found)


def test_within_a_revision_the_wire_only_grows() -> None:
    now, began = wire(), json.loads(BEGINNING.read_text())
    changed = {name: (meaning, now.get(name)) for name, meaning in began.items() if now.get(name) != meaning}
    assert not changed, "raise REVISION in proto/resharder/v1/revision.py, or leave what there was as it is"
