"""Storms: the processes start, then storm and peace alternate until the time is up, and the history is checked."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Faults
from tests.chaos.intruder import Intruder
from tests.chaos.peace import Peace
from tests.chaos.run import Run
from tests.chaos.schedule import Action, Setting, draw
from tests.chaos.scraper import Scraper
from tests.chaos.violations import Violation

_BEGINS = 0.5  # seconds in which the last fault begins, so that peace ends it


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
        setting: What the run has.
        servers: Names of the servers that take part.
        boots: Bound on the faults of one storm after which a server, or the trainer job, has to boot.
    """

    def __init__(self, folder: Path, seed: int, setting: Setting, servers: tuple[str, ...], boots: int = 1) -> None:
        self.result, self._seed, self._setting, self._boots = Result(folder), seed, setting, boots
        self._run = Run(folder, servers, setting)
        self._beside = Scraper(self._run.system, self._run.history), Intruder(self._run.system, self._run.history)
        self._faults = Faults(self._run.system, self._run.history)
        self._peace = Peace(self._run.system, self._run.operations, self._run.history)
        self._pool = ThreadPoolExecutor(24)

    def run(self, seconds: float, storm: float) -> Result:
        """Run storms of `storm` seconds until `seconds` have passed since the servers were ready; at least one."""
        try:
            self._run.boot()
            for thread in self._beside:
                thread.open()
            end = time.monotonic() + seconds
            while not self.result.schedules or time.monotonic() < end:
                number = len(self.result.schedules)
                schedule = draw(f"{self._seed}/{number}", storm, self._setting, boots=self._boots)
                self.result.schedules.append(schedule)
                self._blow(schedule)
                if self._run.violations():
                    break
        except Exception as error:
            self._run.history.record("trouble", text=f"{type(error).__name__}: {error}")
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for thread in self._beside:
                thread.close()
            self._run.close()
        self.result.compared, self.result.tokens = self._run.traffic.compared, self._run.traffic.tokens
        self.result.violations = self._run.violations()
        return self.result

    def _blow(self, schedule: list[Action]) -> None:
        began, running = time.monotonic(), list[Future[object]]()
        for action in schedule:
            time.sleep(max(0.0, began + action.at - time.monotonic()))
            if action.kind == "fault":
                running.append(self._pool.submit(self._inject, action))
            else:
                running.append(self._pool.submit(self._run.operations.run, action.name, dict(action.given)))
        time.sleep(_BEGINS)
        self._peace.make(lambda: all(one.done() for one in running))
        self._run.traffic.drain(60)
        self._run.look_at_logs()

    def _inject(self, action: Action) -> None:
        try:
            self._faults.inject(action.name, dict(action.given))
        except Exception as error:
            self._run.history.record("trouble", text=f"{action}: {type(error).__name__}: {error}")
