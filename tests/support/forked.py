"""Processes of a module's `main`, forked from one that has imported the module, with what numba needs for compiled code, and done
nothing else: the imports of a daemon, or of a vLLM server, take more of a processor than most tests need for all the rest.

`start("resharder.server.main", environment, log)` is like a `subprocess.Popen` of `python -m resharder.server.main`. A
`sitecustomize` in a folder that is new in PYTHONPATH runs at its start.
`python -m tests.support.forked` is what they are forked from; it ends with the process that started it.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO, ClassVar, NamedTuple

from resharder.converters import failpoints

from tests.support.hidden import hide

TOGETHER = (
    ("resharder.server.main", "resharder.server.node.main"),
    ("tests.support.vllm_serve", "tests.support.embedding_program"),
)
"""Modules that have one source."""
_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def start(
    module: str,
    environment: Mapping[str, str],
    log: IO[bytes],
    umask: int = -1,
    *,
    arguments: Sequence[str] = (),
    session: bool = False,
    imported_with: Mapping[str, str] = MappingProxyType({}),
    preloaded: Sequence[str] = (),
    hidden: Sequence[Path] = (),
) -> "ForkedProcess":
    """Start `main` of a module, with its standard output and error in `log`, and in a session of its own if `session`.

    `imported_with`: variables that are read on import, always the same for a module. `preloaded`: modules that are imported too;
    those with the same ones are forked from one process. `hidden`: folders that are empty to it.
    """
    modules = next((group for group in TOGETHER if module in group), (*preloaded, module))
    source = _Source.of(modules, os.environ | imported_with)
    request = {"module": module, "arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}
    return ForkedProcess(source, request | {"umask": umask, "session": session, "hidden": [*map(str, hidden)]}, log)


class Ended(NamedTuple):
    """`output`: of both streams."""

    returncode: int
    output: str


def run(module: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 400) -> Ended:
    """Run `main` of a module to its end."""
    with tempfile.TemporaryFile() as log:
        process = start(module, os.environ if environment is None else environment, log, arguments=arguments)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        log.seek(0)
        return Ended(process.wait(), log.read().decode())


def end_sources() -> None:
    """End what others are forked from, and with it those that are left."""
    for source in _Source.running.values():
        source.end()


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, source: "_Source", request: Mapping[str, object], log: IO[bytes]) -> None:
        self.args = [sys.executable, "-m", request["module"]]
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._ended, theirs = os.pipe()
        try:
            self.pid = source.fork(request, log.fileno(), theirs)
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, as `subprocess` allows for
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _status(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._ended], [], [], left)[0]:
                return None
            with self._lock:
                if self.returncode is None:
                    written = os.read(self._ended, 16)  # none if what it was forked from was killed
                    self.returncode = int(written) if written else -signal.SIGKILL
        return self.returncode

    def __del__(self) -> None:
        os.close(self._ended)


class _Source:
    """A process that others are forked from."""

    running: ClassVar[dict[tuple[str, ...], "_Source"]] = {}
    _starting = threading.Lock()

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._process = threading.Lock(), os.getpid()
        self._own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES)
        with theirs:
            command = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno()), *modules]
            root = Path(__file__).parents[2]
            self._started = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd=root
            )
        atexit.register(self.end)

    @classmethod
    def of(cls, modules: tuple[str, ...], environment: Mapping[str, str]) -> "_Source":
        with cls._starting:
            found = cls.running.get(modules)
            if found is None or found._process != os.getpid() or found._started.poll() is not None:
                found = cls.running[modules] = cls(modules, environment)
            return found

    def fork(self, request: Mapping[str, object], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._own, [json.dumps(dict(request)).encode()], list(descriptors))
            return int(self._own.recv(16))

    def end(self) -> None:
        if self._process == os.getpid():
            self._own.close()
            self._started.wait()


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request; return, in the forked process alone, the module to run and its arguments."""
    children: dict[int, int] = {}
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            for pid in list(children):
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    os.write(children[pid], str(os.waitstatus_to_exitcode(ended[1])).encode())
                    os.close(children.pop(pid))
        if requests not in ready:
            continue
        message, (log, status), _, _ = _received(requests)
        if not message:
            os._exit(0)
        begun, begins = os.pipe()
        if pid := os.fork():
            os.close(log)
            os.close(begins)
            os.read(begun, 1)  # nothing, once it has its session, which may be sent a signal
            os.close(begun)
            children[pid] = status
            requests.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupt)
        request = json.loads(message)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (log, status, woken, wake, begun, requests.detach(), *children.values()):
            os.close(descriptor)
        _end_with_parent()
        if request["session"]:
            os.setsid()
        os.close(begins)
        if request["hidden"]:
            hide(request["hidden"])
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(request["environment"])
        encoding = os.environ.get("PYTHONIOENCODING") or None
        sys.stdout, sys.stderr = (  # they knew another kind of file
            os.fdopen(number, "w", 1, encoding, errors, closefd=False) for number, errors in ((1, None), (2, "backslashreplace"))
        )
        for path in reversed([path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in before]):
            sys.path.insert(0, path)
            if (customization := Path(path, "sitecustomize.py")).exists():
                runpy.run_path(str(customization))
        os.chdir(request["folder"])
        if request["umask"] >= 0:
            os.umask(request["umask"])
        return [request["module"], *request["arguments"]]


def _received(requests: socket.socket) -> tuple[bytes, tuple[int, int], int, object]:
    message, descriptors, flags, address = socket.recv_fds(requests, _BYTES, 2)
    return message, (descriptors[0], descriptors[1]) if descriptors else (-1, -1), flags, address


def _end_with_parent() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")


def prepare() -> None:
    """Once all is imported: do what each child would do again for 0.7 s of a processor.

    The collector looks at no object of before. numba imports some 200 modules when it loads its first kernel from the cache.
    """
    if "vllm" not in sys.modules:  # its CPU build starts no engine where llvmlite is loaded (0.32, triton_utils/dispatcher.py)
        registry = import_module("numba.core.registry")
        registry.cpu_target.typing_context.refresh()
        registry.cpu_target.target_context.refresh()
    gc.collect()
    gc.freeze()


def main(descriptor: str, *modules: str) -> None:
    with suppress(ImportError):  # finds the title's place in memory by the environment, which is another one after a fork
        import_module("setproctitle").getproctitle()
    for name in modules:
        import_module(name)
    prepare()
    sys.argv = _serve(socket.socket(fileno=int(descriptor)))
    failpoints.arm(os.environ.get("RESHARDER_FAILPOINT", ""), os.environ.get("RESHARDER_FAILPOINT_MARK", ""))  # as on its import
    import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main(*sys.argv[1:])
