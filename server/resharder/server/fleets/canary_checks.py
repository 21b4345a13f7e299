"""Checks: commands of the daemon's configuration whose exit codes decide about canaries.

    checks = Checks({"answers": ["/opt/checks/answers.sh", "--quick"]}, timeout=600)
    checks.start("answers", "fleets/policy/7", environment("policy", 7, 12, 11, ["10.0.0.1:8000"]), done)

A command runs without a shell, in its own process group, which is killed when it ends. Its environment is the RESHARDER_*
variables of `environment` and the daemon's PATH and HOME. A restarted daemon repeats a check that is still due. After a SIGKILL
of the daemon, the orphaned command may run at the same time.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import structlog
from resharder.server.infra.medium import medium_error
from resharder.server.state.fleet import Fleet

_TAIL_BYTES = 16 << 10  # of output retained, the last ones
_LINES, _LONGEST = 5, 1000  # lines and characters of it in the message
_log = structlog.get_logger("resharder.checks")

Done = Callable[[bool, str], None]
"""Called with whether the command exited with 0, and a message with the last lines of its output."""


class Checks:
    """Runner of checks. Thread-safe. A command and its process group are killed after `timeout` seconds."""

    def __init__(self, commands: Mapping[str, Sequence[str]], timeout: float) -> None:
        self._commands, self._timeout = dict(commands), timeout
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._closed = False

    def start_for(self, fleet: Fleet, addresses: Sequence[str], done: Done) -> None:
        """Start the check of the canaries of a fleet's current move, at most once for each move.

        Args:
            fleet: Fleet with a move.
            addresses: The canaries' addresses, host:port.
            done: Called with the result, as in `start`.
        """
        if (move := fleet.move) is not None:
            variables = environment(fleet.name, move.id, move.to, move.back_to, addresses)
            self.start(move.strategy.check, f"{fleet.name}/{move.id}", variables, done)

    def start(self, name: str, key: str, environment: Mapping[str, str], done: Done) -> None:
        """Start a command, at most once for each key. `done` is called on another thread, unless the command is cancelled."""
        with self._lock:
            if self._closed or key in self._runs:
                return
            run = self._runs[key] = _Run(name, self._commands.get(name, ()), environment, self._timeout)
        _log.info("check_started", check=name, key=key)
        threading.Thread(target=self._follow, args=(run, key, done), name=f"check-{name}", daemon=True).start()

    def cancel(self, key: str) -> None:
        """Kill the command of a key, if it is running, without a call of `done`. The key may be used again."""
        with self._lock:
            run = self._runs.pop(key, None)
        if run is not None:
            run.cancel()

    def close(self) -> None:
        """Kill all commands, and ignore later starts."""
        with self._lock:
            self._closed = True
            keys = list(self._runs)
        for key in keys:
            self.cancel(key)

    def _follow(self, run: "_Run", key: str, done: Done) -> None:
        ok, message = run.result()
        _log.info("check_ended", check=run.name, key=key, ok=ok, message=message)
        with self._lock:
            if self._runs.get(key) is not run:
                return
        try:
            done(ok, message)
        except OSError as error:
            _log.error("check_not_kept", check=run.name, key=key, reason=str(medium_error(error)))
            with self._lock:  # so that it is started again while it is due
                if self._runs.get(key) is run:
                    del self._runs[key]


class _Run:
    """One command. `result` runs it, unless `cancel` was called before."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
        self.name, self._command, self._timeout = name, list(command), timeout
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        self._environment = kept | dict(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def result(self) -> tuple[bool, str]:
        if not self._command:
            return False, "the check is not in the daemon's configuration"
        try:
            process = self._start()
        except OSError as error:
            return False, f"{self._command[0]} cannot be run: {error.strerror}"
        if process is None or process.stdout is None:
            return False, "it was cancelled"
        tail = _Tail(process.stdout)
        try:
            status = process.wait(self._timeout)
            end = f"ended with {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        except subprocess.TimeoutExpired:
            status, end = 1, f"did not end within {self._timeout:g} s"
        _kill(process)
        process.wait()
        return status == 0, end + tail.lines()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._process is not None and self._process.poll() is None:  # otherwise its id may belong to another process
                _kill(self._process)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if not self._cancelled:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return self._process


class _Tail:
    """Reader of all output of a process that retains its end."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output, self._end = output, b""
        self._thread = threading.Thread(target=self._read, name="check-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._output as output:
            while read := os.read(output.fileno(), _TAIL_BYTES):
                self._end = (self._end + read)[-_TAIL_BYTES:]

    def lines(self) -> str:
        """Return `: ` and the last lines of output; empty without output. Call after the process has ended."""
        self._thread.join(5)  # a process that left the group may still have the output open
        lines = [line.strip() for line in self._end.decode(errors="replace").splitlines() if line.strip()]
        end = "\n".join(lines[-_LINES:])[-_LONGEST:]
        return f": {end}" if end else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, which may outlive its first process."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # all have ended
        return


def environment(fleet: str, move: int, version: int, from_version: int, servers: Sequence[str]) -> dict[str, str]:
    """Return the environment of a check. `servers` are the canaries' addresses, host:port."""
    return {
        "RESHARDER_FLEET": fleet,
        "RESHARDER_MOVE": str(move),
        "RESHARDER_VERSION": str(version),
        "RESHARDER_FROM_VERSION": str(from_version),
        "RESHARDER_SERVERS": ",".join(servers),
    }
