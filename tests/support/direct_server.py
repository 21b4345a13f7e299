"""The direct path with real parts: two Megatron ranks, a daemon and one vLLM server of two workers, over gloo, or over NIXL on
emulated hosts.

vLLM's linear layers and experts are plain ones here, so that boxes reach their parameters.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import ServeAhead
from resharder.v1 import resources_pb2

from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.namespaces import Hosts
from tests.support.observing import SERVING, servers, versions, wait_serving, wait_until
from tests.support.ports import free_port
from tests.support.tensor_hashes import Held, hashes, new_socket
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import VllmServer

PLUGINS = Path(__file__).with_name("raw_mode")
PROMPT = [5, 17, 42, 7, 300, 11]
SECONDS = 20.0  # for members to meet, and for a transfer


@dataclass
class System:
    daemon: Daemon
    folder: Path
    server: VllmServer
    settings: dict[str, Any]  # the trainer's
    trainer: TrainerJob
    steps: dict[int, int] = field(default_factory=dict)  # {version: step}
    shares: bool = False  # whether the trainer's ranks share their memory

    def start_trainer(self) -> None:
        self.trainer, self.shares = start_trainer(self.daemon, self.folder, self.settings, len(self.steps)), False

    def share_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranks that share their memory, from now on."""
        if not self.shares:
            self.trainer.kill()
            monkeypatch.setenv("RESHARDER_PEER_MEMORY", "cpu")
            self.start_trainer()
            self.shares = True

    def publish(self, step: int) -> int:
        """A version with weights of its own, served; its number."""
        version = int(self.trainer.ask(do="publish", step=step)["version"])
        self.steps[version] = step
        self.serves(version)
        return version

    def serves(self, version: int) -> None:
        wait_serving(self.daemon, version)
        assert self.server.generate(PROMPT, 12).version == str(version)
        assert self.server.request("GET", "/weight_info").json() == {"weight_version": str(version)}

    def fingerprints(self) -> list[dict[str, int]]:
        """Return the fingerprints of every tensor that each worker reads."""
        results = self.server.request("POST", "/collective_rpc", {"method": "resharder_fingerprint"}).json()["results"]
        assert all(one["ok"] for one in results), results
        return [one["tensors"] for one in results]

    def transfers(self) -> list[dict[str, Any]]:
        """Lines of the daemon's log about them."""
        lines = [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"].startswith("direct_")]

    def failures(self) -> list[str]:
        return [line["reason"] for line in self.transfers() if line["event"] == "direct_failed"]

    def began(self) -> int:
        """The version of the last transfer that began."""
        return max((line["version"] for line in self.transfers() if line["event"] == "direct_turn"), default=0)

    def happened(self, what: str) -> list[str]:
        """Entries of the journal about the server's last events of a kind."""
        with Operator(self.daemon.endpoint) as operator:
            return [event.reason for event in operator.events(last=200, subject="servers/direct") if event.what == what]

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The fleet serves ahead of READY meanwhile, by default."""
        with Operator(self.daemon.endpoint) as operator:
            assert operator.set_fleet("policy", serve_ahead=ServeAhead.AUTO).serve_ahead
            try:
                yield
            finally:
                operator.set_fleet("policy", serve_ahead=False)

    def publish_held(self, step: int, change: bool = False) -> tuple[int, int, Path]:
        """Begins to publish; one rank's delivery waits for a file. The version, the request and the file."""
        go = self.folder / f"go-{step}"
        self.trainer.ask(do="hold", rank=1, until=str(go), change=change)
        version = max(self.steps) + 1
        self.steps[version] = step
        return version, self.trainer.requests.send(do="publish", step=step), go

    def wait_proven(self, version: int) -> resources_pb2.Server:
        """Until it serves a version that is READY, and that it has found to be the store's."""

        def proven() -> bool:
            (server,) = servers(self.daemon)
            return (server.state, server.version, server.ahead) == (SERVING, version, False)

        wait_until(proven, f"version {version} is served, and the store's")
        assert versions(self.daemon)[version] == "READY"
        return servers(self.daemon)[0]

    def sent(self, version: int) -> bool:
        return any(line["event"] == "direct_transfer" and line["version"] == version for line in self.transfers())


def start_trainer(
    daemon: Daemon, folder: Path, settings: dict[str, Any], number: int, *, forked: bool = False, within: Sequence[str] = ()
) -> TrainerJob:
    own = folder / f"trainer-{number}"
    own.mkdir()
    module = "tests.e2e.direct_trainer"
    return TrainerJob(daemon.endpoint, "policy", own, settings, ranks=2, module=module, forked=forked, within=within)


@contextmanager
def running(
    folder: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    *arguments: str,
    plugins: str = "",
    dtype: str = "float32",
    forked: bool = False,
    hosts: Hosts | None = None,
) -> Iterator[System]:
    """Start the system, which serves version 1.

    `config`: content of the served model's config.json. `settings`: those of the trainer. `arguments`: further ones of the
    server, and `plugins` of its process. `forked`: whether the ranks of the first trainer are. `hosts`: two, of which the ranks
    have the first and the daemon the second.
    """
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"web_listen": f"127.0.0.1:{free_port()}"}
    if hosts is not None:
        options = {"insecure": True, "shared_memory": False, "host": hosts.address_of(1), "command": tuple(hosts.command(1))}
    with Daemon(direct_seconds=SECONDS, log_format="json", **options) as daemon:
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "RESHARDER_SERVER_ID": "direct",  # the same after a restart
            "RESHARDER_PEER_MEMORY": "cpu",  # ranks share theirs only if they have the same setting
            "VLLM_PLUGINS": f"resharder,raw_mode,raw_experts{plugins}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGINS), os.environ.get("PYTHONPATH")))),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        within: list[str] = []
        if hosts is not None:
            over = {"RESHARDER_NIXL": "on", "UCX_TLS": "tcp"}  # UCX would find out that the hosts are one
            environment |= over | {"UCX_NET_DEVICES": hosts.bridge, "UCX_TCP_BRIDGE_ENABLE": "y"}
            within = ["env", *(f"{name}={value}" for name, value in over.items()), *hosts.command(0)]
        arguments = ("--load-format", "resharder", "--tensor-parallel-size", "2", *arguments)
        server = VllmServer(folder, arguments, environment, dtype=dtype)
        built = System(daemon, folder, server, settings, start_trainer(daemon, folder, settings, 0, forked=forked, within=within))
        try:
            server.start()
            version = int(built.trainer.ask(do="publish", step=1)["version"])
            built.steps[version] = 1
            server.wait_ready()
            built.serves(version)
            with Operator(daemon.endpoint) as operator:
                operator.set_fleet("policy", serve_ahead=False)  # where a test is about READY versions
            yield built
        finally:
            built.trainer.kill()
            server.stop()


def alone(folder: Path, like: VllmServer, plugins: str = "") -> tuple[Held, tuple[Any, Any]]:
    """Return the hashes, and the answer, of a server like `like` that has loaded a folder and knows nothing of Resharder."""
    arguments = [each for each in like.args if each not in ("--load-format", "resharder")]
    environment: dict[str, str | None] = {
        "RESHARDER_ENDPOINT": None,
        "VLLM_PLUGINS": f"raw_mode,raw_experts{plugins},tensor_hashes",
        "PYTHONPATH": str(PLUGINS),
        "TENSOR_HASHES": new_socket(),
    }
    with VllmServer(folder, arguments, environment, dtype=like.dtype) as server:
        answer = server.generate(PROMPT, 12)
        assert answer.version is None
        return hashes(str(environment["TENSOR_HASHES"]), workers=2), (answer.token_ids, answer.logprobs)
