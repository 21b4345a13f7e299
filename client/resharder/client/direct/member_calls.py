"""Calls to the daemon that ranks and workers of servers share, as members of a group."""

from collections.abc import Sequence

from resharder.client.rpc.channel import Channel
from resharder.v1 import direct_pb2, direct_pb2_grpc

_ASK = 10.0  # bound in seconds on one attempt


def finish(channel: Channel, member: direct_pb2.Member, group: str, error: str = "", seconds: float = 0.0, size: int = 0) -> None:
    """Report the outcome of a transfer, or of forming the group, for this member. Raises ResharderError.

    Args:
        channel: Channel to the daemon.
        member: This process.
        group: Group of the transfer.
        error: Reason of a failure, which ends the group for all members; empty for success.
        seconds: Duration of the transfer.
        size: Bytes that this member received.
    """
    request = direct_pb2.FinishTransferRequest(
        member=member, group=group, ok=not error, error=error, seconds=seconds, size_bytes=size
    )
    channel.call(direct_pb2_grpc.DirectServiceStub(channel.grpc).FinishTransfer, request, timeout=_ASK, patience=0)


def declare(
    channel: Channel,
    member: direct_pb2.Member,
    fingerprint: str,
    layout: direct_pb2.MemoryLayout,
    host: str = "",
    *,
    frozen: Sequence[int] = (),
    keeps: bool = False,
) -> None:
    """Declare the layout of this member's memory, which replaces an earlier one. Raises ResharderError.

    Args:
        channel: Channel to the daemon.
        member: This process.
        fingerprint: Hash of the layout.
        layout: The layout.
        host: Of a rank that offers its versions to linked servers on other hosts too.
        frozen: Positions of the layout's tensors that a rank does not expect to change.
        keeps: Whether this is a worker, which can receive a version without them.
    """
    request = direct_pb2.DeclareMemoryRequest(
        member=member, fingerprint=fingerprint, layout=layout, host=host, frozen=frozen, keeps=keeps
    )
    channel.call(direct_pb2_grpc.DirectServiceStub(channel.grpc).DeclareMemory, request, timeout=120)
