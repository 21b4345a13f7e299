"""The claim of a server, which registers it with the daemon, and its renewal by a helper process while the server boots.

The helper: `python -m resharder.client.inference.worker.claim PARENT`.

Loading weights, compiling and capturing graphs may keep Python's lock for longer than a lease, so a thread
of the worker could not renew it. The helper writes one line when it has started, and begins to renew when
it reads one. It ends with its parent, the worker, or when a control side has attached: from then on that
side's reports renew the lease.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import time
import weakref

from resharder.client.errors import ResharderError
from resharder.client.inference.settings import PluginSettings
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.parent_watch import end_with
from resharder.converters.failpoints import failpoint
from resharder.v1 import server_pb2, server_pb2_grpc

_START_SECONDS = 60.0  # of the helper
_RETRY_SECONDS = 1.0  # after a failed renewal
_ANSWER_SECONDS = 5.0  # timeout of one renewal


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
    """Claim the server, which registers it with the daemon.

    Args:
        channel: Channel to the daemon.
        settings: Server, model and fleet.
        boot: Fix the version that all ranks boot.
        renews: The caller claims again, at least three times per lease, until a control side attaches. A
            claim without `renews` lasts 30 minutes.
        wait_seconds: Time for which the daemon waits for a READY version.
        patience: Time for which to retry while the daemon is away, in seconds.
        answer_seconds: Timeout of the answer, beyond `wait_seconds`.

    Returns:
        The claim: the model, the version to boot, access to the store, and the lease.

    Raises:
        ResharderError: The daemon is away or refuses the claim.
    """
    stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
    request = server_pb2.ClaimServerRequest(
        server=settings.server,
        model=settings.model,
        fleet=settings.fleet,
        base_server=settings.base_server,
        wait_seconds=wait_seconds,
        boot=boot,
        renews=renews,
    )
    answer: server_pb2.Claim = channel.call(stub.ClaimServer, request, timeout=wait_seconds + answer_seconds, patience=patience)
    return answer


class RenewalFailed(ResharderError):
    """The helper process did not start."""

    reason = "RENEWAL_FAILED"


class Renewal:
    """The helper process. It ends with this object and with this process.

    Create it before the claim, so that the first renewal follows the claim at once.

    Raises:
        RenewalFailed: The helper does not start within 60 s.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "resharder.client.inference.worker.claim", str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.close = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:  # `select.select` refuses descriptors above 1,023
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            there = waiting.select(_START_SECONDS)
        if not there or not self._process.stdout.readline():
            self.close()
            raise RenewalFailed(f"the helper that renews the server's claim did not start within {_START_SECONDS:g} s")

    def begin(self) -> None:
        """Begin to renew. Call it after the claim."""
        assert self._process.stdin is not None
        # If the helper has ended, the lease ends too, and the workers' reports register the server again.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def renew(channel: Channel, settings: PluginSettings) -> None:
    """Renew the claim until a control side has attached."""
    while True:
        pause = _RETRY_SECONDS
        try:
            failpoint("worker.boot.renew")
            answer = claim(channel, settings, boot=False, renews=True, patience=0, answer_seconds=_ANSWER_SECONDS)
            if answer.attached:
                return
            pause = answer.lease_seconds / 4
        except ResharderError:
            pass  # retried below
        time.sleep(pause)


def main() -> int:
    """Run the helper process."""
    end_with(int(sys.argv[1]))
    settings = PluginSettings.from_environment()
    print("up", flush=True)
    if sys.stdin.readline():
        with Channel(settings.endpoint) as channel:
            renew(channel, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
