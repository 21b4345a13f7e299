"""The status page's port of a daemon that waits for its lease: probes alone, of which `/readyz` says why it waits.

A standby does not listen for calls. Clients with several addresses so connect to the daemon that does.
"""

import ssl

import structlog
from resharder.server.infra.addresses import parse_listen
from resharder.server.web.app import probes_app
from resharder.server.web.listener import Listener

_log = structlog.get_logger("resharder.standby")


class StandbyPage:
    """The page of a standby, which listens once constructed, unless `listen` is empty. Raises OSError, ValueError."""

    def __init__(self, listen: str, tls: ssl.SSLContext | None) -> None:
        self._reason = "standby"
        self._listener: Listener | None = None
        if listen:
            self._listener = Listener(probes_app(lambda: self._reason), *parse_listen(listen), tls)

    def report(self, reason: str) -> None:
        """Show and log why this process waits."""
        self._reason = f"standby: {reason}" if reason else "standby"
        _log.info("standby", reason=reason)

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
