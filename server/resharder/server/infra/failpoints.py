"""Named points at which tests end the daemon.

`RESHARDERD_FAILPOINT=commit.before-rename@2` ends it when that point is reached for the second time."""

import itertools
import os

_NAME, _, _TIME = os.environ.get("RESHARDERD_FAILPOINT", "").partition("@")
_passed = itertools.count(1)


def failpoint(name: str) -> None:
    """End the process as SIGKILL would, with status 77, if this is the configured point."""
    if name == _NAME and next(_passed) == int(_TIME or 1):
        os._exit(77)
