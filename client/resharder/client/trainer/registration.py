"""Registration of a rank with the daemon, and its assignment: the boxes that the rank sends."""

import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256

from resharder.client.errors import WaitTimeout, refusal
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.identity import RankIdentity
from resharder.client.trainer.rank_layout import RankLayout
from resharder.client.transport.base import AssignedSlot
from resharder.client.transport.shared_memory import read_nonces
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.boxes import boxes_to_proto, spec_to_proto
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

State = resources_pb2.Publisher.State
_POLL_SECONDS = 20.0
_NODE_SECONDS = 10.0  # for nodes to report to a daemon that has restarted; they try again every 2 s, as connections do
_NODE_POLL_SECONDS = 0.3


class Registration:
    """A rank's registration with one publisher of the daemon. `assignment` asks the daemon once and caches the answer."""

    def __init__(
        self,
        channel: Channel,
        publisher: resources_pb2.Publisher,
        identity: RankIdentity,
        rank_layout: RankLayout,
        nonce_files: Sequence[str] = (),
    ) -> None:
        self._channel, self._identity, self._rank_layout = channel, identity, rank_layout
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._assigned: tuple[AssignedSlot, Sequence[int]] | None = None
        self._lock = threading.Lock()
        self.name: str = publisher.name
        self.epoch: int = publisher.epoch
        self.store: resources_pb2.StoreAccess = publisher.store
        self.data_address: str = publisher.data_address
        self.lease_seconds: float = publisher.lease_seconds
        self.newest_version: int = publisher.newest_version
        self.nonce_files = nonce_files
        """Nonce files of nodes that this rank could read."""

    @property
    def complete(self) -> bool:
        """Whether the assignment is known, for which every rank has registered."""
        return self._assigned is not None

    def assignment(self, timeout: float) -> tuple[AssignedSlot, Sequence[int]]:
        """Return the slot, and the position of each of its boxes in the rank's registration, once all ranks have registered.

        Raises LayoutRejected, OutOfRoom and StaleEpoch; WaitTimeout after `timeout` seconds.
        """
        with self._lock:
            if self._assigned is None:
                self._assigned = self._slot(self._ask(timeout))
            return self._assigned

    def _ask(self, timeout: float) -> publisher_pb2.Assignment:
        end = time.monotonic() + timeout
        while True:
            wait = max(0.0, min(_POLL_SECONDS, end - time.monotonic()))
            request = publisher_pb2.GetAssignmentRequest(publisher=self.name, rank=self._identity.rank, wait_seconds=wait)
            waiting = f"{self.name} is not ready to publish after {timeout:g} s"
            try:
                answer: publisher_pb2.Assignment = self._channel.call(self._stub.GetAssignment, request, timeout=wait + 30)
            except WaitTimeout as error:
                waiting = f"{waiting}: {error}"
            else:
                raise_refusal(answer.publisher)
                if answer.publisher.state == State.ACTIVE:
                    return answer
                waiting = f"{waiting}: {answer.publisher.registered_slots} of {self._identity.world_size} ranks have registered"
            if time.monotonic() >= end:
                raise WaitTimeout(waiting)

    def _slot(self, answer: publisher_pb2.Assignment) -> tuple[AssignedSlot, Sequence[int]]:
        failpoint("register.assigned")
        assigned = [self._rank_layout.boxes[position] for position in answer.boxes]
        slot = AssignedSlot(
            rank=self._identity.rank,
            boxes=tuple(each.box for each in assigned),
            specs=tuple(self._rank_layout.tensors[each.tensor] for each in assigned),
            chunk_bytes=answer.chunk_bytes,
            node=answer.node,
            node_boxes=tuple(answer.node_boxes),
            gathered_boxes=tuple(answer.gathered_boxes),
            frozen_boxes=tuple(answer.frozen_boxes),
        )
        return slot, list(answer.boxes)


def register(
    channel: Channel,
    model: str,
    files: Sequence[resources_pb2.ModelFile],
    identity: RankIdentity,
    rank_layout: RankLayout,
    *,
    shares: bool = True,
    former: Sequence[str] = (),
    warnings: Sequence[str] = (),
    base: str = "",
) -> Registration:
    """Claim the model for the job and register this rank's layout. Rank 0 sends the model's files.

    With `shares`, the rank reports which nonce files it can read, and so on which host it is. This host holds for the life of the
    publisher. After a restart of the daemon, the rank therefore waits some seconds for reports of the nodes whose files it could
    read before, `former`. `warnings` are texts for the record of the job's versions, `base` the model that an adapter is loaded
    beside.

    Raises LayoutRejected, OutOfRoom and StaleEpoch.
    """
    stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
    claim = publisher_pb2.CreatePublisherRequest(
        model=resources_pb2.Model(name=model, files=files if identity.rank == 0 else ()),
        job=identity.job,
        world_size=identity.world_size,
        together=identity.together,
        base=base,
    )
    publisher = _claimed(channel, claim, former if shares else ())
    numbers = {name: number for number, name in enumerate(rank_layout.tensors)}
    readable = read_nonces([publisher.store.nonce_file, *publisher.nonce_files]) if shares else []
    request = publisher_pb2.RegisterSlotRequest(
        publisher=publisher.name,
        rank=identity.rank,
        process=identity.process,
        tensors=[spec_to_proto(spec) for spec in rank_layout.tensors.values()],
        boxes=boxes_to_proto((numbers[each.tensor], each.box, each.replica) for each in rank_layout.boxes),
        contributed=_shared(rank_layout.contributed, numbers),
        received=_shared(rank_layout.received, numbers),
        readable=readable,
        gathers=True,
        warnings=warnings,
        frozen=[numbers[name] for name in rank_layout.frozen],
    )
    failpoint("register.slot")
    registered = channel.call(stub.RegisterSlot, request, timeout=300)
    raise_refusal(registered)
    nodes = [access.nonce_file for access in readable if access.nonce_file != publisher.store.nonce_file]
    return Registration(channel, registered, identity, rank_layout, list(dict.fromkeys([*nodes, *former])))


def _claimed(channel: Channel, claim: publisher_pb2.CreatePublisherRequest, former: Sequence[str]) -> resources_pb2.Publisher:
    """Claim the model, until the nodes with nonce files of `former` are known to the daemon or some seconds have passed.

    Nodes that are drained or gone are not waited for. A nonce identifies a node: nonce files of several hosts may have one path.
    """
    stub, end = publisher_pb2_grpc.PublisherServiceStub(channel.grpc), time.monotonic() + _NODE_SECONDS
    while True:
        failpoint("register.claim")
        publisher: resources_pb2.Publisher = channel.call(stub.CreatePublisher, claim)
        raise_refusal(publisher)
        late = {sha256(access.nonce).hexdigest() for access in read_nonces(former)}.difference(publisher.settled_nonces)
        if publisher.state != State.REGISTERING or not late or time.monotonic() >= end:
            return publisher
        time.sleep(_NODE_POLL_SECONDS)


def _shared(blocks: Mapping[str, list[int]], numbers: Mapping[str, int]) -> list[publisher_pb2.SharedBlocks]:
    return [publisher_pb2.SharedBlocks(tensor=numbers[name], blocks=found) for name, found in blocks.items()]


def raise_refusal(publisher: resources_pb2.Publisher) -> None:
    """Raise StaleEpoch for a FENCED publisher, and the error of its reason for a REJECTED one."""
    if publisher.state in (State.FENCED, State.REJECTED):
        raise refusal(publisher.name, publisher.reason)
