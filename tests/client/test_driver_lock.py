"""Transfers go before the driver's long work, and the work goes on after them."""

import gc
import sys
import threading
from typing import NamedTuple

import pytest
from resharder.client.runtime.driver_lock import DriverLock

LONG = 60.0


class State(NamedTuple):
    """Of Python, as it is for all of the process."""

    interval: float
    collects: bool


def state() -> State:
    return State(sys.getswitchinterval(), gc.isenabled())


def test_priority_work_waits_for_the_call_under_way_and_for_no_other() -> None:
    lock, calls, begun, go = DriverLock(), list[int](), threading.Event(), threading.Event()

    def work() -> None:
        for number in range(5):
            with lock.background():
                calls.append(number)
                begun.set()
                assert go.wait(LONG)

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(LONG)
    entered = threading.Event()

    def transfer() -> None:
        with lock.priority(), lock.priority():
            entered.set()
            worker.join(0.2)
            calls.append(-1)

    transferring = threading.Thread(target=transfer)
    transferring.start()
    assert not entered.wait(0.2)
    go.set()
    transferring.join(LONG)
    worker.join(LONG)
    assert calls == [0, -1, 1, 2, 3, 4]


def test_priority_work_is_not_held_up_by_other_threads_python() -> None:
    lock, before = DriverLock(), state()
    with lock.priority():
        within = state()
        with lock.priority():
            assert state() == within
        assert state() == within
    assert within.interval < before.interval / 100
    assert (before.collects, within.collects) == (True, False)
    assert state() == before
    with lock.background():
        assert state() == before


def test_a_process_that_looks_for_garbage_itself_goes_on_doing_so() -> None:
    gc.disable()
    try:
        with DriverLock().priority():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_errors_leave_nobody_waiting() -> None:
    lock = DriverLock()
    for enter in (lock.priority, lock.background):
        before = state()
        with pytest.raises(ValueError, match="in the middle"), enter():
            raise ValueError("in the middle")
        assert state() == before
    with lock.priority():
        pass
    with lock.background():
        pass
