"""Complete system for the benchmarks of the direct path.

Megatron ranks run on the first GPUs, vLLM servers on the next ones, beside a daemon. `cpu`: everything on a CPU, over gloo, as a
trial.
"""

import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from resharder.client.operator import Operator
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.quantization.scheme import scheme_of

from benchmarks import shapes
from benchmarks.direct_layouts import DENSE, EXPERTS
from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import ServerFailed, VllmServer

ROOT = Path(__file__).parents[1]
PROMPT = [5, 17, 42, 7, 300, 11]
KV_CACHE = 1 << 30  # bytes
PATIENCE = 400.0  # seconds
SHARED = ("--gpu-memory-utilization", "0.5")  # requested at start, because other processes may use the GPU too
# As in production, except for torch.compile, which takes minutes.
GRAPHS = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 512]}')
LOGGED = {  # events of a version in the daemon's log
    "created": r"^version_created .*/versions/{}\b",
    "READY": r"^version_ready .*/versions/{} ",
    "staging": r"^server_staging .* staging version {},",
    "paused": r"^server_applying .* applying version {},",
    "served": r"^server_serving .* serving version {}\b",
}


class Job(NamedTuple):
    name: str
    config: dict[str, Any]
    kind: str  # of the trainer's parallelism
    quantization: dict[str, Any] | None = None  # format to which ranks cast

    def in_fp8(self) -> "Job":
        """Return the same shape, cast to FP8 blocks by the ranks."""
        return self._replace(name=f"{self.name} FP8", quantization=FP8)

    @property
    def served_config(self) -> dict[str, Any]:
        """Content of the served model's config.json."""
        if self.quantization is None:
            return self.config
        quantization = scheme_of(self.quantization).config(expected_shapes(self.config))
        return self.config | {"quantization_config": quantization}


FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


GPU_JOBS = (Job("Qwen3-8B", shapes.QWEN3_8B, "tp"), Job("Qwen3-30B-A3B", shapes.QWEN3_30B_A3B, "ep"))
CPU_JOBS = (Job("tiny dense", DENSE, "tp"), Job("tiny experts", EXPERTS, "ep"))


class Client:
    """Client of one endless answer, with the longest wait for a token since it was last queried."""

    def __init__(self, server: VllmServer) -> None:
        self._server, self._times, self._ended = server, [time.monotonic()], False
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ended:
            try:
                for token in self._server.stream(PROMPT, 400):
                    self._times.append(token.at)
                    if self._ended:
                        return
            except (ServerFailed, OSError):
                time.sleep(0.05)

    def longest(self) -> tuple[float, float]:
        """Return the longest wait in seconds, and its end in seconds since 1970; then start over."""
        times = self.times()
        del self._times[: len(times) - 1]
        return max(((b - a, b) for a, b in pairwise(times)), default=(0.0, times[-1]))

    def times(self) -> list[float]:
        """Return the times of tokens, in seconds since 1970."""
        to_wall = time.time() - time.monotonic()
        return [at + to_wall for at in self._times]

    def end(self) -> None:
        self._ended = True
        self._thread.join(30)


def devices(need: int, cpu: bool, gpus: str = "") -> list[str]:
    """Return the GPUs to use, `gpus` or all; on a CPU, only names. Raises RuntimeError if there are too few."""
    named = gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    if cpu:
        return [str(i) for i in range(need)]
    import torch

    found = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if len(found) < need:
        raise RuntimeError(f"expected {need} GPUs, got {len(found)}")
    return found


class System:
    """System of `ranks` for each of the trainer's `replicas`, and `count` servers of `workers` GPUs each; a context manager."""

    def __init__(
        self,
        job: Job,
        ranks: int,
        workers: int,
        count: int = 1,
        cpu: bool = False,
        more: tuple[str, ...] = (),
        eager: bool = True,
        gpus: str = "",
        replicas: int = 1,
        **options: Any,
    ) -> None:
        """Configure the system; entering the context starts it.

        `more`: further arguments of servers. `eager`: without CUDA graphs, as on a CPU. `gpus`: those of ranks, then of servers,
        for example `0,1,1` if two servers share one. `options`: those of the daemon.
        """
        self.job, self.ranks, self.replicas, self._began, self._step, self._jobs = job, ranks, replicas, time.monotonic(), 0, 0
        eager, ranks = eager or cpu, ranks * replicas
        own = devices(ranks + workers * count, cpu, gpus)
        self.gpus = [own[ranks + workers * i : ranks + workers * (i + 1)] for i in range(count)]
        self._trains_on = own[:ranks]
        self.folder = Path(tempfile.mkdtemp())
        save_tokenizer(self.folder, job.config["vocab_size"])
        (self.folder / "config.json").write_text(json.dumps(job.served_config))
        self.daemon = Daemon(keep_count=1, log_format="json", **options)
        arguments = ["--load-format", "resharder", "--tensor-parallel-size", str(workers)]
        arguments += ["--kv-cache-memory-bytes", str(64 << 20 if cpu else KV_CACHE), *more, *(() if cpu else SHARED)]
        arguments += [] if eager else GRAPHS
        self.servers = [
            VllmServer(self.folder, arguments, self._environment(i, cpu), dtype="bfloat16", eager=eager, timeout=PATIENCE)
            for i in range(count)
        ]
        self.began, self.published_seconds = 0.0, 0.0  # of the last publish: begin, in seconds since 1970, and duration
        self.checked = 0  # direct transfers that a benchmark has counted
        self.trainer: TrainerJob

    def _environment(self, i: int, cpu: bool) -> dict[str, str | None]:
        raw: dict[str, str | None] = (
            {"PYTHONPATH": f"{ROOT}/tests/support/raw_mode:{os.environ.get('PYTHONPATH', '')}"} if cpu else {}
        )
        return raw | {
            "RESHARDER_ENDPOINT": self.daemon.endpoint,
            "RESHARDER_SERVER_ID": f"server-{i}",  # the same after a restart
            "VLLM_PLUGINS": "resharder,raw_mode,raw_experts,reference_fp8" if cpu else "resharder",
            "VLLM_SERVER_DEV_MODE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus[i]),
        }

    def say(self, what: str) -> None:
        print(f"{self.job.name}: {time.monotonic() - self._began:.0f} s: {what}", flush=True)

    def __enter__(self) -> "System":
        self.daemon.start()
        try:
            self.start_trainer()
            for server in self.servers:
                server.start()
            version = self.publish(direct=False)
            for server in self.servers:
                server.wait_ready()
            if self.servers:
                wait_serving(self.daemon, version, PATIENCE)
            else:
                self.wait_ready(version)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        if self.servers:
            self.say(f"served; the servers needed {', '.join(f'{server.ready_seconds:.0f} s' for server in self.servers)}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            for server in self.servers:
                print(server.log_tail(120), flush=True)
            lines = [line for line in self.daemon.log.read_text().splitlines() if "direct_" in line]
            print(self.trainer_log()[-3000:], *lines[-30:], sep="\n", flush=True)
        if hasattr(self, "trainer"):
            self.trainer.kill()
        for server in self.servers:
            if server.process is not None:
                server.stop()
        self.daemon.close()

    def start_trainer(self) -> None:
        self._jobs += 1
        own = self.folder / f"trainer-{self._jobs}"
        own.mkdir()
        options = {"direct_wait": 120.0, "quantization_config": self.job.quantization}
        settings = {"config": self.job.config, self.job.kind: self.ranks, "connect": options}
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._trains_on)
        try:
            self.trainer = TrainerJob(
                self.daemon.endpoint,
                "policy",
                own,
                settings,
                ranks=self.ranks * self.replicas,
                module="benchmarks.direct_trainer",
            )
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before

    def trainer_log(self) -> str:
        """Return the newest trainer's output."""
        found = sorted(self.folder.glob("trainer-*/trainer.log"))
        return found[-1].read_text(errors="replace") if found else ""

    def publish(self, seed: int | None = None, direct: bool = True) -> int:
        """Publish weights made from `seed`, by default the step, and return the version's number."""
        answer = self.trainer.ask(timeout=PATIENCE, **self._request(seed, direct))
        self.began, self.published_seconds = float(answer["began"]), float(answer["publish_s"])
        self.say(f"version {answer['version']} published in {self.published_seconds:.2f} s")
        return int(answer["version"])

    def wait_ready(self, version: int) -> None:
        """Wait until a version is READY."""
        with Operator(self.daemon.endpoint) as operator:
            wait_until(lambda: operator.version(version, model="policy").state.name == "READY", "it is READY", PATIENCE)

    def happened(self, version: int) -> dict[str, float]:
        """Return the seconds from the begin of the last publish to each event in the daemon's log.

        Of an event of several servers, the last one counts.

        Waits until the version is served and the store's copy is verified to be the same.
        """
        wait_serving(self.daemon, version, PATIENCE)
        wait_until(lambda: all(server.version == version and not server.ahead for server in servers(self.daemon)), "it is proven")
        times: dict[str, float] = {}

        def all_logged() -> bool:
            for line in self.events():
                entry = f"{line['event']} {line.get('subject')} {line.get('version')} {line.get('reason')}"
                for what, pattern in LOGGED.items():
                    if re.search(pattern.format(version), entry):
                        times[what] = datetime.fromisoformat(line["timestamp"]).timestamp() - self.began
            return times.keys() == LOGGED.keys()

        wait_until(all_logged, f"the daemon's log has {', '.join(LOGGED)} of version {version}", 20)
        return times

    def serve_ahead(self, ahead: bool) -> None:
        """Set whether servers install versions before READY."""
        with Operator(self.daemon.endpoint) as operator:
            operator.set_fleet("policy", serve_ahead=ahead)

    def begin_publish(self, seed: int | None = None) -> int:
        """Request a publish, and return the request's number, for which `trainer.requests.reply` waits."""
        return self.trainer.requests.send(**self._request(seed, True))

    def _request(self, seed: int | None, direct: bool) -> dict[str, Any]:
        self._step += 1
        return {"do": "publish", "step": self._step, "seed": self._step if seed is None else seed, "direct": direct}

    @property
    def newest(self) -> int:
        return max(server.version for server in servers(self.daemon))

    def fingerprints(self) -> list[dict[str, int]]:
        """Return the fingerprints of all tensors that each worker reads when it runs."""
        found = []
        for server in self.servers:
            results = server.request("POST", "/collective_rpc", {"method": "resharder_fingerprint"}).json()["results"]
            if not all(one["ok"] for one in results):
                raise AssertionError(results)
            found += [one["tensors"] for one in results]
        return found

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events of these names, by default all, in the daemon's log."""
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if not names or line["event"] in names]

    def sent(self, version: int) -> bool:
        """Return whether a version was sent over the direct path."""
        return any(line["version"] == version for line in self.events("direct_transfer"))

    def kill_engine(self, i: int) -> None:
        """Send SIGKILL to all processes of a server except the one that answers requests."""
        process = self.servers[i].process
        assert process is not None
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=60)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process within the context, and continue it at the end in any case."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).resume()
