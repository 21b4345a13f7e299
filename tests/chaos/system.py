"""The processes of a run: daemon, nodes, trainer job and two servers, each with its keeper, behind a proxy.

`left` has tensor parallelism 2 and maps the daemon's store. `right` has two API servers and is as on another host: it maps the
files of `node`, or, in every other of its lives, fetches over gRPC. The jobs of the trainer are as on the host of `far`, on one
without a node, and on that of the daemon, in turn. `third` holds replicas alone. The folders of all other hosts are empty to each
of them. With security, each has a certificate of its own (`parties`).
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from resharder.client.operator import Operator

from demo.trainer_job import TrainerJob
from tests.chaos.adapter import ADAPTER, AdapterTrainer
from tests.chaos.history import History
from tests.chaos.keeper import Keeper, Supervised
from tests.chaos.kept_node import KeptNode, memory_of, port
from tests.chaos.kept_server import KeptServer
from tests.chaos.parties import Parties
from tests.chaos.proxy import Proxies
from tests.chaos.region import Region
from tests.chaos.schedule import LEASE, NODES, REPLICA_SECONDS, Setting
from tests.support.daemon import Daemon
from tests.support.tiny_hf import save_tokenizer, tiny_config

MARK = "RESHARDER_CHAOS_RUN"
"""Variable in the environment of every process of a run."""
CONFIG = tiny_config("qwen3_tied")
RANKS = 2
KEPT = 4


class KeptDaemon:
    """`resharderd`. `failpoint` is armed in its next process only."""

    def __init__(self, daemon: Daemon, name: str = "daemon") -> None:
        self.name, self.daemon, self.failpoint, self.armed = name, daemon, "", ""

    def start(self) -> dict[str, Any]:
        self.armed, self.failpoint = self.failpoint, ""
        try:
            self.daemon.start(failpoint=self.armed)
        except RuntimeError:
            if not self.armed:
                raise
        return {"failpoint": self.armed}

    def ended(self) -> int | None:
        process = self.daemon.process
        return -1 if process is None else process.poll()

    def end(self) -> None:
        if self.daemon.process is not None:
            self.daemon.kill()


class KeptTrainer:
    """A torchrun job of Megatron ranks; each start has a folder of its own. `new_job` changes the id of the next one.

    With `moves`, the next one is at the next place of `hidden`, which has the folders that are empty there. A place is the name
    of a node, `store` for the daemon's host, or `grpc` for another one, from where ranks send over gRPC.
    """

    name = "trainer"

    def __init__(self, endpoint: str, folder: Path, hidden: dict[str, list[Path]], tls: dict[str, str]) -> None:
        self.endpoint, self.folder, self._hidden, self._tls = endpoint, folder, hidden, tls
        self.starts, self.jobs, self.new_job = 0, 1, False
        self.place, self.moves = next(iter(hidden)), False
        self.job: TrainerJob | None = None

    @property
    def home(self) -> str:
        """Node on its host; empty for none."""
        return self.place if self.place in NODES else ""

    def start(self) -> dict[str, Any]:
        self.starts += 1
        if self.new_job:
            self.jobs, self.new_job = self.jobs + 1, False
        if self.moves:
            places = list(self._hidden)
            self.place, self.moves = places[(places.index(self.place) + 1) % len(places)], False
        own = self.folder / f"trainer-{self.starts}"
        own.mkdir()
        connect: dict[str, Any] = {"job": f"job-{self.jobs}", "connect_timeout": 30.0, "staging_timeout": 60.0}
        connect |= {"direct_wait": 4.0} if self.starts % 3 == 0 else {}  # by default else
        connect |= {"register_timeout": 60.0, "transport": "grpc" if self.place == "grpc" else "auto"}
        connect |= {"tls": self._tls} if self._tls else {}
        settings, job = {"config": CONFIG, "tp": RANKS, "connect": connect}, {"forked": True, "hidden": self._hidden[self.place]}
        self.job = TrainerJob(self.endpoint, "policy", own, settings, RANKS, "tests.chaos.trainer", **job)
        return {"job": connect["job"], "place": self.place}

    def ended(self) -> int | None:
        return self.job.process.poll() if self.job else -1

    def end(self) -> None:
        if self.job is not None:
            left = psutil.Process(self.job.process.pid).children(recursive=True) if self.ended() is None else []
            self.job.kill()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks."""
        if self.job is None or self.job.process.poll() is not None:
            return []
        found = psutil.Process(self.job.process.pid).children(recursive=True)
        return [process for process in found if "tests.support.torchrun" in " ".join(process.cmdline())]


class System:
    """All processes, the proxy between them, and the operator's connection.

    Args:
        folder: For logs and configurations.
        history: Record of the run.
        servers: Names of the servers that take part.
        setting: What the run has besides.
    """

    def __init__(self, folder: Path, history: History, servers: tuple[str, ...], setting: Setting) -> None:
        self.folder, self.history, self.setting = folder, history, setting
        self.parties, nodes = Parties(folder, setting.nodes, setting.security), setting.nodes
        self.proxies, self.web = Proxies(), port()
        ports = {link: port() for link in ("data", *(f"{name}-data" for name in nodes))}
        endpoint = {name: self.proxies.link(name, address).endpoint for name, address in ports.items()}
        options = {"data_listen": ports["data"], "data_address": endpoint["data"], "web_listen": self.web}
        options |= {"replicas": setting.replicas, "replica_seconds": REPLICA_SECONDS}
        self.daemon = self.parties.daemon(lease_seconds=LEASE, keep_count=KEPT, log_format="json", direct_seconds=4.0, **options)
        self.steps: dict[int, int] = {}  # {version: step}; a step is the seed of its weights
        self.undo: list[Callable[[], None]] = []
        self.heals = 0
        self.pages: set[Path] = set()  # version pages of all servers so far
        for link in setting.links:
            if link not in endpoint:
                endpoint[link] = self.proxies.link(link, self.daemon.endpoint).endpoint
        config = folder / "config"
        config.mkdir()
        save_tokenizer(config, CONFIG["vocab_size"])
        (config / "config.json").write_text(json.dumps(CONFIG))
        self.kept_daemon = KeptDaemon(self.daemon)
        self.region = Region(LEASE, KEPT, CONFIG) if setting.region else None
        self.kept_region = None
        if self.region is not None:
            self.region.archives(self.daemon)
            self.kept_region = KeptDaemon(self.region.daemon, "region")
        self.nodes = {
            name: KeptNode(
                name,
                endpoint[name],
                folder,
                listen=ports[f"{name}-data"],
                address=endpoint[f"{name}-data"],
                limit_bytes=memory_of(name, setting.replicas),
                **self.parties.node_options(name),
            )
            for name in nodes
        }
        hosts = {"store": self.daemon.folder} | {name: kept.node.root for name, kept in self.nodes.items()}
        hidden = {host: [other for name, other in hosts.items() if name != host] for host in (*hosts, "grpc")}
        self.trainer = KeptTrainer(
            endpoint["trainer"],
            folder,
            {place: hidden[place] for place in ("far", "grpc", "store") if place in hidden},
            self.parties.files("trainer"),
        )
        tls = self.parties.tls
        self.adapter = AdapterTrainer(endpoint["trainer"], CONFIG, tls("trainer")) if setting.adapters else None
        host = {"left": "store", "right": "node" if "node" in nodes else "grpc"}
        self.servers = {
            name: KeptServer(
                name,
                endpoint[name],
                config,
                folder,
                hidden[host[name]],
                host[name] if host[name] in nodes else "",
                self.parties.environment(name),
                ADAPTER if setting.adapters else "",
                sglang=setting.sglang and name == "left",
            )
            for name in servers
        }
        every: tuple[Supervised, ...] = (
            self.kept_daemon,
            *([self.kept_region] if self.kept_region is not None else []),
            *self.nodes.values(),
            self.trainer,
            *self.servers.values(),
        )
        self.keepers = {kept.name: Keeper(kept, history) for kept in every}
        self.operator = Operator(endpoint["operator"], connect_timeout=10.0, timeout=20.0, tls=tls("operator"))
        self.observer = Operator(self.daemon.endpoint, connect_timeout=1.0, timeout=5.0, tls=tls("observer"))

    def up(self, name: str, timeout: float) -> None:
        """Wait until a process runs, and if it is a server, answers."""
        keeper, server = self.keepers[name], self.servers.get(name)

        def runs() -> bool:
            return keeper.running.is_set() and (server is None or server.answers())

        if not wait_for(lambda: runs() or keeper.given_up, timeout) or keeper.given_up:
            raise TimeoutError(f"expected {name} to run within {timeout:g} s: {keeper.problem}")

    def signal(self, processes: list[psutil.Process], number: signal.Signals) -> int:
        """Send a signal to processes, and return how many of them existed."""
        sent = 0
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                sent += 1
        return sent

    def heal(self) -> None:
        """End faults that last: links, stopped processes, a daemon that is held down or has an armed failpoint."""
        self.heals += 1
        self.proxies.heal()
        for act in list(self.undo):
            act()
        for keeper in self.keepers.values():
            keeper.down_until = 0.0
        for kept_daemon in (self.kept_daemon, self.kept_region):
            if kept_daemon is not None and (kept_daemon.armed or kept_daemon.failpoint):
                kept_daemon.failpoint = ""
                self.history.record("fault", name=f"{kept_daemon.name}.disarm", target=kept_daemon.name, given={})
                self.restart_daemon(kept_daemon)
        for kept in self.nodes.values():
            if kept.impaired:
                self._restart_node(kept)

    def _restart_node(self, kept: KeptNode) -> None:
        """SIGKILL a node, and wait until one without a failpoint, and with its memory, runs."""
        kept.failpoint, kept.small = "", False
        self.history.record("fault", name="node.disarm", target=kept.name, given={})
        self.signal(kept.processes(), signal.SIGKILL)
        keeper = self.keepers[kept.name]
        if not wait_for(lambda: keeper.running.is_set() and not kept.impaired, 60):
            raise TimeoutError(f"expected {kept.name} to run: {keeper.problem}")

    def restart_trainer(self) -> None:
        """SIGKILL the trainer, and wait until it runs as a new job on the same host."""
        keeper, starts = self.keepers["trainer"], self.trainer.starts
        self.trainer.new_job = True
        self.history.record("fault", name="trainer.kill", target="trainer", given={"part": "job", "new_job": True})
        self.trainer.end()
        if not wait_for(lambda: keeper.running.is_set() and self.trainer.starts > starts, 60):
            raise TimeoutError(f"expected the trainer to run: {keeper.problem}")

    def restart_daemon(self, kept: KeptDaemon) -> None:
        """SIGKILL a daemon, and wait until one without a failpoint serves."""
        process, keeper = kept.daemon.process, self.keepers[kept.name]
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        if not wait_for(lambda: keeper.running.is_set() and not kept.armed, 180):
            raise TimeoutError(f"expected the {kept.name} to run: {keeper.problem}")

    def _stop(self, kept: KeptServer) -> None:
        """SIGTERM to a server's main process; a server that had to be killed leaves its page to the next one."""
        process = kept.server.process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                self.pages.clear()
        kept.end()

    def close(self) -> None:
        """End every process; kept logs stay in the run's folder."""
        for keeper in self.keepers.values():
            keeper.close()
        self.pages |= pages_of(self.folder)
        for server in self.servers.values():
            self._stop(server)
            shutil.rmtree(server.staging, ignore_errors=True)
        with suppress(Exception):
            self.trainer.end()
            if self.adapter is not None:
                self.adapter.close()
        for kept in self.nodes.values():
            self.history.record("peace", phase=kept.name, problems=kept.finish())
            kept.node.close()
        self.operator.close()
        self.observer.close()
        self.proxies.close()
        with suppress(OSError):
            shutil.copy(self.daemon.log, self.folder / "daemon.log")
        if self.region is not None:
            with suppress(OSError):
                shutil.copy(self.region.daemon.log, self.folder / "region.log")
            self.region.close()
        self.daemon.close()


def pages_of(folder: Path) -> set[Path]:
    """Return the version pages of the run's live servers."""
    found = set()
    for pid in processes_of(folder):
        with suppress(OSError):
            files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            found |= {Path(file) for file in files if file.startswith("/dev/shm/resharder-page-") and "(deleted)" not in file}
    return found


def processes_of(folder: Path) -> dict[int, str]:
    """Return the processes of a run, by the mark in their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(path.name) != os.getpid() and f"{MARK}={folder}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_for(holds: Callable[[], Any], timeout: float, poll: float = 0.2) -> bool:
    """Return whether a condition held within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(poll)
    return True
