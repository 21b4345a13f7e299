"""A vLLM server as the daemon sees it, over the wire: one control side with one worker, which does at once what it is ordered.

with SimulatedServer(daemon, "left") as server:
    server.in_flight = 3
    server.broken = {2}     # it fails to stage these
"""

import queue
import threading
from collections.abc import Iterator
from types import TracebackType

import grpc
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

from tests.support.daemon import Daemon

Order, Worker = server_pb2.Order, resources_pb2.Worker


class SimulatedServer:
    def __init__(self, daemon: Daemon, id: str, *, fleet: str = "", broken: frozenset[int] | set[int] = frozenset()) -> None:
        self.id, self.broken = id, set(broken)
        self._stub = server_pb2_grpc.ServerServiceStub(daemon.channel)
        self._operator = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
        self._power, self._in_flight = resources_pb2.AWAKE, 0
        self._reports: queue.SimpleQueue[server_pb2.ControlReport] = queue.SimpleQueue()
        self._ended = threading.Event()
        claim = self._stub.ClaimServer(server_pb2.ClaimServerRequest(server=id, fleet=fleet, boot=True, wait_seconds=30))
        self._model, self._beat = claim.model, claim.lease_seconds / 4
        self._confirm(Worker.BOOTED, claim.boot_version)
        self._call = self._stub.Attend(self._said())
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._in_flight = count
        self._say()

    def _said(self) -> Iterator[server_pb2.ControlReport]:
        self._say(world_size=1, address="127.0.0.1:1")
        while not self._ended.is_set():
            try:
                yield self._reports.get(timeout=self._beat)
            except queue.Empty:
                self._say()

    def _attend(self) -> None:
        try:
            for order in self._call:
                self._carry_out(order)
        except grpc.RpcError:
            if not self._ended.is_set():
                raise

    def _carry_out(self, order: server_pb2.Order) -> None:
        if order.kind in (Order.RENEWED, Order.LEAD):
            return
        if order.kind == Order.STAGE and order.version in self.broken:
            self._say(install=order.install, done=order.kind, ok=False, error=f"no version {order.version} for me")
            return
        if order.kind in (Order.SLEEP, Order.WAKE):
            self._power = order.power
        self._say(install=order.install, done=order.kind, ok=True)
        if order.kind in (Order.STAGE, Order.APPLY):
            self._confirm(Worker.STAGED if order.kind == Order.STAGE else Worker.APPLIED, order.version, order.install)

    def _say(self, **fields: object) -> None:
        report = server_pb2.ControlReport(
            server=self.id, control=f"control-{self.id}", power=self._power, in_flight=self._in_flight, **fields
        )
        self._reports.put(report)

    def _confirm(self, state: int, version: int, install: str = "") -> None:
        name = f"models/{self._model}/versions/{version}"
        found = self._operator.GetVersion(operator_pb2.GetVersionRequest(version=name))
        worker = Worker(
            state=state, version=version, install=install, fingerprint=found.fingerprint, process=f"process-{self.id}"
        )
        self._stub.ReportWorker(server_pb2.ReportWorkerRequest(server=f"servers/{self.id}", worker=worker))

    def __enter__(self) -> "SimulatedServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._call.cancel()
        self._thread.join()
