"""An object in a process of its own, whose methods are called over a pipe. The process is forked from one that has imported the
modules of `preloaded` and called nothing of them, which a test run keeps.

with Remote(Trainer, "127.0.0.1:7677") as trainer:
    trainer.call("publish", 1)

`call` returns a method's result, raises `Refusal` with the reason of the error that it raised, and `Gone` if the process died.
"""

import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tests.support.forked import start
from tests.support.hidden import hide
from tests.support.namespaces import enter

PATIENCE = 400.0
"""Seconds that a call may take."""
CLIENTS = ("tests.support.home_rank", "tests.failpoints.roles", "tests.client.models")
"""Modules that a role needs which says no others in an attribute `preloaded`."""
_TAIL = 4000  # characters of the process's output that an error has


class Gone(Exception):
    """The process died."""


class Refusal(Exception):
    """A method raised. `reason` is that of a ResharderError, or the name of another error's class."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text


class Remote:
    """A process with one role.

    Args:
        role: The class, at the top of a module. Its attributes `preloaded` and `threads`, of torch, are those of the process.
        arguments: Of its constructor, which a process that refuses them says at the first call.
        environment: Of the process, besides this one's.
        hidden: Folders that are empty to it; needs root.
        namespace: Path of the network namespace that it is in; needs root.
    """

    def __init__(
        self,
        role: type,
        *arguments: object,
        environment: Mapping[str, str] = MappingProxyType({}),
        hidden: Sequence[Path] = (),
        namespace: str = "",
        **options: object,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="resharder-remote-"))
        self._log, address = self._folder / "log", str(self._folder / "pipe")
        try:
            with Listener(address, "AF_UNIX") as listener, self._log.open("wb") as log:
                preloaded: Sequence[str] = getattr(role, "preloaded", CLIENTS)
                given = os.environ | environment
                one = {"OMP_NUM_THREADS": "1"}
                self._process = start(_NAME, given | one, log, arguments=[address], imported_with=one, preloaded=preloaded)
                self._pipe = listener.accept()
            self._pipe.send((namespace, [str(folder) for folder in hidden]))
            self._pipe.send_bytes(pickle.dumps((_importable(role), arguments, options)))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def call(self, method: str, *args: Any, timeout: float = PATIENCE, **options: Any) -> Any:
        try:
            self._pipe.send((method, args, options))
            if not self._pipe.poll(timeout):
                raise TimeoutError(f"{method} took longer than {timeout:g} s")
            result, reason, text = self._pipe.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Gone(f"{method}: {self._log.read_text(errors='replace')[-_TAIL:]}") from error
        if reason:
            raise Refusal(reason, text)
        return result

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_NAME = "tests.support.remote"


def _importable(role: type) -> type:
    """The class as another process imports it, where it is that of a program that runs."""
    if role.__module__ != "__main__":
        return role
    return getattr(import_module(sys.modules["__main__"].__spec__.name), role.__name__)  # type: ignore[no-any-return,union-attr]


def main() -> None:
    """The process."""
    pipe = Client(sys.argv[1], "AF_UNIX")
    namespace, hidden = pipe.recv()
    if namespace:
        enter(namespace)
    if hidden:
        hide(hidden)
    with suppress(EOFError):
        _serve(pipe)
    os._exit(0)


def _serve(pipe: Connection) -> None:
    import torch

    role, arguments, given = pickle.loads(pipe.recv_bytes())
    torch.set_num_threads(getattr(role, "threads", 1))
    made = _answered(lambda: role(*arguments, **given))
    while True:
        method, args, options = pipe.recv()
        instance, reason, text = made
        answer = (None, reason, text) if reason else _answered(lambda: getattr(instance, method)(*args, **options))  # noqa: B023
        pipe.send(answer)


def _answered(act: Callable[[], Any]) -> tuple[Any, str, str]:
    from resharder.client import ResharderError

    try:
        return act(), "", ""
    except ResharderError as error:
        return None, error.reason, f"{type(error).__name__}: {error}"
    except Exception as error:
        return None, type(error).__name__, str(error)
