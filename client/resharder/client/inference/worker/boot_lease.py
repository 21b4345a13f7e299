"""A booting worker's hold on the helper process that renews its server's claim (renew.py)."""

import contextlib
import os
import select
import subprocess
import sys
import weakref

from resharder.client.errors import ResharderError

_START_SECONDS = 60.0


class RenewalFailed(ResharderError):
    reason = "RENEWAL_FAILED"


class Renewal:
    """Started before the claim, so that the first renewal follows the claim at once. The helper ends with this object and with
    this process. Raises RenewalFailed where it cannot be started."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "resharder.client.inference.worker.renew_claim", str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.close = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        there, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        if not there or not self._process.stdout.readline():
            self.close()
            raise RenewalFailed(f"the process that renews the server's claim did not start within {_START_SECONDS:g} s")

    def begin(self) -> None:
        """To be called when the claim has been made."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the lease ends too, and the server is taken up by its reports
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
