"""An engine that dies is told from one that was shut down by an order. With vLLM's own: `test_control_server.py`."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.inference.vllm import engine_core
from resharder.client.inference.vllm.engine_core import EngineEnd, resharder_process


@dataclass
class Process:
    exitcode: int | None = None


@dataclass
class Manager:
    processes: Sequence[Process]


@dataclass
class Resources:
    engine_manager: Manager | None


@dataclass
class Client:
    """vLLM's client of engine cores."""

    resources: Resources
    core_engines: tuple[bytes, ...] = (b"0",)
    shut_down: int = 0
    answers: list[Any] = field(default_factory=lambda: resharder_process(None))

    def shutdown(self, timeout: float | None = None) -> None:
        self.shut_down += 1

    async def _call_utility_async(self, method: str, *, engine: bytes) -> Any:
        assert (method, engine) == ("resharder_process", b"0")
        return self.answers


class Engine:
    def __init__(self, *processes: Process) -> None:
        self.errored = False
        self.output_processor: SimpleNamespace | None = None
        self.engine_core = Client(Resources(Manager(processes) if processes else None))
        self.leaves: list[str] = []  # with the failure that the daemon is told then
        self.end = EngineEnd(self, lambda: self.leaves.append(self.end.failure))


def test_a_healthy_engine_that_is_shut_down_has_not_failed() -> None:
    engine = Engine(Process())
    assert engine.end.failure == ""
    engine.engine_core.shutdown(timeout=1)
    engine.errored = True
    engine.engine_core.resources.engine_manager.processes[0].exitcode = -signal.SIGKILL  # type: ignore[union-attr]
    assert (engine.end.failure, engine.leaves, engine.engine_core.shut_down) == ("", [""], 1)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (-signal.SIGKILL, "its engine core ended with code -9"),
        (1, "its engine core ended with code 1"),
        (None, "its engine died"),  # it has said so, and has not ended yet
        (0, ""),  # it got the SIGTERM of the whole process group
        (-signal.SIGTERM, ""),
    ],
)
def test_an_engine_core_that_dies_is_a_failure_and_one_that_got_the_same_sigterm_is_not(code: int | None, failure: str) -> None:
    engine = Engine(Process(), Process(code))
    engine.errored = True
    engine.engine_core.shutdown()  # by the client itself
    assert engine.end.failure == failure
    assert engine.leaves == [failure]


def test_among_several_api_servers_the_engine_cores_process_is_looked_for() -> None:
    engine = Engine()
    core = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    engine.engine_core.answers = [engine_core._namespace(), core.pid]
    asyncio.run(engine.end.find_processes())
    assert engine.end.failure == ""
    core.kill()
    core.communicate()
    assert engine.end.failure == f"its engine core, process {core.pid}, ended"


def test_an_engine_core_on_another_host_is_not_looked_for() -> None:
    engine = Engine()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    engine.engine_core.answers = ["elsewhere", ended.pid]
    asyncio.run(engine.end.find_processes())
    assert engine.end.failure == ""


def test_a_sigterm_to_a_healthy_server_is_an_order_although_its_workers_end_first() -> None:
    engine = Engine(Process())
    signals: list[int] = []

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        engine.end.watch_signals(loop)
        loop.add_signal_handler(signal.SIGUSR1, lambda number: (signals.append(number), ended.set()), 3)
        os.kill(os.getpid(), signal.SIGUSR1)
        await ended.wait()

    asyncio.run(serve())
    engine.errored = True
    engine.engine_core.resources.engine_manager.processes[0].exitcode = 1  # type: ignore[union-attr]
    engine.engine_core.shutdown()
    assert (engine.end.failure, engine.leaves, signals) == ("", [""], [3])


def test_a_sigterm_to_a_server_whose_engine_has_died_is_no_order() -> None:
    engine = Engine(Process(-signal.SIGKILL))

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        engine.end.watch_signals(loop)
        loop.add_signal_handler(signal.SIGUSR1, ended.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await ended.wait()

    asyncio.run(serve())
    assert engine.end.failure == "its engine core ended with code -9"


def test_requests_that_wait_for_an_engine_that_is_shut_down_end_with_an_error() -> None:
    engine, errors = Engine(Process()), list[Exception]()
    engine.output_processor = SimpleNamespace(propagate_error=errors.append)

    async def shut_down() -> None:
        engine.end.watch_signals(asyncio.get_running_loop())
        await asyncio.to_thread(engine.engine_core.shutdown)
        await asyncio.sleep(0)

    asyncio.run(shut_down())
    engine.engine_core.shutdown()  # again, after the loop was closed
    assert [type(error).__name__ for error in errors] == ["EngineDeadError"]
