"""Renewal of a rank's lease for as long as its process lives."""

import threading
from collections.abc import Callable

from resharder.client.errors import DaemonUnreachable, NotFound, ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.registration import Registration, State, raise_refusal
from resharder.client.transport.shared_memory import read_nonces
from resharder.converters.failpoints import failpoint
from resharder.v1 import publisher_pb2, publisher_pb2_grpc


class PublisherLease:
    """Thread that renews a rank's lease three times per lease. It retries while the daemon does not answer.

    Args:
        channel: Channel to the daemon.
        registration: Registration whose lease is renewed.
        rank: This rank.
        again: Called if a restarted daemon has lost the publisher.
        renewed: Called after every renewal.

    Attributes:
        lost: Error that ended the lease: a newer job has taken over, or a refusal.
    """

    def __init__(
        self, channel: Channel, registration: Registration, rank: int, again: Callable[[], None], renewed: Callable[[], None]
    ) -> None:
        self.lost: ResharderError | None = None
        self._channel, self._registration, self._rank = channel, registration, rank
        self._again, self._renewed = again, renewed
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resharder-lease", daemon=True)
        self._thread.start()

    def follow(self, registration: Registration) -> None:
        """Renew the lease of a newer registration from now on."""
        self._registration = registration

    def stop(self) -> None:
        """End the thread. The lease then expires."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.05, self._registration.lease_seconds / 3)):
            failpoint("lease.renew")
            readable = read_nonces(self._registration.nonce_files)
            request = publisher_pb2.RenewLeaseRequest(publisher=self._registration.name, rank=self._rank, readable=readable)
            try:
                publisher = self._channel.call(self._stub.RenewLease, request, timeout=10, patience=0)
                raise_refusal(publisher)
                # The daemon has restarted, and another rank has registered with it.
                if publisher.state == State.REGISTERING and self._registration.complete:
                    self._register_again()
                self._renewed()
            except DaemonUnreachable:
                continue
            except NotFound:
                self._register_again()
            except ResharderError as error:
                self._lose(error)

    def _register_again(self) -> None:
        if self._stopped.is_set():
            return
        try:
            self._again()
        except DaemonUnreachable:
            return
        except ResharderError as error:
            self._lose(error)

    def _lose(self, error: ResharderError) -> None:
        if not self._stopped.is_set():
            self.lost = error
            self._stopped.set()
