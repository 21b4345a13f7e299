"""Revision of this protocol, by which a daemon and clients of other releases recognise whether they are compatible.

Raised when the meaning of a message changes, or the computation of a digest or checksum; not for new fields, calls and enum
values, which older releases ignore. docs/upgrading.md describes which revisions work together.
"""

import re

REVISION = 2
OLDEST = 2  # oldest revision that a daemon of this release accepts
_NAMED = re.compile(r"resharder/(?P<release>\S+) protocol/(?P<revision>\d{1,9})(?!\S)")


def user_agent(release: str) -> str:
    """Return the beginning of the `user-agent` of a client's calls."""
    return f"resharder/{release} protocol/{REVISION}"


def named(agent: str) -> tuple[str, int] | None:
    """Return (release, revision) of a client from its `user-agent`; None for a client that is not Resharder's."""
    found = _NAMED.match(agent)
    return (found["release"], int(found["revision"])) if found else None
