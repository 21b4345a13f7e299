"""Transfers go before the driver's long work, and the work goes on after them."""

import sys
import threading

import pytest
from resharder.client.direct.turnstile import Turnstile

LONG = 60.0


def test_who_is_undisturbed_waits_for_the_call_under_way_and_for_no_other() -> None:
    turnstile, calls, begun, go = Turnstile(), list[int](), threading.Event(), threading.Event()

    def work() -> None:
        for number in range(5):
            with turnstile.slowly():
                calls.append(number)
                begun.set()
                assert go.wait(LONG)

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(LONG)
    entered = threading.Event()

    def transfer() -> None:
        with turnstile.undisturbed(), turnstile.undisturbed():
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


def test_other_threads_keep_the_interpreter_for_less_while_somebody_is_undisturbed() -> None:
    turnstile, before = Turnstile(), sys.getswitchinterval()
    with turnstile.undisturbed():
        within = sys.getswitchinterval()
        with turnstile.undisturbed():
            assert sys.getswitchinterval() == within
        assert sys.getswitchinterval() == within
    assert within < before / 100
    assert sys.getswitchinterval() == before
    with turnstile.slowly():
        assert sys.getswitchinterval() == before


def test_errors_leave_nobody_waiting() -> None:
    turnstile = Turnstile()
    for enter in (turnstile.undisturbed, turnstile.slowly):
        before = sys.getswitchinterval()
        with pytest.raises(ValueError, match="in the middle"), enter():
            raise ValueError("in the middle")
        assert sys.getswitchinterval() == before
    with turnstile.undisturbed():
        pass
    with turnstile.slowly():
        pass
