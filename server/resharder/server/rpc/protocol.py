"""Check of a client's protocol revision."""

from collections.abc import Iterable

from resharder.server.state.errors import FailedPrecondition
from resharder.v1.revision import OLDEST, REVISION, named


def refusal(metadata: tuple[tuple[str, str | bytes], ...]) -> str:
    """Return why calls with this metadata are refused; empty for supported revisions and for other clients."""
    agent = next((value for key, value in metadata if key == "user-agent"), "")
    client = named(agent if isinstance(agent, str) else "")
    if client is None or OLDEST <= client[1] <= REVISION:
        return ""
    release, revision = client
    takes = f"{OLDEST} to {REVISION}" if OLDEST < REVISION else str(REVISION)
    mend = "upgrade the daemon first" if revision > REVISION else "upgrade the client"
    return f"expected revision {takes} of the protocol, the client's is {revision} (release {release}): {mend}"


def check_revision(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raise FailedPrecondition (PROTOCOL) for a client of an unsupported revision."""
    if why := refusal(tuple(metadata)):
        raise FailedPrecondition("PROTOCOL", why)
