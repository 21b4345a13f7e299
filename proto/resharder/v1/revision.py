"""The revision of this protocol, by which daemon and clients of different releases know whether they understand each other.

Raised when a message means something else than before, or a digest or checksum is made otherwise; not for new fields, calls and
enum values, which others skip. docs/upgrading.md says what happens between revisions.
"""

import re

REVISION = 2
OLDEST = 2  # that a daemon of this release still takes
_NAMED = re.compile(r"resharder/(?P<release>\S+) protocol/(?P<revision>\d{1,9})(?!\S)")


def user_agent(release: str) -> str:
    """What every call of a client begins its `user-agent` with."""
    return f"resharder/{release} protocol/{REVISION}"


def named(agent: str) -> tuple[str, int] | None:
    """(release, revision) of a client by its `user-agent`; None for one that is not Resharder's."""
    found = _NAMED.match(agent)
    return (found["release"], int(found["revision"])) if found else None
