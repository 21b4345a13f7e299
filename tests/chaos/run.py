"""A run of real processes: the system, its operator, an observer, clients, and their history."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from resharder.client.operator.answers import Node

from tests.chaos.history import History
from tests.chaos.kept_server import BOOT
from tests.chaos.model import check
from tests.chaos.observer import Observer
from tests.chaos.operations import Operations
from tests.chaos.peace import left_at_the_end
from tests.chaos.region import RegionObserver
from tests.chaos.schedule import Setting
from tests.chaos.system import MARK, System, processes_of, wait_for
from tests.chaos.traffic import Traffic
from tests.chaos.violations import Violation
from tests.failpoints.cycle import DOCUMENTED

EXPECTED = DOCUMENTED | {"USAGE", "UNREACHABLE", "TIMEOUT", "ABORTED"}
"""Reasons that a refusal may have."""


@dataclass
class Run:
    """Processes of one run in a folder of its own, and what asks and observes them.

    Args:
        folder: For the history, logs and configurations.
        servers: Names of the servers that take part.
        setting: What the run has besides.
    """

    folder: Path
    servers: tuple[str, ...]
    setting: Setting
    history: History = field(init=False)
    system: System = field(init=False)
    operations: Operations = field(init=False)
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        os.environ[MARK] = str(self.folder)
        self.history = History(self.folder / "history.jsonl")
        self.history.record("run", servers=self.servers, **asdict(self.setting))
        self.system = System(self.folder, self.history, self.servers, self.setting)
        self.operations = Operations(self.system, self.history)
        self._observer, self.traffic = Observer(self.system, self.history), Traffic(self.system, self.history)
        self._there = RegionObserver(self.system.region, self.history) if self.system.region is not None else None

    def boot(self) -> None:
        """Start every process and publish a first version; return while clients ask all servers. Raises TimeoutError."""
        keepers = self.system.keepers
        for name in [name for name in keepers if name not in self.system.servers]:
            keepers[name].open()
            self.system.up(name, 120)
            if name in self.setting.nodes and not wait_for(lambda name=name: self._is_live(name), 60):  # type: ignore[misc]
                raise TimeoutError(f"expected {name} to be live")
        self._observer.open()
        if self._there is not None:
            self._there.open()
        if not wait_for(lambda: self.operations.publish() == "ok", 180):
            raise TimeoutError("expected a first version")
        for name in self.system.servers:
            keepers[name].open()
        for name in self.system.servers:
            self.system.up(name, BOOT)
        self.traffic.open()

    def _is_live(self, node: str) -> bool:
        return any(found.name == f"nodes/{node}" and found.state == Node.State.LIVE for found in self.system.observer.nodes())

    def violations(self) -> list[Violation]:
        """Check the history so far."""
        return check(self.history.events, EXPECTED)

    def look_at_logs(self) -> None:
        """Record a fault of its own that the daemon or a node has logged."""
        logs = {"daemon": self.system.daemon.log} | {name: kept.node.log for name, kept in self.system.nodes.items()}
        if self.system.region is not None:
            logs["region"] = self.system.region.daemon.log
        for process, log in logs.items():
            text = log.read_text(errors="replace") if log.exists() else ""
            for word in ("Traceback", "INTERNAL"):
                if (at := text.find(word)) >= 0:
                    self.history.record("log", process=process, text=text[max(0, at - 1500) : at + 1500])

    def close(self) -> None:
        """End every process, and record what is left."""
        self.history.record("peace", phase="shutdown")
        # A last look at versions that were published after the one before.
        there = [self._there.close] if self._there is not None else []
        for act in (*there, self._observer.close, self._observer.act, self.traffic.close, self.system.close):
            try:
                act()
            except Exception as error:
                self.history.record("trouble", text=f"{act.__qualname__}: {type(error).__name__}: {error}")
        self.history.record("peace", phase="end", problems=left_at_the_end(self.folder, self.system.pages))
        for process in processes_of(self.folder):
            os.kill(process, 9)
        self.history.close()
