"""A real vLLM server on the CPU backend, for tests, the demo and benchmarks.

    with VllmServer(folder, args=["--load-format", "resharder"], env={"RESHARDER_ENDPOINT": endpoint}) as server:
        answer = server.generate([5, 9, 12], max_tokens=8)
        answer.token_ids, answer.logprobs, answer.version
        for token in server.stream([5, 9, 12], max_tokens=100): ...

It runs in a process group of its own; leaving the block ends the whole group.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.forked import ForkedProcess, start
from tests.support.hidden import hiding
from tests.support.ports import free_port

VERSION_HEADER = "X-Resharder-Version"
MODEL_NAME = "m"

# What makes vLLM start on two cores without a network. `nobind`: the automatic binding fails at TP=2.
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
# vLLM compiles a helper of its sampler even where nothing else is compiled: 3 s at the first answer.
EAGER_ENVIRONMENT = CPU_ENVIRONMENT | {"TORCH_COMPILE_DISABLE": "1"}
ON_CPU = any(distributions(name="vllm-cpu"))
SMALL = ["--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]


class ServerFailed(RuntimeError):
    """The server ended or did not become ready; the message holds the end of its log."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def version(self) -> str | None:
        return self.headers.get(VERSION_HEADER.lower())

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """A completion: one logprob (natural, of the chosen token) for every token id."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: str | None  # the header; None without the plugin


@dataclass(frozen=True)
class Token:
    token_id: int
    logprob: float
    at: float  # time.monotonic() when it arrived


@dataclass
class VllmServer:
    """`dtype` float32 makes answers exact: `auto` turns fp32 checkpoints into bf16. `env` entries of None are removed.

    `hidden`: folders that are empty to its processes. `within`: a command before theirs, as for a network namespace, with
    `host` as its address.
    """

    tier = "engine"

    model: Path | str
    args: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    dtype: str = "float32"
    eager: bool = True
    log: Path | None = None
    python: str = sys.executable
    port: int = 0
    timeout: float = 500.0  # seconds to become ready; 20 on an idle box
    hidden: Sequence[Path] = ()
    within: Sequence[str] = ()
    host: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | ForkedProcess | None = field(default=None, init=False)
    ready_seconds: float = field(default=0.0, init=False)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # Life

    def start(self) -> None:
        """Returns at once; `wait_ready` waits."""
        if self.log is None:
            handle, path = tempfile.mkstemp(prefix="vllm-server-", suffix=".log")
            os.close(handle)
            self.log = Path(path)
        self.port = self.port or free_port()
        arguments = ["serve", str(self.model)]
        arguments += ["--host", self.host, "--port", str(self.port), "--served-model-name", MODEL_NAME, "--dtype", self.dtype]
        arguments += [*SMALL, *(["--enforce-eager"] if self.eager else []), *self.args]
        imported_with = EAGER_ENVIRONMENT if self.eager else CPU_ENVIRONMENT
        wanted: dict[str, str | None] = {**os.environ, **imported_with, **self.env}
        environment = {name: value for name, value in wanted.items() if value is not None}
        with self.log.open("wb") as output:
            if ON_CPU and self.eager and self.python == sys.executable and not self.within:
                options: dict[str, Any] = {"imported_with": imported_with, "hidden": self.hidden}
                module = "tests.support.vllm_serve"
                self.process = start(module, environment, output, arguments=arguments, session=True, **options)
                return
            program = str(Path(__file__).with_name("vllm_serve.py"))
            self.process = subprocess.Popen(
                [*self._before(), self.python, program, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _before(self) -> Sequence[str]:
        if not self.hidden:
            return self.within
        return hiding(self.hidden, self.within) if self.within else hiding(self.hidden)

    def wait_ready(self) -> None:
        """Until /health says 200. Raises ServerFailed when the server ends first, or after `timeout` seconds."""
        self.wait_health(200, self.timeout)

    def wait_health(self, status: int, timeout: float) -> None:
        """Until /health answers with this status. Raises ServerFailed."""
        self.wait_answer(lambda answer: answer.status == status, f"say {status}", timeout)

    def wait_answer(self, holds: Callable[[Response], bool], what: str, timeout: float) -> None:
        """Until the answer of /health fulfils a condition, which `what` describes. Raises ServerFailed."""
        began = time.monotonic()
        last = "no answer"
        while time.monotonic() - began < timeout:
            if not self.alive:
                raise ServerFailed(f"the server ended with {self._process().returncode} before it was ready:\n{self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = self.request("GET", "/health", timeout=5)
                if holds(answer):
                    self.ready_seconds = time.monotonic() - began
                    return
                last = f"{answer.status} {answer.body[:200]!r}"
            time.sleep(0.1)
        raise ServerFailed(f"/health did not {what} within {timeout:.0f} s (last: {last}):\n{self.log_tail()}")

    @property
    def alive(self) -> bool:
        return self._process().poll() is None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is left of the group."""
        process = self._process()
        if process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the server at once."""
        self._signal(signal.SIGKILL)
        self._process().wait()

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log, and before them the first exception, which the last ones seldom name."""
        said = self.log_text().splitlines()
        raised = re.compile(r"(?!.* (WARNING|INFO) ).*\b\w+(Error|Exception): ")
        first = next((i for i, line in enumerate(said) if raised.match(line)), len(said))
        return "\n".join(said[max(0, first - 5) : min(first + 1, len(said) - lines)] + said[-lines:])

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log else ""

    # Requests

    def request(self, method: str, path: str, body: Any = None, timeout: float = 300) -> Response:
        """One HTTP request; `body` is sent as JSON. Raises OSError when nobody answers."""
        with self._send(method, path, body, timeout) as (status, headers, answer):
            return Response(status, headers, answer.read())

    def generate(self, prompt: Sequence[int] | str, max_tokens: int = 12, timeout: float = 300, **options: Any) -> Answer:
        """Greedy tokens after a prompt of token ids. Raises ServerFailed for any status but 200."""
        response = self.complete(prompt, max_tokens, timeout, **options)
        if response.status != 200:
            raise ServerFailed(f"expected 200 for a completion, got {response.status}: {response.body[:500]!r}")
        return self.read(response)

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, timeout: float = 300, **options: Any) -> Response:
        """The response to that, of whatever status."""
        return self.request("POST", "/v1/completions", completion(prompt, max_tokens, **options), timeout)

    def read(self, response: Response) -> Answer:
        """The answer in a response of status 200."""
        choice = response.json()["choices"][0]
        logprobs = tuple(choice["logprobs"]["token_logprobs"])
        return Answer(tuple(choice["token_ids"]), logprobs, choice["finish_reason"], response.version)

    def stream(self, prompt: Sequence[int] | str, max_tokens: int = 12, timeout: float = 300, **options: Any) -> Iterator[Token]:
        """The same, token by token as they arrive. Raises ServerFailed for any status but 200."""
        body = completion(prompt, max_tokens, stream=True, **options)
        with self._send("POST", "/v1/completions", body, timeout) as (status, _, answer):
            if status != 200:
                raise ServerFailed(f"expected 200 for a stream, got {status}: {answer.read()[:500]!r}")
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ServerFailed(f"the stream broke: {event['error']}")
                at = time.monotonic()
                for choice in event["choices"]:
                    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    for token_id, logprob in zip(choice.get("token_ids") or [], logprobs, strict=True):
                        yield Token(token_id, logprob, at)

    def child(self, title: str) -> psutil.Process:
        """The last of the server's processes whose title, which vLLM gives it, begins so: `EngineCore`, `Worker`."""
        titles: dict[psutil.Process, str] = {}
        for one in psutil.Process(self._process().pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                titles[one] = " ".join(one.cmdline())
        found = [one for one, name in titles.items() if name.startswith(f"VLLM::{title}")]
        if not found:
            raise ServerFailed(f"expected a process VLLM::{title}, there are {titles}")
        return found[-1]

    # Inside

    def _process(self) -> subprocess.Popen[bytes] | ForkedProcess:
        if self.process is None:
            raise ServerFailed("the server was not started: call start() or use it as a context")
        return self.process

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process().pid, number)

    @contextlib.contextmanager
    def _send(
        self, method: str, path: str, body: Any, timeout: float
    ) -> Iterator[tuple[int, dict[str, str], http.client.HTTPResponse]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            yield answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer
        finally:
            connection.close()


def completion(prompt: Sequence[int] | str, max_tokens: int, **options: Any) -> dict[str, Any]:
    """The body of a greedy completion that answers with exactly `max_tokens` token ids and their logprobs."""
    asked = {"model": MODEL_NAME, "prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": max_tokens}
    return {**asked, "temperature": 0, "logprobs": 1, "ignore_eos": True, "return_token_ids": True, **options}
