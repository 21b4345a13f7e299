"""A vLLM server as the daemon sees it, over the wire: one control side with one worker, which at once does what it is ordered,
and comes back with what it holds when the daemon was away.

with SimulatedServer(daemon, "left") as server:
    server.in_flight = 3
    server.broken = {2}     # it fails to stage these
    server.torn = {3}       # and to apply these
    server.dies_at = {Order.SLEEP}  # its engine dies of these orders
    server.measured = {"stage_seconds": 0.5}    # what its worker says of each version, next to what it did
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

import grpc
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

from tests.support.daemon import Daemon

Order, Worker = server_pb2.Order, resources_pb2.Worker
Reports = queue.SimpleQueue[server_pb2.ControlReport]


class SimulatedServer:
    def __init__(self, daemon: Daemon, id: str, *, fleet: str = "", model: str = "") -> None:
        self.id, self.broken, self.torn = id, set[int](), set[int]()
        self.error = ""
        self.dies_at, self._dead = set[int](), False
        self.measured: dict[str, object] = {}
        self.pause_seconds = 0.0
        self._fleet, self._model = fleet, model
        self._stub = server_pb2_grpc.ServerServiceStub(daemon.channel)
        self._operator = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
        self._power, self._in_flight = resources_pb2.AWAKE, 0
        self._ended = threading.Event()
        claim = self._claim(boot=True)
        self._model, self._beat = claim.model, claim.lease_seconds / 4
        self._held = self._worker(Worker.BOOTED, claim.boot_version)
        self._attach()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._in_flight = count
        self._report_control()

    def _claim(self, boot: bool) -> server_pb2.Claim:
        request = server_pb2.ClaimServerRequest(server=self.id, model=self._model, fleet=self._fleet, boot=boot, wait_seconds=60)
        return self._stub.ClaimServer(request, wait_for_ready=True)

    def _attach(self) -> None:
        self._report(self._held)
        self._reports = Reports()
        self._report_control(world_size=1, address="127.0.0.1:1")
        self._call = self._stub.Attend(self._control_reports(self._reports))

    def _control_reports(self, reports: Reports) -> Iterator[server_pb2.ControlReport]:
        while not self._ended.is_set() and reports is self._reports:
            try:
                yield reports.get(timeout=self._beat)
            except queue.Empty:
                self._report_control()

    def _live(self) -> None:
        while not self._ended.is_set() and not self._dead:
            with suppress(grpc.RpcError):
                for order in self._call:
                    self._carry_out(order)
            with suppress(grpc.RpcError):
                if not self._dead and not self._ended.wait(0.1):
                    self._claim(boot=False)
                    self._attach()

    def _carry_out(self, order: server_pb2.Order) -> None:
        if order.kind in (Order.RENEWED, Order.LEAD):
            return
        if order.kind in self.dies_at:
            self._dead = True
            self._report_control(failure="its engine died")
            return
        if order.kind == Order.STAGE and order.version in self.broken:
            self._report_control(
                install=order.install,
                done=order.kind,
                ok=False,
                error=self.error or f"RESHARDER_STAGING_DIR has no space left for version {order.version}",
            )
            return
        if order.kind == Order.APPLY and order.version in self.torn:
            self._report_control(
                install=order.install, done=order.kind, ok=False, error=f"version {order.version} went in half-way"
            )
            return
        if order.kind in (Order.SLEEP, Order.WAKE):
            self._power = order.power
        pause = self.pause_seconds if order.kind in (Order.APPLY, Order.RESUME) else 0.0
        self._report_control(install=order.install, done=order.kind, ok=True, pause_seconds=pause)
        if order.kind == Order.STAGE:
            self._report(self._worker(Worker.STAGED, order.version, order.install))
        if order.kind == Order.APPLY:
            self._held = self._worker(Worker.APPLIED, order.version, order.install)
            self._report(self._held)

    def _report_control(self, **fields: object) -> None:
        known = {"server": self.id, "control": f"control-{self.id}", "power": self._power, "in_flight": self._in_flight}
        self._reports.put(server_pb2.ControlReport(**known, **fields))

    def _worker(self, state: int, version: int, install: str = "") -> resources_pb2.Worker:
        name = f"models/{self._model}/versions/{version}"
        found = self._operator.GetVersion(operator_pb2.GetVersionRequest(version=name)).fingerprint
        return Worker(
            state=state, version=version, install=install, fingerprint=found, process=f"process-{self.id}", **self.measured
        )

    def _report(self, worker: resources_pb2.Worker) -> None:
        self._stub.ReportWorker(server_pb2.ReportWorkerRequest(server=f"servers/{self.id}", worker=worker))

    def __enter__(self) -> "SimulatedServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._call.cancel()
        self._thread.join()
