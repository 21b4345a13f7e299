"""An intruder, for runs with security: calls that no role permits, at all times of a storm, each of which has to be refused."""

from collections.abc import Callable
from typing import Any

from resharder.client.errors import ResharderError
from resharder.client.operator import Operator

from tests.chaos.history import History
from tests.chaos.operations import FLEET
from tests.chaos.parties import NOBODY, STRANGER
from tests.chaos.periodic import Periodic
from tests.chaos.scraper import got
from tests.chaos.system import System

_PERIOD = 4.0
_SECONDS = 3.0

CALLS: dict[str, tuple[str, Callable[[Operator], Any]]] = {
    "look": (NOBODY, lambda operator: operator.versions(FLEET)),
    "look as a stranger": (STRANGER, lambda operator: operator.versions(FLEET)),
    "command": ("scraper", lambda operator: operator.set_fleet(FLEET, max_skew=2)),
    "drain a node": ("left", lambda operator: operator.drain_node("node")),
    "collect": ("node", lambda operator: operator.gc(keep=1, model=FLEET)),
    "roll back": ("trainer", lambda operator: operator.rollback(FLEET, reason="an intruder")),
}
"""Forbidden calls by name, each with the party that tries it."""
PAGES = {"page": NOBODY, "page as a stranger": STRANGER, "page as a server": "left"}


class Intruder(Periodic):
    """Thread that tries every call and page, and records each outcome: `ok`, a reason, or the status of a page."""

    def __init__(self, system: System, history: History) -> None:
        super().__init__(_PERIOD)
        self._system, self._history = system, history

    def open(self) -> None:
        """Start to try, if the run has security."""
        if self._system.parties.security:
            super().open()

    def act(self) -> None:
        """Try all."""
        for what, (party, call) in CALLS.items():
            self._record(what, party, self._call(party, call))
        for what, party in PAGES.items():
            status, _ = got(self._system.web, "/api/status", self._system.parties.tls(party), _SECONDS)
            self._record(what, party, str(status) if status != 200 else "ok")

    def _call(self, party: str, call: Callable[[Operator], Any]) -> str:
        tls = self._system.parties.tls(party)
        try:
            with Operator(self._system.daemon.endpoint, tls=tls, connect_timeout=_SECONDS, timeout=_SECONDS) as operator:
                call(operator)
        except ResharderError as error:
            return error.reason
        except OSError:  # its certificate is renewed, and does not fit its key yet
            return "UNREACHABLE"
        return "ok"

    def _record(self, what: str, party: str, outcome: str) -> None:
        self._history.record("intrusion", what=what, party=party, outcome=outcome)
