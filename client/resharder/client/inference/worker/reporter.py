"""A worker's own word to the daemon, over a channel made after vLLM's forks."""

import contextlib
import threading
import uuid
from collections.abc import Callable

from resharder.client.errors import NotFound, ResharderError
from resharder.client.inference.settings import PluginSettings
from resharder.client.rpc.channel import Channel
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

PROCESS = uuid.uuid4().hex
_REPORT_SECONDS = 2.0  # a daemon that came back hears of this worker after at most so long


def claim(
    channel: Channel,
    settings: PluginSettings,
    *,
    boot: bool,
    renews: bool = False,
    wait_seconds: float = 0.0,
    patience: float,
    answer_seconds: float = 30.0,
) -> server_pb2.Claim:
    """`renews`: the claim is made again until a control side attaches. Raises ResharderError."""
    stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
    request = server_pb2.ClaimServerRequest(
        server=settings.server, model=settings.model, fleet=settings.fleet, wait_seconds=wait_seconds, boot=boot, renews=renews
    )
    answer: server_pb2.Claim = channel.call(stub.ClaimServer, request, timeout=wait_seconds + answer_seconds, patience=patience)
    return answer


class Reporter:
    """Tells the daemon the worker's state, again and again, so that a daemon that was restarted learns it too."""

    def __init__(self, channel: Channel, settings: PluginSettings) -> None:
        self._channel, self._settings = channel, settings
        self._holding = self._latest = resources_pb2.Worker()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._verification: resources_pb2.Verification | None = None
        self.asked: Callable[[str], None] = lambda request: None  # gets the daemon's last request to verify, again and again

    @property
    def started(self) -> bool:
        return self._thread is not None

    def verified(self, found: resources_pb2.Verification) -> None:
        """Part of every report from here on."""
        with self._lock:
            self._verification = found
        self._wake.set()

    def report(
        self, worker: resources_pb2.Worker, *, holds: bool, verification: resources_pb2.Verification | None = None
    ) -> None:
        """`holds`: the report says what lies in the worker's memory, and stays true whatever is staged."""
        with self._lock:
            self._latest = worker
            if holds:
                self._holding = worker
            self._verification = verification or self._verification
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="resharder-report", daemon=True)
                self._thread.start()
        self._wake.set()

    def correct(self, install: str, fingerprint: str, error: str) -> None:
        """What was found out about what `install` brought, if that is what it holds still. Said at once, since
        something else may be staged and be what is said again and again."""
        with self._lock:
            if self._holding.install != install:
                return
            last = self._latest is self._holding
            worker = resources_pb2.Worker()
            worker.CopyFrom(self._holding)
            worker.fingerprint, worker.error = fingerprint, error
            self._holding = worker
            if last:
                self._latest = worker
        request = server_pb2.ReportWorkerRequest(server=self._settings.server, worker=worker)
        with contextlib.suppress(ResharderError):
            self._channel.call(server_pb2_grpc.ServerServiceStub(self._channel.grpc).ReportWorker, request, timeout=10)

    def report_installed(self) -> None:
        """And no more of what it had staged."""
        with self._lock:
            self._latest = self._holding
        self._wake.set()

    def _run(self) -> None:
        stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
        while True:
            with self._lock:
                worker = resources_pb2.Worker()
                worker.CopyFrom(self._latest)
                if self._verification is not None:
                    worker.verification.CopyFrom(self._verification)
            request = server_pb2.ReportWorkerRequest(server=self._settings.server, worker=worker)
            try:
                answer = self._channel.call(stub.ReportWorker, request, timeout=10, patience=0)
                self.asked(answer.verify_request)
            except NotFound:
                self._introduce()
            except ResharderError:
                pass  # said again below
            self._wake.wait(_REPORT_SECONDS)
            self._wake.clear()

    def _introduce(self) -> None:
        """To a daemon that does not know the server: it knows of no install either."""
        try:
            claim(self._channel, self._settings, boot=False, renews=True, patience=0)
        except ResharderError:
            return
        self.report_installed()
