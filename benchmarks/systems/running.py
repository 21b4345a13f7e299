"""A system that runs for `benchmarks.compare`: its trainer process, its vLLM server, and the points of each version."""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks.systems.base import Points, Setup, Site, System
from demo.jobs import Requests
from tests.support import tensor_hashes
from tests.support.tensor_hashes import Held
from tests.support.vllm_server import ServerFailed, VllmServer, completion

ROOT = Path(__file__).parents[2]
KV_CACHE = 1 << 30  # bytes
BESIDE = 8 << 30  # bytes of a server's GPU memory beside weights and KV cache
PATIENCE = 240.0  # seconds for a start
VERSION = 90.0  # seconds for a version
AFTER = 1.5  # seconds for which a version is watched after it has settled
SETTLED = 0.5  # seconds after which every answer is the new version's
# As in production, except for torch.compile, which takes minutes.
GRAPHS = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 512]}')


class WrongVersion(RuntimeError):
    """A version that is said to be served, and is not what a fresh engine loads."""


class Wanted(NamedTuple):
    """Fresh engine that has loaded a version's folder: hashes of its tensors, and its answer to `prompt`, one token."""

    hashes: Held
    prompt: list[int]
    token: int


class Seen(NamedTuple):
    """One version: seconds from the call of `publish` to each point; None where the system does not have it.

    `gap`: the longest wait of a stream for its next token around all of it. `step`: the usual one. `way`: that the system names.
    """

    held: float
    transferred: float | None
    verified: float | None
    token: float
    ready: float | None
    gap: float
    step: float
    way: str = ""


def _path(*folders: str) -> str:
    """Return a PYTHONPATH of folders, and of this process's."""
    return os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))


def server_of(setup: Setup, site: Site, socket: str, eager: bool = False) -> VllmServer:
    """Return a server of the model, not started, whose worker tells its hashes at `socket`."""
    environment: dict[str, str | None] = {
        "PYTHONPATH": _path(tensor_hashes.PLUGINS, str(ROOT)),
        "TENSOR_HASHES": socket,
        "VLLM_SERVER_DEV_MODE": "1",
    }
    arguments, plugins = [*site.arguments], (*site.plugins, "tensor_hashes")
    if setup.gpus:
        size = 2 * sum(map(prod, expected_shapes(setup.config).values()))
        arguments += ["--kv-cache-memory-bytes", str(KV_CACHE)]
        arguments += ["--gpu-memory-utilization", f"{min(0.9, (size + KV_CACHE + BESIDE) / _gpu_bytes()):.3f}"]
        arguments += [] if eager else GRAPHS
        environment["CUDA_VISIBLE_DEVICES"] = setup.gpus[-1]
    else:  # linear layers and experts that keep their parameters, as on a GPU
        plugins = (*plugins, "raw_mode", "raw_experts")
    environment |= {"VLLM_PLUGINS": ",".join(plugins), **site.environment}
    return VllmServer(
        site.folder or setup.own, arguments, environment, dtype="bfloat16", eager=eager or not setup.gpus, timeout=PATIENCE
    )


def _gpu_bytes() -> int:
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


class Traffic:
    """A client of an endless answer, and one that asks for a single token at a time, while the context lasts."""

    def __init__(self, server: VllmServer, prompt: list[int]) -> None:
        self._server, self._prompt, self._ended = server, prompt, False
        self.tokens: list[float] = []  # seconds since 1970 at which the stream's tokens arrived
        self.answers: list[tuple[float, int]] = []  # when the answer of one token came, and the token
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._stream, self._ask)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + VERSION
        while len(self.tokens) < 10 or len(self.answers) < 3:
            if time.monotonic() > end:
                raise ServerFailed(f"the server does not answer: {self.failures[-1:]}")
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join(30)

    def wait_answers(self, since: float) -> None:
        """Wait until two answers have come since a time. Raises ServerFailed."""
        end = time.monotonic() + VERSION
        while sum(at > since for at, _ in list(self.answers)) < 2:
            if time.monotonic() > end:
                raise ServerFailed(f"the server does not answer: {self.failures[-1:]}")
            time.sleep(0.01)

    def _stream(self) -> None:
        to_wall = time.time() - time.monotonic()
        while not self._ended:
            try:
                for token in self._server.stream([5, 17, 42, 7, 300, 11], 400):
                    self.tokens.append(token.at + to_wall)
                    if self._ended:
                        return
            except (ServerFailed, OSError, http.client.HTTPException) as error:
                self.failures.append(f"stream: {error}")
                time.sleep(0.02)

    def _ask(self) -> None:
        while not self._ended:
            try:
                answer = self._server.generate(self._prompt, 1)
                self.answers.append((time.time(), answer.token_ids[0]))
            except (ServerFailed, OSError, http.client.HTTPException) as error:
                self.failures.append(f"answer: {error}")
                time.sleep(0.02)


class Running:
    """A system with its trainer and its server; a context manager. `start` begins, `connect` waits until it can take versions."""

    def __init__(self, system: System, setup: Setup) -> None:
        self.system, self.setup, self.name = system, setup, system.name
        self._step = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self._site = self._stack.enter_context(self.system.site(self.setup))
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path(str(ROOT)), **self._site.environment}
        if self.setup.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.system.visible(self.setup)
        command = [
            sys.executable,
            "-m",
            "benchmarks.systems.trainer",
            self.name,
            str(self._folder),
            json.dumps(self.setup._asdict()),
        ]
        with (self._folder / "log").open("wb") as log:
            self._trainer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        self._stack.callback(self._trainer.wait)
        self._stack.callback(self._trainer.kill)
        self._requests = Requests(self._folder, lambda: self._trainer.poll() is None)
        self._socket = tensor_hashes.new_socket()
        self.server = server_of(self.setup, self._site, self._socket)
        self.server.start()
        self._stack.callback(self.server.stop)

    def connect(self, seed: int) -> None:
        """Connect trainer and server. The weights of `seed` are served then, if the system boots its server from the trainer."""
        self._ask(do="fill", seed=seed)
        if not self.system.boots_from_trainer:
            self.server.wait_ready()
        self._ask(do="open", server=f"127.0.0.1:{self.server.port}")
        self.server.wait_ready()

    def version(self, seed: int, wanted: Wanted) -> Seen:
        """Publish the weights of `seed`, and return its points. Raises WrongVersion unless the server holds what is wanted."""
        self._step += 1
        self._ask(do="fill", seed=seed)
        with Traffic(self.server, wanted.prompt) as traffic:
            told = self._ask(VERSION, do="publish", step=self._step)
            began = float(told["began"])
            points: Points = self._ask(VERSION, do="settle")
            known, way = self._site.settle(int(told["version"]))
            settled = time.time()
            points |= known
            time.sleep(AFTER)
            traffic.wait_answers(settled + SETTLED)
            answers = [(at - began, token) for at, token in list(traffic.answers) if at > began]
            tokens = [at for at in list(traffic.tokens) if at > began - 0.2]
        after = [token for at, token in answers if at > settled - began + SETTLED]
        if not after or set(after) != {wanted.token}:
            raise WrongVersion(
                f"expected token {wanted.token} once version {told['version']} had settled, got {sorted(set(after))}"
            )
        if wrong := tensor_hashes.differing(tensor_hashes.hashes(self._socket), wanted.hashes):
            raise WrongVersion(f"{len(wrong)} tensors of version {told['version']} are not those of a fresh engine: {wrong[:3]}")
        waits = [b - a for a, b in pairwise(tokens)]
        return Seen(
            float(told["returned"]) - began,
            *(points[point] - began if point in points else None for point in ("transferred", "verified")),
            next(at for at, token in answers if token == wanted.token),
            points["ready"] - began if "ready" in points else None,
            max(waits),
            median(waits),
            way,
        )

    def log(self) -> str:
        """Return the ends of the trainer's and of the server's output."""
        return f"trainer:\n{(self._folder / 'log').read_text(errors='replace')[-3000:]}\nserver:\n{self.server.log_tail(30)}"

    def _ask(self, timeout: float = PATIENCE, **request: object) -> dict[str, float]:
        return self._requests.ask(timeout, **request)


def fresh(setup: Setup, folder: Path, prompts: list[list[int]]) -> tuple[Held, list[tuple[int, float]]]:
    """Return what an engine of vLLM alone holds once it has loaded a folder; and for each prompt its token, and how far the next
    likely one is behind, as a difference of natural log-probabilities."""
    socket, said = tensor_hashes.new_socket(), list[tuple[int, float]]()
    with server_of(setup, Site(folder=folder), socket, eager=True) as server:
        for prompt in prompts:
            answer = server.request("POST", "/v1/completions", completion(prompt, 1) | {"logprobs": 2})
            if answer.status != 200:
                raise ServerFailed(f"expected 200 for a completion, got {answer.status}: {answer.body[:300]!r}")
            (choice,) = answer.json()["choices"]
            first, second = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
            said.append((choice["token_ids"][0], first - second))
        return tensor_hashes.hashes(socket), said
