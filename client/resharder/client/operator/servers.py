"""Commands on one server: diagnostics that its workers run while it serves, and its removal."""

from collections.abc import Iterator

from resharder.client.operator.answers import WorkerProfile, WorkerVerification
from resharder.client.operator.connection import server_name
from resharder.client.operator.convert import answer
from resharder.client.operator.queries import OperatorQueries
from resharder.v1 import operator_pb2

_LONGEST_WAIT = 3600.0  # seconds; the daemon's bound


class ServerCommands(OperatorQueries):
    """Commands named as in `resharder`."""

    def forget(self, server: str) -> None:
        """Forget a LOST server, as the daemon does `forget_seconds` after the loss.

        Args:
            server: Id of the server.

        Raises:
            Refused: The server is not LOST.
            NotFound: No such server.
        """
        self._call(self._stub.ForgetServer, operator_pb2.ForgetServerRequest(server=server_name(server)))

    def profile_install(self, server: str, *, timeout: float | None = 600.0) -> Iterator[WorkerProfile]:
        """Install the version that a server serves once more, under a profiler.

        Args:
            server: Id of the server.
            timeout: Bound in seconds; None is the daemon's bound, an hour.

        Returns:
            An iterator of profiles, each yielded when its worker has sent it.

        Raises:
            Refused: The server does not serve, or the install fails.
            WaitTimeout: `timeout` seconds have passed.
            NotFound: No such server.
        """
        seconds = _LONGEST_WAIT if timeout is None else timeout
        request = operator_pb2.ProfileInstallRequest(server=server_name(server), wait_seconds=seconds)
        call = self._channel.begin(self._stub.ProfileInstall, request, timeout=seconds + 30)
        for profile in self._channel.stream(call):
            yield answer(WorkerProfile, profile)

    def verify(self, server: str, *, timeout: float | None = 600.0) -> tuple[WorkerVerification, ...]:
        """Compare the memory of each worker with its version, while the server serves.

        A server with a worker that finds a difference leaves service, and its version is installed again.

        Args:
            server: Id of the server.
            timeout: Bound in seconds; None is the daemon's bound, an hour.

        Returns:
            One result per worker, by rank.

        Raises:
            Refused: A worker is missing.
            WaitTimeout: `timeout` seconds have passed.
            NotFound: No such server.
        """
        seconds = _LONGEST_WAIT if timeout is None else timeout
        request = operator_pb2.VerifyServerRequest(server=server_name(server), wait_seconds=seconds)
        found = self._channel.call(self._stub.VerifyServer, request, timeout=seconds + 30)
        return tuple(answer(WorkerVerification, one) for one in found.verifications)
