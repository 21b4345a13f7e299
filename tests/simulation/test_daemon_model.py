"""The connections between simulated processes and the simulated daemon."""

from random import Random

from tests.simulation.control.daemon_model import Daemon, Link
from tests.simulation.control.schedule import Process, Schedule


def test_a_call_of_a_dead_process_does_not_reach_the_next_daemon() -> None:
    """A connection ends with the processes at both ends; a living process calls the next daemon again."""
    schedule = Schedule(Random(1), lambda line: None)
    daemon = Daemon(schedule, slow=0.1, keep=1)
    dies, lives = Process("dies"), Process("lives")
    arrived: list[str] = []
    for process in (dies, lives):
        link = Link(daemon, process)
        link.hold(1.0)
        daemon.call(link, lambda name=process.name: arrived.append(name), lambda answer: None)  # type: ignore[misc]
    daemon.kill(silent=True)
    schedule.kill(dies)
    daemon.start()
    schedule.run_until(schedule.now + 3)
    assert arrived == ["lives"]


def test_a_call_of_a_dead_process_may_be_late_at_the_daemon_that_it_was_connected_to() -> None:
    schedule = Schedule(Random(1), lambda line: None)
    daemon = Daemon(schedule, slow=0.1, keep=1)
    dies = Process("dies")
    arrived: list[str] = []
    link = Link(daemon, dies)
    link.hold(1.0)
    daemon.call(link, lambda: arrived.append("dies"), lambda answer: None)
    schedule.run_until(schedule.now + 0.5)
    schedule.kill(dies)
    schedule.run_until(schedule.now + 3)
    assert arrived == ["dies"]
