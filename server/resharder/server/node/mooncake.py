"""The Mooncake Transfer Engine behind `MemoryEngine`: one-sided reads over RDMA or TCP. Needs the extra `mooncake`.

Mooncake listens on every interface, encrypts nothing, and lets every process that reaches it read and write registered memory.
"""

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from resharder.converters.extras import install_line
from resharder.converters.storage.pages import Span
from resharder.server.holding.memory import EngineFailed

PROTOCOLS = ("rdma", "tcp")
_DEVICES = Path("/sys/class/infiniband")
_PROBE_SECONDS = 3.0
_QUICK, _SLOW, _QUICK_POLLS = 0.001, 0.005, 100
# Its C++ reads the environment. Without the first, a read from a peer that does not answer ends after 30 s.
_SETTINGS = {"MC_TCP_STATUS_TIMEOUT_SEC": "5", "MC_HANDSHAKE_CONNECT_TIMEOUT": "3", "MC_LOG_LEVEL": "ERROR"}
_COMPLETE, _FAILED = 1, -1  # of `transfer_check_status`; anything else is in flight


class MooncakeEngine:
    """A Mooncake engine of this process. `session` is `mooncake-PROTOCOL/HOST:PORT`.

    Args:
        host: Address of this host at which other nodes reach it.
        protocol: One of `PROTOCOLS`.

    Raises:
        EngineFailed: The package, a device, or a port is missing.
    """

    def __init__(self, host: str, protocol: str) -> None:
        if protocol == "rdma" and not (_DEVICES.is_dir() and any(_DEVICES.iterdir())):
            raise EngineFailed("this host has no RDMA device in /sys/class/infiniband")  # Mooncake would use TCP
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise EngineFailed(f"Mooncake cannot be imported: {error}; {install_line('mooncake')}") from error
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise EngineFailed(f"Mooncake cannot start over {protocol} at {host}")
        bracketed = f"[{host}]" if ":" in host else host
        self._kind = f"mooncake-{protocol}"
        self.session = f"{self._kind}/{bracketed}:{self._engine.get_rpc_port()}"
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._answered: set[str] = set()
        self._probes: dict[str, Future[int]] = {}

    def register(self, span: Span) -> None:
        """Register memory, which RDMA pins. Raises EngineFailed."""
        if code := self._engine.register_memory(span[0], span[1] - span[0]):
            raise EngineFailed(f"Mooncake does not register {span[1] - span[0]} bytes: error {code}")

    def unregister(self, span: Span) -> None:
        """End the registration of memory."""
        self._engine.unregister_memory(span[0])

    def read(self, session: str, address: int, target: Span) -> None:
        """Read a peer's memory. Raises EngineFailed, also for a session of another kind."""
        kind, _, peer = session.partition("/")
        if kind != self._kind:
            raise EngineFailed(f"expected a session of {self._kind}, got {session}")
        self._probe(peer)
        batch = self._engine.batch_transfer_async_read(peer, [target[0]], [address], [target[1] - target[0]])
        if batch == 0:
            raise EngineFailed(f"{session}: no connection")
        polls = 0  # Mooncake's own calls that wait for the end keep a core busy meanwhile, and may return before it
        while (status := self._engine.transfer_check_status(batch)) not in (_COMPLETE, _FAILED):
            polls += 1
            if self._ended.wait(_QUICK if polls < _QUICK_POLLS else _SLOW):
                raise EngineFailed("this node ends")
        if status == _FAILED:
            with self._lock:
                self._answered.discard(peer)
            raise EngineFailed(f"{session}: the read failed")

    def _probe(self, peer: str) -> None:
        """Wait for a sign of life before the first read from a peer, and after a failed one. Raises EngineFailed.

        Mooncake waits a minute for a peer that accepts connections and does not answer, and holds up all reads meanwhile.
        """
        with self._lock:
            if peer in self._answered:
                return
            probe = self._probes.get(peer)
            if probe is None:
                probe = self._probes[peer] = Future()
                threading.Thread(target=self._send_probe, args=(peer, probe), name="probe", daemon=True).start()
        try:
            if probe.result(_PROBE_SECONDS):
                raise EngineFailed(f"{peer}: no connection")
        except TimeoutError:
            raise EngineFailed(f"{peer}: no answer within {_PROBE_SECONDS:g} s") from None

    def _send_probe(self, peer: str, probe: "Future[int]") -> None:
        failed = self._engine.send_probe(peer)
        with self._lock:
            del self._probes[peer]
            if not failed:
                self._answered.add(peer)
        probe.set_result(failed)

    def close(self) -> None:
        """End reads in flight with EngineFailed."""
        self._ended.set()
