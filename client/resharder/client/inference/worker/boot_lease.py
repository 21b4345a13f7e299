"""Handle of a booting worker on the helper process that renews its server's claim (`renew_claim.py`)."""

import contextlib
import os
import selectors
import subprocess
import sys
import weakref

from resharder.client.errors import ResharderError

_START_SECONDS = 60.0


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
        command = [sys.executable, "-m", "resharder.client.inference.worker.renew_claim", str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.close = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:  # `select.select` refuses descriptors above 1,023
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            there = waiting.select(_START_SECONDS)
        if not there or not self._process.stdout.readline():
            self.close()
            raise RenewalFailed(f"expected the helper that renews the server's claim to start within {_START_SECONDS:g} s")

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
