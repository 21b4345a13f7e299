"""Operations of a storm: calls of the operator SDK through the proxy, and requests to the trainer job."""

import threading
from collections.abc import Callable
from typing import Any

from resharder.client.errors import ResharderError
from resharder.client.operator.answers import Fleet, PauseMode, ServeAhead, UpdateStrategy, Version, VersionTarget

from demo.jobs import JobFailed
from tests.chaos.adapter import ADAPTER
from tests.chaos.history import History
from tests.chaos.system import System

FLEET = "policy"
PUBLISH_SECONDS = 240.0
"""Bound on a publication: two steps of at most 60 s, READY in 60 s, registration in 60 s."""


class Operations:
    """Runs operations; the history has the begin and the end of each, with `ok` or the reason of its refusal.

    Attributes:
        transports: The ways that the bytes of the last published version took, of all ranks that delivered.
    """

    def __init__(self, system: System, history: History) -> None:
        self._system, self._history = system, history
        self._count, self._step, self._failed = 0, 0, 0
        self.transports = set[str]()
        self._lock, self._publishing, self._adapting = threading.Lock(), threading.Lock(), threading.Lock()

    def run(self, name: str, given: dict[str, Any]) -> str:
        """Run one operation, and return its outcome."""
        if name == "publish":
            return self.publish(**given)
        verb: Callable[..., Any] = getattr(self, f"_{name}")
        return self._recorded(name, given, lambda: self._shown(verb(**given)))

    # Publication

    def publish(self, retry: bool = False, direct: bool = True) -> str:
        """Publish a new step, or with `retry` the one that failed before; one at a time."""
        if not self._publishing.acquire(blocking=False):
            return "busy"
        try:
            return self._publish(retry, direct)
        finally:
            self._publishing.release()

    def _publish(self, retry: bool, direct: bool) -> str:
        trainer, keeper = self._system.trainer, self._system.keepers["trainer"]
        if not keeper.running.is_set() or trainer.job is None:
            return "no trainer"
        if not (retry and self._failed):
            self._step += 1
        step, job = self._failed if retry and self._failed else self._step, trainer.job
        self._failed = step

        def act() -> dict[str, Any]:
            reply = job.requests.ask(timeout=PUBLISH_SECONDS, do="publish", step=step, direct=direct)
            for rank in reply["ranks"]:
                if rank["version"]:
                    self._system.steps.setdefault(rank["version"], step)
            ready = [rank for rank in reply["ranks"] if not rank["reason"]]
            if not ready:
                refused = reply["ranks"][0]
                raise Refusal(refused["reason"], refused["text"], reply)
            self.transports = {rank["transport"] for rank in reply["ranks"]} - {""}
            return {"version": ready[0]["version"], "epoch": ready[0]["epoch"], "ranks": reply["ranks"]}

        given = {"step": step, "job": trainer.jobs, "direct": direct, "place": trainer.place}
        outcome = self._recorded("publish", given, act)
        if outcome == "ok":
            self._failed = 0
        if outcome == "STALE_EPOCH":
            trainer.new_job = True
            trainer.end()
        return outcome

    # The adapter

    def _adapter(self) -> dict[str, Any]:
        """Publish its next step; one at a time."""
        assert self._system.adapter is not None
        if not self._adapting.acquire(blocking=False):
            return {"busy": True}
        try:
            return {"adapter": self._system.adapter.publish()}
        finally:
            self._adapting.release()

    def _adapter_rollback(self) -> Fleet:
        return self._system.operator.rollback(ADAPTER, reason="chaos")

    def _adapter_latest(self) -> Fleet:
        target = VersionTarget(VersionTarget.Kind.LATEST)
        return self._system.operator.set_fleet(ADAPTER, target=target, accept_refused=True)

    # Fleet

    def _ready(self, pick: float) -> int:
        ready = sorted(v.number for v in self._system.operator.versions(FLEET) if v.state == Version.State.READY)
        return ready[int(pick * len(ready))]

    def _target(self, pick: float, accept_refused: bool) -> Fleet:
        target = VersionTarget(VersionTarget.Kind.NUMBER, self._ready(pick))
        return self._system.operator.set_fleet(FLEET, target=target, accept_refused=accept_refused)

    def _latest(self, accept_refused: bool) -> Fleet:
        target = VersionTarget(VersionTarget.Kind.LATEST)
        return self._system.operator.set_fleet(FLEET, target=target, accept_refused=accept_refused)

    def _rollback(self, pick: float | None) -> Fleet:
        version = None if pick is None else self._ready(pick)
        return self._system.operator.rollback(FLEET, version, reason="chaos")

    def _strategy(self, kind: str, **options: Any) -> Fleet:
        return self._system.operator.set_fleet(FLEET, strategy=UpdateStrategy(UpdateStrategy.Kind(kind), **options))

    def _skew(self, bound: int) -> Fleet:
        return self._system.operator.set_fleet(FLEET, max_skew=bound)

    def _ahead(self, on: bool | None) -> Fleet:
        """Set whether the fleet serves ahead of READY; None: the default."""
        return self._system.operator.set_fleet(FLEET, serve_ahead=ServeAhead.AUTO if on is None else on)

    def _pause_mode(self, mode: str) -> Fleet:
        return self._system.operator.set_fleet(FLEET, pause_mode=PauseMode(mode))

    def _sleep(self, server: str, level: int) -> Fleet:
        return self._system.operator.sleep(FLEET, server, level=level)

    def _wake(self, server: str) -> Fleet:
        return self._system.operator.wake(FLEET, server)

    def _drain(self, server: str) -> Fleet:
        return self._system.operator.drain(FLEET, server)

    def _drain_node(self, node: str) -> dict[str, Any]:
        return {"state": self._system.operator.drain_node(node).state.value}

    def _resume_node(self, node: str) -> dict[str, Any]:
        return {"state": self._system.operator.resume_node(node).state.value}

    def _resume(self) -> Fleet:
        return self._system.operator.resume(FLEET)

    def _pin(self) -> Fleet:
        return self._system.operator.pin(FLEET)

    def _approve(self) -> Fleet:
        return self._system.operator.approve(FLEET)

    def _back(self) -> Fleet:
        return self._system.operator.back(FLEET, reason="chaos")

    def _gc(self, keep: int, pick: float | None) -> dict[str, Any]:
        if pick is None:
            found = self._system.operator.gc(keep=keep, model=FLEET)
        else:
            found = self._system.operator.gc([self._ready(pick)], model=FLEET)
        return {"retired": [version.number for version in found.retired]}

    # Records

    def _recorded(self, name: str, given: dict[str, Any], act: Callable[[], dict[str, Any]]) -> str:
        with self._lock:
            self._count += 1
            id = self._count
        self._history.record("begin", id=id, name=name, given=given)
        text, result, outcome = "", dict[str, Any](), "ok"
        try:
            result = act()
        except Refusal as error:
            outcome, text, result = error.reason, error.text, error.result
        except JobFailed as error:
            outcome, text = "JOB_ENDED", str(error)[-2000:]
        except ResharderError as error:
            outcome, text = error.reason, f"{type(error).__name__}: {error}"
        except Exception as error:
            outcome, text = f"HARNESS_{type(error).__name__}", str(error)
        self._history.record("end", id=id, name=name, outcome=outcome, text=text[:2000], result=result)
        return outcome

    def _shown(self, answer: Any) -> dict[str, Any]:
        if isinstance(answer, Fleet):
            return {"wanted": answer.wanted_version, "settled": answer.settled_version}
        return dict(answer)


class Refusal(Exception):
    """A publication that no rank completed."""

    def __init__(self, reason: str, text: str, result: dict[str, Any]) -> None:
        super().__init__(text)
        self.reason, self.text, self.result = reason, text, result
