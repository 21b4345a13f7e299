"""Channels: calls that are made again, and the end of a channel."""

import random

import pytest
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.converters.wire.backoff import Backoff
from resharder.v1 import operator_pb2, operator_pb2_grpc


def test_waiting_leaves_the_random_numbers_of_a_trainer_alone() -> None:
    before, backoff = random.getstate(), Backoff(patience=0.05, first=0.01)
    while backoff.wait():
        pass
    assert random.getstate() == before


CLOSED = r"the connection to 127\.0\.0\.1:1 was closed"


def test_a_closed_channel_refuses_calls_and_stubs() -> None:
    """grpcio makes a stub of a closed channel by a segmentation fault."""
    operator, channel = Operator("127.0.0.1:1"), Channel("127.0.0.1:1")
    stub = operator_pb2_grpc.OperatorServiceStub(channel.grpc)
    for _ in range(2):
        operator.close()
        channel.close()
    with pytest.raises(UsageError, match=CLOSED):
        channel.call(stub.ListFleets, operator_pb2.ListFleetsRequest())
    with pytest.raises(UsageError, match=CLOSED):
        operator_pb2_grpc.OperatorServiceStub(channel.grpc)
    with pytest.raises(UsageError, match=CLOSED):
        operator.versions("policy")
