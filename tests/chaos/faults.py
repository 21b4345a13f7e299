"""Faults of a storm: signals to processes, failpoints of the next daemon, and faults of the proxy's links."""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from resharder.client.errors import ResharderError
from resharder.client.operator.answers import Version

from tests.chaos.history import History
from tests.chaos.operations import FLEET
from tests.chaos.system import KeptDaemon, System, wait_for
from tests.support.bucket import Fault

_ALONE = 8.0
"""Seconds in which a version is likely to be published."""


class Faults:
    """Injects faults. What lasts ends by itself after its seconds, or when the system is healed."""

    def __init__(self, system: System, history: History) -> None:
        self._system, self._history = system, history

    def inject(self, name: str, given: dict[str, Any]) -> None:
        """Inject one fault; the history has it before it acts."""
        act: Callable[..., None] = getattr(self, "_" + name.replace(".", "_"))
        place = name.partition(".")[0]
        target = next((given[name] for name in ("server", "node", "link", "party") if given.get(name)), place)
        self._history.record("fault", name=name, target=target, given=given)
        act(**given)

    def _daemon_kill(self, down: float, failpoint: str) -> None:
        self._kill(self._system.kept_daemon, down, failpoint)

    def _daemon_stop(self, seconds: float) -> None:
        self._stop_daemon(self._system.kept_daemon, seconds)

    def _region_kill(self, down: float, failpoint: str) -> None:
        self._kill(self._system.kept_region, down, failpoint)

    def _region_stop(self, seconds: float) -> None:
        self._stop_daemon(self._system.kept_region, seconds)

    def _bucket_fail(self, kind: Fault, seconds: float) -> None:
        if (region := self._system.region) is not None:
            region.fail(kind)
            self._later(seconds, region.heal)

    def _kill(self, kept: KeptDaemon | None, down: float, failpoint: str) -> None:
        if kept is None:
            return
        self._system.keepers[kept.name].down_until = self._history.now + down
        kept.failpoint = failpoint
        if kept.daemon.process is not None:
            with suppress(ProcessLookupError):
                kept.daemon.process.kill()

    def _stop_daemon(self, kept: KeptDaemon | None, seconds: float) -> None:
        if kept is not None and kept.daemon.process is not None:
            self._stop([psutil.Process(kept.daemon.process.pid)], seconds)

    def _node_kill(self, node: str, down: float, failpoint: str, small: bool, alone: bool) -> None:
        """Kill a node; with `alone`, once the daemon lacks pieces of a READY version, or after some seconds."""
        kept, heals = self._system.nodes[node], self._system.heals
        if alone:
            wait_for(lambda: self._system.heals != heals or self._lacks_pieces(), _ALONE, 0.05)
        if self._system.heals != heals:
            return  # the storm is over
        self._system.keepers[node].down_until = self._history.now + down
        kept.failpoint, kept.small = failpoint, small
        self._history.record("killing", process=node)  # perhaps long after the fault
        self._system.signal(kept.processes(), signal.SIGKILL)

    def _node_gone(self, nodes: list[str], down: float) -> None:
        """Kill nodes while ranks write a version there, or after some seconds; they stay down.

        Nothing can be read from them meanwhile. The history has the versions.
        """
        heals, alone = self._system.heals, list[int]()
        for node in nodes:
            self._system.proxies.silence(f"{node}-data")
        wait_for(lambda: self._system.heals != heals or alone.extend(self._alone_on(nodes)) or alone, _ALONE, 0.05)
        if self._system.heals != heals:
            return  # the storm is over
        for node in nodes:
            self._system.keepers[node].down_until = self._history.now + down
            self._history.record("killing", process=node)
            self._system.signal(self._system.nodes[node].processes(), signal.SIGKILL)
        self._history.record("alone", nodes=nodes, versions=alone)
        for node in nodes:
            self._system.proxies.silence(f"{node}-data", False)

    def _node_stop(self, node: str, seconds: float) -> None:
        self._stop(self._system.nodes[node].processes(), seconds)

    def _trainer_kill(self, part: str, new_job: bool) -> None:
        trainer = self._system.trainer
        trainer.new_job = trainer.moves = new_job
        ranks = trainer.ranks()
        if part == "rank" and ranks:
            self._system.signal(ranks[:1], signal.SIGKILL)
        elif trainer.job is not None and trainer.ended() is None:
            trainer.job.kill()

    def _trainer_stop(self, rank: int, seconds: float) -> None:
        self._stop(self._system.trainer.ranks()[rank : rank + 1], seconds)

    def _server_kill(self, server: str, part: str, pick: float) -> None:
        self._system.signal(self._chosen(server, part, pick), signal.SIGKILL)

    def _server_stop(self, server: str, part: str, pick: float, seconds: float) -> None:
        self._stop(self._chosen(server, part, pick), seconds)

    def _link_cut(self, link: str) -> None:
        self._system.proxies.cut(link)

    def _link_slow(self, link: str, delay: float, seconds: float) -> None:
        self._system.proxies.slow(link, delay)
        self._later(seconds, lambda: self._system.proxies.slow(link, 0.0))

    def _link_silent(self, link: str, seconds: float) -> None:
        self._system.proxies.silence(link)
        self._later(seconds, lambda: self._system.proxies.silence(link, False))

    def _certificates_renew(self, party: str) -> None:
        self._system.parties.renew(party)

    def _lacks_pieces(self) -> bool:
        with suppress(ResharderError):
            return any(v.state == Version.State.READY and not v.folder for v in self._system.observer.versions(FLEET))
        return False

    def _alone_on(self, nodes: list[str]) -> list[int]:
        """Return the versions that ranks write on some nodes."""
        with suppress(ResharderError):
            found = self._system.observer.versions(FLEET)
            uploading = [v for v in found if v.state == Version.State.UPLOADING]
            return [v.number for v in uploading if {home.node.removeprefix("nodes/") for home in v.homes} & {*nodes}]
        return []

    def _chosen(self, server: str, part: str, pick: float) -> list[psutil.Process]:
        """Return one process of a part, or all for `all`."""
        kept = self._system.servers.get(server)
        found = kept.part(part) if kept and self._system.keepers[server].running.is_set() else []
        return found if part == "all" or not found else [found[int(pick * len(found))]]

    def _stop(self, processes: list[psutil.Process], seconds: float) -> None:
        self._system.signal(processes, signal.SIGSTOP)
        self._later(seconds, lambda: self._system.signal(processes, signal.SIGCONT))

    def _later(self, seconds: float, act: Callable[[], Any]) -> None:
        """Undo a fault after some seconds; `System.heal` does so at once."""

        def undo() -> None:
            with suppress(ValueError):
                self._system.undo.remove(undo)
            act()

        self._system.undo.append(undo)
        timer = threading.Timer(seconds, undo)
        timer.daemon = True
        timer.start()
