"""An OperatorService whose fleets move as a test says: for what commands make of answers that a daemon takes long to give.

with FakeOperator(fleet=…, servers=[…]) as fake:
    fake.later(lambda: fake.fleet.move.CopyFrom(…))   # happens at the next look
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc
from google.protobuf.message import Message
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2


class FakeOperator(operator_pb2_grpc.OperatorServiceServicer):
    def __init__(self, *fleets: resources_pb2.Fleet, servers: list[resources_pb2.Server] | None = None) -> None:
        self.fleets, self.servers = list(fleets), servers or []
        self.daemon: operator_pb2.Daemon | None = None
        self.versions: list[resources_pb2.Version] = []
        self.nodes: list[resources_pb2.Node] = []
        self.shortages: list[operator_pb2.ReplicaShortage] = []
        self.retired = operator_pb2.RetireVersionsResponse()
        self.archive = operator_pb2.ListArchiveResponse()
        self.verified = operator_pb2.VerifyServerResponse()
        self.event = operator_pb2.Event(id=7, kind="version", subject="models/policy/versions/1", what="ready")
        self.asked: list[Message] = []
        self._later: deque[Callable[[], None]] = deque()
        self._server = grpc.server(ThreadPoolExecutor(4))
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    @property
    def fleet(self) -> resources_pb2.Fleet:
        return self.fleets[0]

    def later(self, *happens: Callable[[], None]) -> None:
        """One of them before each look at the fleets."""
        self._later.extend(happens)

    def GetDaemon(self, request: Message, context: grpc.ServicerContext) -> Message:
        return self.daemon or operator_pb2.Daemon(release="fake", models=sorted({fleet.model for fleet in self.fleets}))

    def ListVersions(self, request: operator_pb2.ListVersionsRequest, context: grpc.ServicerContext) -> Message:
        return operator_pb2.ListVersionsResponse(versions=self.versions)

    def GetVersion(self, request: operator_pb2.GetVersionRequest, context: grpc.ServicerContext) -> Message:
        found = {version.name: version for version in self.versions}
        if request.version not in found:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no version {request.version}")
        return found[request.version]

    def ListServers(self, request: operator_pb2.ListServersRequest, context: grpc.ServicerContext) -> Message:
        return operator_pb2.ListServersResponse(servers=[s for s in self.servers if request.fleet in ("", s.fleet)])

    def ListFleets(self, request: Message, context: grpc.ServicerContext) -> Message:
        if self._later:
            self._later.popleft()()
        return operator_pb2.ListFleetsResponse(fleets=self.fleets)

    def ListNodes(self, request: Message, context: grpc.ServicerContext) -> Message:
        return operator_pb2.ListNodesResponse(nodes=self.nodes, shortages=self.shortages)

    def SetNodeDrained(self, request: operator_pb2.SetNodeDrainedRequest, context: grpc.ServicerContext) -> Message:
        self.asked.append(request)
        return next(node for node in self.nodes if node.name == request.node)

    def UpdateFleet(self, request: operator_pb2.UpdateFleetRequest, context: grpc.ServicerContext) -> Message:
        self.asked.append(request)
        fleet = self._named(request.fleet.name)
        request.update_mask.MergeMessage(request.fleet, fleet, replace_message_field=True)
        return fleet

    def _changed(self, request: Message) -> Message:
        self.asked.append(request)
        return self._named(request.fleet)

    def RollBackFleet(self, request: operator_pb2.RollBackFleetRequest, context: grpc.ServicerContext) -> Message:
        return self._changed(request)

    def DecideMove(self, request: operator_pb2.DecideMoveRequest, context: grpc.ServicerContext) -> Message:
        return self._changed(request)

    def SetPower(self, request: operator_pb2.SetPowerRequest, context: grpc.ServicerContext) -> Message:
        return self._changed(request)

    def SetDrained(self, request: operator_pb2.SetDrainedRequest, context: grpc.ServicerContext) -> Message:
        return self._changed(request)

    def RetireVersions(self, request: operator_pb2.RetireVersionsRequest, context: grpc.ServicerContext) -> Message:
        self.asked.append(request)
        return self.retired

    def ListEvents(self, request: operator_pb2.ListEventsRequest, context: grpc.ServicerContext) -> Iterator[Message]:
        self.asked.append(request)
        yield self.event

    def ListArchive(self, request: Message, context: grpc.ServicerContext) -> Message:
        return self.archive

    def ArchiveVersion(self, request: operator_pb2.ArchiveVersionRequest, context: grpc.ServicerContext) -> Message:
        return next(each for each in self.archive.versions if each.version == request.version)

    def RestoreVersion(self, request: operator_pb2.RestoreVersionRequest, context: grpc.ServicerContext) -> Message:
        return next(each for each in self.versions if each.name == request.version)

    def VerifyServer(self, request: Message, context: grpc.ServicerContext) -> Message:
        return self.verified

    def _named(self, name: str) -> resources_pb2.Fleet:
        return next(fleet for fleet in self.fleets if fleet.name == name)

    def __enter__(self) -> "FakeOperator":
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.stop(0).wait()
