"""`resharder`, the operator's command, on top of the operator SDK.

One module for each noun: watch (the daemon's state), nodes, fleets, versions, check. Exit codes are in `app`.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC's core logs between lines of output; grpc reads it on import

# isort: off
from resharder.client.cli import watch, nodes, fleets, versions, check  # the help lists commands in this order

# isort: on
from resharder.client.cli.app import app
from resharder.client.cli.terminal import print_stderr
from resharder.client.errors import DaemonUnreachable, ResharderError, UsageError, WaitTimeout
from resharder.converters.printable import OutputClosed, printable_output

__all__ = ["app", "check", "fleets", "main", "nodes", "versions", "watch"]

_CODES: dict[type[ResharderError], int] = {UsageError: 2, DaemonUnreachable: 3, WaitTimeout: 6}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with an exit code of `app`."""
    sys.unraisablehook = _interrupt_again
    with printable_output("resharder"):
        try:
            app(arguments, prog_name="resharder")
        except ResharderError as error:
            _end(error, _CODES.get(type(error), 4))
        except KeyboardInterrupt:
            sys.exit(130)
        except UnicodeEncodeError as error:
            _end(UsageError(f"expected text in UTF-8, got {error.object!r}"), 2)
        except OutputClosed:
            raise
        except OSError as error:
            _end(error, 2)


def _end(error: Exception, code: int) -> None:
    print_stderr(f"resharder: {error}")
    sys.exit(code)


def _interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat an interrupt that Python discarded.

    A signal's handler runs between any two instructions of the main thread. Where these belong to a `__del__`, for example
    of a gRPC call, Python discards the KeyboardInterrupt.
    """
    if ignored.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)
