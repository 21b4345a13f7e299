"""A member's calls to the daemon that ranks and servers share."""

from resharder.client.rpc.channel import Channel
from resharder.v1 import direct_pb2, direct_pb2_grpc

_ASK = 10.0  # seconds


def finish(channel: Channel, member: direct_pb2.Member, group: str, error: str = "", seconds: float = 0.0, size: int = 0) -> None:
    """Report the outcome of a transfer for this member. Raises ResharderError."""
    request = direct_pb2.FinishTransferRequest(
        member=member, group=group, ok=not error, error=error, seconds=seconds, size_bytes=size
    )
    channel.call(direct_pb2_grpc.DirectServiceStub(channel.grpc).FinishTransfer, request, timeout=_ASK, patience=0)


def declare(channel: Channel, member: direct_pb2.Member, fingerprint: str, layout: direct_pb2.MemoryLayout) -> None:
    """Register the layout of this member's memory. Raises ResharderError."""
    request = direct_pb2.DeclareMemoryRequest(member=member, fingerprint=fingerprint, layout=layout)
    channel.call(direct_pb2_grpc.DirectServiceStub(channel.grpc).DeclareMemory, request, timeout=120)
