"""Named points where tests let the daemon die: RESHARDERD_FAILPOINT=commit.before-rename@2, the second time it gets there."""

import itertools
import os

_NAME, _, _TIME = os.environ.get("RESHARDERD_FAILPOINT", "").partition("@")
_passed = itertools.count(1)


def failpoint(name: str) -> None:
    """Ends the process as SIGKILL would, with status 77, where this is the point asked for."""
    if name == _NAME and next(_passed) == int(_TIME or 1):
        os._exit(77)
