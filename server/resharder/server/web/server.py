"""The daemon's HTTP side: metrics, status page and probes."""

import importlib.metadata
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from resharder.server.archive.follower import Followed
from resharder.server.fleets.fleets import Fleets
from resharder.server.infra.addresses import is_loopback, parse_listen
from resharder.server.infra.event_log import Events
from resharder.server.ingest.intake import Intake
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.observability import metrics, snapshot
from resharder.server.web.app import AccessCheck, admit_all, check_host, web_app
from resharder.server.web.listener import Listener
from resharder.server.web.status import status

RELEASE = importlib.metadata.version("resharder")
_EVENTS = 15  # on the status page


class Shown:
    """HTTP side of the daemon, which listens once constructed, unless `listen` is empty. Raises OSError, ValueError."""

    def __init__(
        self,
        listen: str,
        intake: Intake,
        fleets: Fleets,
        nodes: NodeRegistry,
        events: Events,
        check: AccessCheck | None = None,
        tls: ssl.SSLContext | None = None,
        wall: Callable[[], float] = time.time,
        following: Callable[[], Sequence[Followed]] = tuple,
    ) -> None:
        self._following = following
        self._intake, self._fleets, self._nodes, self._events = intake, fleets, nodes, events
        self._since = wall()
        self._ready = False
        registry, self.observed = metrics.make(RELEASE)
        metrics.show(registry, self._look)
        self.observed.connect(intake, fleets, events)
        self._listener: Listener | None = None
        self.listen = ""
        if listen:
            host, port = parse_listen(listen)
            check = check or (check_host if is_loopback(listen) else admit_all)
            text = partial(metrics.text, registry)
            app = web_app(status=self._status, metrics=text, unready=self._unready, check=check)
            self._listener = Listener(app, host, port, tls)
            self.listen = f"{host}:{self._listener.port}"

    def set_ready(self) -> None:
        """Let `/readyz` report that the daemon accepts publishers."""
        self._ready = True

    def close(self) -> None:
        """Stop listening, and abort open connections."""
        if self._listener is not None:
            self._listener.close()

    def _look(self) -> snapshot.Snapshot:
        return snapshot.take(self._intake, self._fleets, self._nodes, self._following())

    def _status(self) -> dict[str, Any]:
        return status(self._look(), self._events.last(_EVENTS), release=RELEASE, started=self._since, unready=self._unready())

    def _unready(self) -> str:
        """Return why the daemon accepts no publishers; empty if it does."""
        if not self._ready:
            return "the daemon is starting"
        if problem := self._intake.store.folder.problem():
            return problem
        return "the daemon is shutting down" if self._intake.draining else ""
