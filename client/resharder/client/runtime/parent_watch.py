"""End of a helper process with the process that started it."""

import os
import threading
import time

_LOOK_SECONDS = 0.5


def end_with(parent: int) -> None:
    """End this process soon after `parent`, the id of the process that started it, however that process ends.

    PR_SET_PDEATHSIG is not suitable: it fires when the thread that started the helper ends. Nor is a pipe: other children of the
    parent inherit its end and may outlive the parent.
    """
    threading.Thread(target=_watch, args=(parent,), name="resharder-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
