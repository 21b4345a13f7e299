"""The check whether a client speaks a revision of the protocol that this daemon speaks."""

from collections.abc import Iterable

from resharder.server.state.errors import FailedPrecondition
from resharder.v1.revision import OLDEST, REVISION, named


def refusal(metadata: tuple[tuple[str, str | bytes], ...]) -> str:
    """Why calls with this metadata are refused; empty for those that may pass, and for clients that are not Resharder's."""
    agent = next((value for key, value in metadata if key == "user-agent"), "")
    client = named(agent if isinstance(agent, str) else "")
    if client is None or OLDEST <= client[1] <= REVISION:
        return ""
    release, revision = client
    takes = f"{OLDEST} to {REVISION}" if OLDEST < REVISION else str(REVISION)
    mend = "upgrade the daemon first" if revision > REVISION else "upgrade the client"
    return f"expected revision {takes} of the protocol, the client's is {revision} (release {release}): {mend}"


def check_revision(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raises FailedPrecondition (PROTOCOL) for a client of a revision that this daemon does not speak."""
    if why := refusal(tuple(metadata)):
        raise FailedPrecondition("PROTOCOL", why)
