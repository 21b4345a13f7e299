"""Ends a helper process with the process that started it."""

import os
import threading
import time

_LOOK_SECONDS = 0.5


def end_with(parent: int) -> None:
    """Ends this process soon after `parent`, the process id of the one that started it, however that one ends.

    PR_SET_PDEATHSIG does not do: it fires when the thread that started the helper ends. A pipe does not either: other children
    of the parent inherit its end and may outlive it.
    """
    threading.Thread(target=_watch, args=(parent,), name="resharder-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
