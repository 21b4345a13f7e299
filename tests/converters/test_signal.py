"""Signals: who is called, in which order, on which thread."""

import threading

from resharder.converters.signal import Signal


def test_all_connected_functions_are_called_in_their_order_with_what_is_emitted() -> None:
    signal, calls = Signal[int, str](), list[tuple[str, int, str]]()
    signal.connect(lambda number, text: calls.append(("first", number, text)))
    signal.connect(lambda number, text: calls.append(("second", number, text)))
    signal.emit(7, "x")
    assert calls == [("first", 7, "x"), ("second", 7, "x")]


def test_a_function_is_not_called_once_it_is_disconnected() -> None:
    signal, calls = Signal[int](), list[int]()
    signal.connect(calls.append)
    signal.disconnect(calls.append)
    signal.emit(1)
    assert (calls, signal.connections) == ([], 0)


def test_a_function_that_is_connected_or_disconnected_during_an_emission_counts_from_the_next_one_on() -> None:
    signal, calls = Signal[int](), list[str]()

    def late(number: int) -> None:
        calls.append(f"late {number}")

    def first(number: int) -> None:
        calls.append(f"first {number}")
        signal.connect(late)
        signal.disconnect(first)

    signal.connect(first)
    signal.emit(1)
    signal.emit(2)
    assert calls == ["first 1", "late 2"]


def test_functions_are_called_on_the_thread_that_emits() -> None:
    signal, threads = Signal[()](), list[threading.Thread]()
    signal.connect(lambda: threads.append(threading.current_thread()))
    thread = threading.Thread(target=signal.emit)
    thread.start()
    thread.join()
    assert threads == [thread]
