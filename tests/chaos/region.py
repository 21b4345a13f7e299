"""A region of a run: a daemon that follows the bucket of home's archive, a simulated server that it moves, and what sees them.

The bucket is in this process, and fails as a storm wants. The region has certificates of its own, or none: these are not home's.
"""

import random
from contextlib import ExitStack, suppress

import grpc
import numpy as np
import torch
from resharder.client.errors import ResharderError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Version
from resharder.converters.errors import LayoutError

from tests.chaos.history import History
from tests.chaos.periodic import Periodic
from tests.support.bucket import Fault, serving
from tests.support.daemon import Daemon
from tests.support.publishing import read_folder
from tests.support.simulated_server import SimulatedServer
from tests.support.weights import random_weights

FLEET = "policy"
SERVER = "there"
_POLL = 1.0
_FAILS = 0.4  # share of the bucket's requests, while it fails
_ARCHIVE = {"archive_every": 1, "archive_full_every": 3, "archive_keep": 6}
_BITS = {2: (torch.bfloat16, np.uint16), 4: (torch.float32, np.uint32)}


class Region:
    """The bucket, and the daemon that follows it, which does not run yet.

    Args:
        lease: Seconds of the daemon's leases.
        keep: READY versions that it keeps.
        config: The model's.
    """

    def __init__(self, lease: float, keep: int, config: dict[str, object]) -> None:
        self._stack, self.config, self._chance = ExitStack(), config, random.Random()
        self.bucket = self._stack.enter_context(serving())
        self.daemon = Daemon(follow=self.bucket.url, lease_seconds=lease, keep_count=keep, log_format="json")
        self.daemon.environment |= self.bucket.environment
        self.operator = Operator(self.daemon.endpoint, connect_timeout=1.0, timeout=5.0)

    def archives(self, home: Daemon) -> None:
        """Let a daemon archive every version in the bucket."""
        home.options |= {"archive_url": self.bucket.url, **_ARCHIVE}
        home.environment |= self.bucket.environment

    def fail(self, kind: Fault) -> None:
        """Let some of the bucket's requests fail from now on."""
        self.bucket.before = lambda method, path: kind if self._chance.random() < _FAILS else None

    def heal(self) -> None:
        """Let the bucket answer."""
        self.bucket.before = lambda method, path: None

    def newest(self) -> int:
        """Return the newest READY version; 0 without one."""
        return max((v.number for v in self.operator.versions(FLEET) if v.state == Version.State.READY), default=0)

    def served(self) -> int:
        """Return the version that the server has; 0 without one."""
        return next((server.version for server in self.operator.servers(FLEET)), 0)

    def close(self) -> None:
        """End the daemon and the bucket."""
        self.operator.close()
        self.daemon.close()
        self._stack.close()


class RegionObserver(Periodic):
    """Thread that records each READY version of the region, whether its weights are those of its step, and what is served."""

    def __init__(self, region: Region, history: History) -> None:
        super().__init__(_POLL)
        self._region, self._history = region, history
        self._seen: dict[int, tuple[object, ...]] = {}
        self._served = 0
        self._server: SimulatedServer | None = None

    def act(self) -> None:
        """Look once."""
        with suppress(ResharderError, grpc.RpcError):
            for version in self._region.operator.versions(FLEET):
                if version.state == Version.State.READY:
                    self._look(version)
            if self._server is None and self._seen:
                self._server = SimulatedServer(self._region.daemon, SERVER)
            if (served := self._region.served()) and served != self._served:
                self._served = served
                self._history.record("region", what="served", number=served)

    def _look(self, version: Version) -> None:
        seen = version.step, version.epoch, version.fingerprint
        if self._seen.get(version.number) != seen:
            try:
                same = has_weights(version.folder, self._region.config, version.step)
            except (OSError, LayoutError, ValueError):  # retired meanwhile
                return
            self._seen[version.number] = seen
            names = {"step": version.step, "epoch": version.epoch, "fingerprint": version.fingerprint}
            self._history.record("region", what="ready", number=version.number, **names, same=same)

    def close(self) -> None:
        """Stop, and end the server."""
        super().close()
        if self._server is not None:
            self._server.__exit__(None, None, None)


def has_weights(folder: str, config: dict[str, object], step: int) -> bool:
    """Return whether the tensors of a folder are, bit for bit, those of a step."""
    found = read_folder(folder)
    for name, tensor in random_weights(config, step).items():
        if name not in found:
            return False
        dtype, bits = _BITS[found[name].dtype.itemsize]
        if tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes() != found[name].view(bits).tobytes():
            return False
    return bool(found)
