"""Renewal of a rank's lease while its process lives."""

import threading
from collections.abc import Callable

from resharder.client.errors import DaemonUnreachable, NotFound, ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.registration import Registration, State, raise_refusal
from resharder.converters.failpoints import failpoint
from resharder.v1 import publisher_pb2, publisher_pb2_grpc


class PublisherLease:
    """Thread that renews three times per lease. `lost` is the error that ended it: a newer job, or a refusal.

    Retries while the daemon does not answer. Calls `again` if a restarted daemon has lost the publisher, and `renewed` after
    every renewal.
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
        self._registration = registration

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.05, self._registration.lease_seconds / 3)):
            failpoint("lease.renew")
            request = publisher_pb2.RenewLeaseRequest(publisher=self._registration.name, rank=self._rank)
            try:
                publisher = self._channel.call(self._stub.RenewLease, request, timeout=10, patience=0)
                raise_refusal(publisher)
                # Another rank has registered with a restarted daemon.
                if publisher.state == State.REGISTERING and self._registration.complete:
                    self._register_again()
                self._renewed()
            except DaemonUnreachable:
                continue
            except NotFound:
                self._register_again()
            except ResharderError as error:
                self._lose(error)
            except ValueError:  # grpcio: the channel was closed
                return

    def _register_again(self) -> None:
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
