"""A run: the processes start, then storm and peace alternate until the time is up, and the history is checked."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Faults
from tests.chaos.history import History
from tests.chaos.model import Violation, check
from tests.chaos.observer import Observer
from tests.chaos.operations import Operations
from tests.chaos.peace import Peace, left_at_the_end
from tests.chaos.schedule import Action, draw
from tests.chaos.system import BOOT, MARK, System, processes_of, wait_for
from tests.chaos.traffic import Traffic
from tests.failpoints.cycle import DOCUMENTED

EXPECTED = DOCUMENTED | {"USAGE", "UNREACHABLE", "TIMEOUT", "ABORTED"}


@dataclass
class Result:
    """Outcome of a run."""

    folder: Path
    violations: list[Violation] = field(default_factory=list)
    schedules: list[list[Action]] = field(default_factory=list)
    compared: int = 0
    tokens: int = 0


class Storms:
    """One run in a folder of its own.

    Args:
        folder: For the history, logs and configurations.
        seed: Seed of all schedules.
        servers: Names of the servers that take part.
        boots: Bound on the faults of one storm after which a server, or the trainer job, has to boot.
    """

    def __init__(self, folder: Path, seed: int, servers: tuple[str, ...], boots: int = 1) -> None:
        os.environ[MARK] = str(folder)
        self.result, self._seed, self._boots = Result(folder), seed, boots
        self.history = History(folder / "history.jsonl")
        self._system = System(folder, self.history, servers)
        self._operations = Operations(self._system, self.history)
        self._faults = Faults(self._system, self.history)
        self._peace = Peace(self._system, self._operations, self.history)
        self._observer, self._traffic = Observer(self._system, self.history), Traffic(self._system, self.history)
        self._pool = ThreadPoolExecutor(24)

    def run(self, seconds: float, storm: float) -> Result:
        """Run storms of `storm` seconds until `seconds` have passed since the servers were ready; at least one."""
        try:
            self._boot()
            end = time.monotonic() + seconds
            while not self.result.schedules or time.monotonic() < end:
                number = len(self.result.schedules)
                schedule = draw(f"{self._seed}/{number}", storm, boots=self._boots)
                self.result.schedules.append(schedule)
                self._blow(schedule)
                if self._bad():
                    break
        except Exception as error:
            self.history.record("trouble", text=f"{type(error).__name__}: {error}")
        finally:
            self._close()
        self.result.violations = check(self.history.events, EXPECTED)
        return self.result

    def _boot(self) -> None:
        keepers = self._system.keepers
        for name in ("daemon", "trainer"):
            keepers[name].open()
            self._system.up(name, 120)
        self._observer.open()
        if not wait_for(lambda: self._operations.publish() == "ok", 180):
            raise TimeoutError("expected a first version")
        for name in self._system.servers:
            keepers[name].open()
        for name in self._system.servers:
            self._system.up(name, BOOT)
        self._traffic.open()

    def _blow(self, schedule: list[Action]) -> None:
        began, running = time.monotonic(), list[Future[object]]()
        for action in schedule:
            time.sleep(max(0.0, began + action.at - time.monotonic()))
            if action.kind == "fault":
                running.append(self._pool.submit(self._inject, action))
            else:
                running.append(self._pool.submit(self._operations.run, action.name, dict(action.given)))
        self._peace.make(lambda: all(one.done() for one in running))
        self._traffic.drain(60)
        self._look_at_logs()

    def _inject(self, action: Action) -> None:
        try:
            self._faults.inject(action.name, dict(action.given))
        except Exception as error:
            self.history.record("trouble", text=f"{action}: {type(error).__name__}: {error}")

    def _bad(self) -> list[Violation]:
        return check(self.history.events, EXPECTED)

    def _look_at_logs(self) -> None:
        log = self._system.daemon.log
        text = log.read_text(errors="replace") if log.exists() else ""
        for word in ("Traceback", "INTERNAL"):
            if (at := text.find(word)) >= 0:
                self.history.record("log", process="daemon", text=text[max(0, at - 1500) : at + 1500])

    def _close(self) -> None:
        self.history.record("peace", phase="shutdown")
        for act in (self._observer.close, self._traffic.close, self._system.close):
            try:
                act()
            except Exception as error:
                self.history.record("trouble", text=f"{act.__qualname__}: {type(error).__name__}: {error}")
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.history.record("peace", phase="end", problems=left_at_the_end(self.result.folder, self._system.pages))
        for process in processes_of(self.result.folder):
            os.kill(process, 9)
        self.result.compared, self.result.tokens = self._traffic.compared, self._traffic.tokens
        self.history.close()
