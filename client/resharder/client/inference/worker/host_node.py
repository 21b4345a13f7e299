"""A version in the memory of the node on this host, which a worker maps as it maps the store on the daemon's host.

A worker recognises its node by a nonce in a file that both can read, as it does the daemon. It asks for the version through the
daemon, and then looks at the node's folder while pieces arrive there, so that many waiting workers cost the daemon little.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from resharder.client.errors import ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.transport.shared_memory import read_nonces as _read
from resharder.converters.wire.pieces import Bitmap
from resharder.converters.wire.ranges import HELD_FILE
from resharder.v1 import node_pb2, node_pb2_grpc, resources_pb2

_ASK_SECONDS = 5.0  # between questions to the daemon, apart from the first ones
_LOOK_SECONDS = 0.05  # between looks at the node's folder
_PATIENCE = 15.0  # seconds without a piece until the worker fetches the version itself


class NodeFiles(NamedTuple):
    """Folder of a version's files on the host's node, or the reason for having none; both are empty without nodes."""

    folder: Path | None
    reason: str = ""


class HostNode:
    """The node on this host, if there is one.

    Args:
        channel: Channel to the daemon.
        server: Id of the server.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, channel: Channel, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._server, self._clock = channel, server, clock
        self._paths: tuple[str, ...] = ()

    def files(self, version: str, needed: Bitmap) -> NodeFiles:
        """Return a version's files once the node holds some pieces of it. Others may be holes in the files.

        Args:
            version: Full name of the READY version.
            needed: The pieces.
        """
        try:
            return self._files(version, needed)
        except ResharderError as error:
            return NodeFiles(None, "" if error.reason == "UNIMPLEMENTED" else f"{type(error).__name__}: {error}")

    def _files(self, version: str, needed: Bitmap) -> NodeFiles:
        readable = _read(self._paths)
        answer = self._ask(version, needed, readable)
        if not answer.node:
            self._paths = tuple(answer.nonce_files)
            if not (readable := _read(self._paths)):
                return NodeFiles(None, "no node on this host" if self._paths else "")
            answer = self._ask(version, needed, readable)
        held, since, pause = -1, self._clock(), _LOOK_SECONDS
        while answer.node and not answer.problem:
            if self._appears(answer.folder, needed, pause):
                return NodeFiles(Path(answer.folder))
            if answer.held_bytes != held:
                held, since = answer.held_bytes, self._clock()
            elif self._clock() - since > _PATIENCE:
                missing = f"{answer.folder} cannot be read here" if answer.whole else "no piece arrives"
                return NodeFiles(None, f"{answer.node}: {missing}, for {_PATIENCE:.0f} s")
            pause = min(2 * pause, _ASK_SECONDS)
            answer = self._ask(version, needed, readable)
        return NodeFiles(None, answer.problem or "no node on this host")

    def _appears(self, folder: str, needed: Bitmap, seconds: float) -> bool:
        """Return whether a node's version has all needed pieces, as soon as it has, or after some seconds.

        The folder decides: the node's last report to the daemon may concern an earlier copy.
        """
        until = self._clock() + seconds
        while not (there := bool(folder) and not len(needed - _held(folder, needed.count))) and self._clock() < until:
            time.sleep(_LOOK_SECONDS)
        return there

    def _ask(self, version: str, needed: Bitmap, readable: list[resources_pb2.StoreAccess]) -> node_pb2.HostVersion:
        stub = node_pb2_grpc.NodeServiceStub(self._channel.grpc)
        request = node_pb2.GetHostVersionRequest(
            version=version, server=f"servers/{self._server}", readable=readable, needed=needed.to_bytes()
        )
        answer: node_pb2.HostVersion = self._channel.call(stub.GetHostVersion, request)
        return answer


def _held(folder: str, count: int) -> Bitmap:
    """Return the pieces that a node holds in a version's folder; none if it cannot be read."""
    try:
        with open(os.path.join(folder, HELD_FILE), "rb") as file:
            return Bitmap.from_bytes(count, file.read())
    except (OSError, ValueError):
        return Bitmap(count)
