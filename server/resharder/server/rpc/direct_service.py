"""DirectService: calls of ranks and workers on the direct path."""

from collections.abc import Iterator

from google.protobuf.message import Message
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.direct import copies_to_proto, layout_from_proto, layout_to_proto
from resharder.server.direct.direct import Direct
from resharder.server.direct.plans import Declared, Member
from resharder.server.direct.state import Link, Task
from resharder.server.infra.change_signal import Pause, Waiting
from resharder.server.ingest.intake import Intake
from resharder.server.rpc.convert import seconds
from resharder.server.rpc.dispatch import Call
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.version import parse_name
from resharder.v1 import direct_pb2


class DirectService:
    """Methods of `DirectService`. Calls about a group need its id, which only its members receive."""

    def __init__(self, direct: Direct, intake: Intake) -> None:
        self._direct, self._intake = direct, intake

    def DeclareMemory(self, request: direct_pb2.DeclareMemoryRequest, call: Call) -> Message:
        """Replace a member's declared layout. Raises InvalidArgument (WORKER) and errors of unknown owners."""
        member = _member(request.member)
        publishers: list[str] = []
        if "/publishers/" in member.owner:
            model = self._intake.publisher(member.owner, member.rank).model
            publishers = [each.name for each in self._intake.publishers() if each.model == model]
        else:
            self._direct.check_worker(member)
        pieces = layout_from_proto(request.layout, member.rank)
        frozen = frozenset(pieces.specs[number].name for number in request.frozen if 0 <= number < len(pieces.specs))
        declared = Declared(request.host[:128], frozen, request.keeps)
        self._direct.declare(member, request.fingerprint, pieces, publishers, declared)
        return direct_pb2.DeclareMemoryResponse()

    def OfferVersion(self, request: direct_pb2.OfferVersionRequest, call: Call) -> Iterator[direct_pb2.DirectTask | Pause]:
        """Stream a rank's tasks for a version that it has in memory. The end of the call ends the offer."""
        member, (model, number) = _member(request.member), parse_name(request.version, "versions")
        publisher = self._intake.publisher(member.owner, member.rank)
        record = self._intake.store.catalogue.get(model, number)
        if (record.model, record.epoch) != (publisher.model, publisher.epoch):
            raise InvalidArgument("RESOURCE_NAME", f"expected a version of {publisher.name}, got {record.name}")
        wait = seconds(request.wait_seconds)
        failpoint("direct.offer")
        offer = self._direct.offer(
            member,
            request.memory,
            model,
            number,
            publisher.world_size,
            wait,
            servers_sleep=request.servers_sleep,
            ahead_only=request.ahead_only,
            host=request.host[:128],
            elsewhere=request.elsewhere,
        )

        def sealed() -> bool:
            upload = self._intake.upload(model, number)
            return upload is None or len(upload.open_ranks()) < publisher.world_size

        def state() -> str:
            return self._intake.store.catalogue.get(model, number).state

        try:
            for task in self._direct.tasks(offer, member.rank, state, sealed):
                yield task if isinstance(task, Pause) else self._task(task)
        finally:
            self._direct.leave(offer, member.rank)

    def _task(self, task: Task) -> direct_pb2.DirectTask:
        link = self._link(task.link) if task.link else None
        sent = layout_to_proto(task.sent) if task.sent else None
        return direct_pb2.DirectTask(
            kind=task.kind,
            group=task.group,
            link=link,
            sent=sent,
            during_transfer=task.during_transfer,
            frozen=task.frozen,
            kept=task.kept and task.kind == direct_pb2.DirectTask.RUN,
        )

    def JoinTransfer(self, request: direct_pb2.JoinTransferRequest, call: Call) -> Waiting[Message]:
        """Return a worker's link to its group, without the copies if the worker has this link already."""
        model, number = parse_name(request.version, "versions")
        failpoint("direct.join")
        link = yield from self._direct.join(
            _member(request.member), request.memory, model, number, request.install, request.group
        )
        return self._link(link, known=request.group == link.group)

    def MeetRanks(self, request: direct_pb2.MeetRanksRequest, call: Call) -> Waiting[Message]:
        """Return a worker's link to ranks on other hosts, without the copies if the worker has it already; empty without one."""
        link = yield from self._direct.meet(_member(request.member), request.memory, request.group, seconds(request.seconds))
        return self._link(link, known=request.group == link.group) if link is not None else direct_pb2.DirectLink()

    def StartTransfer(self, request: direct_pb2.TransferRequest, call: Call) -> Waiting[Message]:
        """Return once the transfer of the worker's group has begun."""
        kept = yield from self._direct.start(_member(request.member), request.group, request.install, kept=request.kept)
        return direct_pb2.StartTransferResponse(kept=kept)

    def FinishTransfer(self, request: direct_pb2.FinishTransferRequest, call: Call) -> Message:
        """Record that a member has finished its part of a transfer, or failed."""
        member = _member(request.member)
        self._direct.finish(member, request.group, request.ok, request.error, request.size_bytes)
        return direct_pb2.FinishTransferResponse()

    def PutDigests(self, request: direct_pb2.PutDigestsRequest, call: Call) -> Message:
        """Record a rank's digests of the boxes that it sends."""
        _, number = parse_name(request.version, "versions")
        self._direct.report(_member(request.member), request.group, number, request.digests, frozen=request.frozen)
        return direct_pb2.PutDigestsResponse()

    def GetDigests(self, request: direct_pb2.GetDigestsRequest, call: Call) -> Waiting[Message]:
        """Return the digests of a worker's boxes, and the fingerprint that it reports until the version is READY."""
        model, number = parse_name(request.version, "versions")
        digests = yield from self._direct.digests(
            _member(request.member), request.group, number, during_transfer=request.during_transfer, frozen=request.frozen
        )
        store = self._intake.store
        record = store.catalogue.get(model, number)
        claims = (each for each in self._intake.publishers() if (each.model, each.epoch) == (model, record.epoch))
        publisher = next(claims, None)  # None if it has just been fenced
        return direct_pb2.ReportedDigests(
            digests=digests,
            fingerprint=record.ahead_fingerprint,
            config=store.reader.config(model, number),
            tensors=publisher.fingerprint if publisher else "",
        )

    def SetGroupKey(self, request: direct_pb2.SetGroupKeyRequest, call: Call) -> Message:
        """Set a key of a group's key-value store."""
        self._direct.set_key(request.group, request.key, request.value)
        return direct_pb2.SetGroupKeyResponse()

    def GetGroupKey(self, request: direct_pb2.GetGroupKeyRequest, call: Call) -> Waiting[Message]:
        """Return a key of a group's key-value store; an empty value if it is not set in time."""
        value = yield from self._direct.get_key(request.group, request.key, seconds(request.wait_seconds))
        return direct_pb2.GroupKey(value=value)

    def _link(self, link: Link, known: bool = False) -> direct_pb2.DirectLink:
        return direct_pb2.DirectLink(
            group=link.group,
            rank=link.rank,
            size=link.size,
            copies=None if known else copies_to_proto(link.copies),
            most_peers=link.most_peers,
            most_made=link.most_made,
            staging_bytes=self._direct.staging_bytes,
            seconds=self._direct.seconds,
            nixl=self._direct.open_network,
            trial=link.trial,
            frozen=() if known else link.frozen,
        )


def _member(message: direct_pb2.Member) -> Member:
    """Convert a member. Raises InvalidArgument (WORKER)."""
    owned = message.owner.startswith("servers/") or "/publishers/" in message.owner
    if not owned or not message.process or message.rank < 0 or len(message.process) > 128:
        raise InvalidArgument("WORKER", f"expected a publisher or server, a rank and a process, got {message}")
    return Member(message.owner, message.rank, message.process)
