"""Reports of a worker to the daemon, over a channel that is opened after vLLM's forks."""

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable

from resharder.client.errors import NotFound, ResharderError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.claim import claim
from resharder.client.rpc.channel import Channel
from resharder.converters.failpoints import failpoint
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

logger = logging.getLogger("resharder.inference.worker")
PROCESS = uuid.uuid4().hex
_REPORT_SECONDS = 2.0  # interval of reports; bounds the time until a restarted daemon has a report


class Reporter:
    """Reports the worker's state periodically, so that a restarted daemon receives it too.

    Args:
        channel: Channel to the daemon.
        settings: The server's settings.
        verify_requested: Called after each report with the id of the daemon's last request to verify.
    """

    def __init__(self, channel: Channel, settings: PluginSettings, verify_requested: Callable[[str], None]) -> None:
        self._verify_requested = verify_requested
        self._channel, self._settings = channel, settings
        self._installed = self._latest = resources_pb2.Worker()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._verification: resources_pb2.Verification | None = None
        self._released: int | None = None

    @property
    def started(self) -> bool:
        """Whether a report was submitted."""
        return self._thread is not None

    def verified(self, found: resources_pb2.Verification) -> None:
        """Include a verification in all further reports."""
        with self._lock:
            self._verification = found
        self._wake.set()

    def slept(self, released: int | None) -> None:
        """Include the bytes that a sleep released in all further reports; None after waking."""
        with self._lock:
            self._released = released
        self._wake.set()

    def report(
        self, worker: resources_pb2.Worker, *, installed: bool, verification: resources_pb2.Verification | None = None
    ) -> None:
        """Send a report now and periodically.

        Args:
            worker: The report.
            installed: Whether it describes the installed version. `report_installed` returns to it later.
            verification: A verification to include.
        """
        with self._lock:
            self._latest = worker
            if installed:
                self._installed = worker
            self._verification = verification or self._verification
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="resharder-report", daemon=True)
                self._thread.start()
        self._wake.set()

    def correct(self, install: str, fingerprint: str, error: str) -> None:
        """Correct the report of `install`, unless another version was installed since.

        The corrected report is sent at once, because the periodic one may be about a version that is staged.
        """
        with self._lock:
            if self._installed.install != install:
                return
            latest = self._latest is self._installed
            worker = resources_pb2.Worker()
            worker.CopyFrom(self._installed)
            worker.fingerprint, worker.error = fingerprint, error
            self._installed = worker
            if latest:
                self._latest = worker
        request = server_pb2.ReportWorkerRequest(server=self._settings.server, worker=worker)
        with contextlib.suppress(ResharderError):
            self._channel.call(server_pb2_grpc.ServerServiceStub(self._channel.grpc).ReportWorker, request, timeout=10)

    def report_installed(self) -> None:
        """Report the installed version again, in place of a staged one."""
        with self._lock:
            self._latest = self._installed
        self._wake.set()

    def _run(self) -> None:
        stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
        while True:
            with self._lock:
                worker = resources_pb2.Worker()
                worker.CopyFrom(self._latest)
                if self._verification is not None:
                    worker.verification.CopyFrom(self._verification)
                if self._released is not None:
                    worker.released_bytes = self._released
            request = server_pb2.ReportWorkerRequest(server=self._settings.server, worker=worker)
            try:
                failpoint("worker.report")
                answer = self._channel.call(stub.ReportWorker, request, timeout=10, patience=0)
                self._verify_requested(answer.verify_request)
            except NotFound:
                self._register()
            except ResharderError:
                pass  # reported again below
            except Exception:
                logger.exception("cannot report the worker's state, trying again")
            self._wake.wait(_REPORT_SECONDS)
            self._wake.clear()

    def _register(self) -> None:
        """Claim the server with a daemon that has no record of it. Such a daemon has no record of an install either."""
        try:
            claim(self._channel, self._settings, boot=False, renews=True, patience=0)
        except ResharderError:
            return
        self.report_installed()
