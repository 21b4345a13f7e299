"""A scraper that reads the daemon's status page, its probes and its metrics, as Prometheus and load balancers do."""

import http.client
from contextlib import closing

from resharder.client.rpc.tls import Tls

from tests.chaos.history import History
from tests.chaos.periodic import Periodic
from tests.chaos.system import System

PAGES = ("/", "/api/status", "/metrics", "/healthz", "/readyz")
_PERIOD = 3.0


class Scraper(Periodic):
    """Thread that reads all pages, and records every answer but 200; status 0 is a connection that failed."""

    def __init__(self, system: System, history: History) -> None:
        super().__init__(_PERIOD)
        self._system, self._history = system, history

    def act(self) -> None:
        """Read all."""
        for path in PAGES:
            status, text = got(self._system.web, path, self._system.parties.tls("scraper"))
            if status != 200:
                self._history.record("page", path=path, status=status, text=text[:300])


def got(address: str, path: str, tls: Tls | None, timeout: float = 10) -> tuple[int, str]:
    """Return status and body of a page; 0 and the error if no answer came."""
    try:
        with closing(_connection(address, tls, timeout)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


def _connection(address: str, tls: Tls | None, timeout: float) -> http.client.HTTPConnection:
    """Return a connection that is not open yet. Raises OSError while a certificate is renewed and does not fit its key."""
    if tls is None:
        return http.client.HTTPConnection(address, timeout=timeout)
    return http.client.HTTPSConnection(address, timeout=timeout, context=tls.context())
