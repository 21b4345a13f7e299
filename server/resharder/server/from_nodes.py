"""The start of a daemon in an empty folder, `--from-nodes`: it takes from nodes what they keep of its registry.

Until it has that, it listens and answers every call UNAVAILABLE (REGISTRY_WANTED), at which nodes return their snapshots. It goes
on with what nodes have returned some seconds after the first: a lease, after which a node that is silent is gone.
"""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import structlog
from resharder.server.config import Config, ConfigError, why_not_bound
from resharder.server.rpc.convert import node_id
from resharder.server.rpc.dispatch import Call, Dispatcher
from resharder.server.rpc.methods import OURS, Method
from resharder.server.rpc.server import RpcServer
from resharder.server.security import web
from resharder.server.security.access import Access, Caller, add_port
from resharder.server.security.limits import Limits
from resharder.server.standby.seals import read_key
from resharder.server.state.errors import DaemonError, Unavailable
from resharder.server.store.folder import StoreFolder
from resharder.server.store.returned_snapshots import ReturnedSnapshots, prepare, restore, versions_of
from resharder.server.web.standby import StandbyPage
from resharder.v1 import (
    direct_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    operator_pb2_grpc,
    publisher_pb2_grpc,
    server_pb2_grpc,
)

_LOOK_SECONDS = 0.1
_log = structlog.get_logger("resharder.standby")


class _NoFleets:
    """The fleets of a daemon that has no registry yet, for access checks."""

    def only_model(self) -> str:
        return ""

    def following(self) -> dict[str, str]:
        return {}

    def fleet_of(self, server: str) -> str:
        return ""


class _Waiting:
    """Access to a daemon without a registry: all calls but PutSnapshots and health checks are refused."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.caller, self.check_size, self.judge = access.caller, access.check_size, access.judge
        self.decide, self.open, self.redact, self.ends_daemon = access.decide, access.open, access.redact, access.ends_daemon

    def admit(self, method: Method, context: Any) -> Caller:
        """Identify a caller who may return snapshots. Raises Unavailable (REGISTRY_WANTED), and as `Access.admit` does."""
        if method.service.startswith(OURS) and method.name != "PutSnapshots":
            raise Unavailable("REGISTRY_WANTED", "this daemon waits for nodes to return its registry; try again")
        return self._access.admit(method, context)

    def note(self, path: str, peer: str, error: DaemonError) -> None:
        """Log a refused call."""
        if error.reason != "REGISTRY_WANTED":
            self._access.note(path, peer, error)


class _Service:
    """All services of a daemon without a registry."""

    def __init__(self, returned: ReturnedSnapshots) -> None:
        self._returned = returned

    def PutSnapshots(self, request: node_pb2.PutSnapshotsRequest, call: Call) -> node_pb2.PutSnapshotsResponse:
        """Take what a node returns, and want the blocks that are still missing."""
        node = node_id(request.node)
        new = node not in self._returned.nodes
        wanted = self._returned.put(node, request.snapshots, request.blocks)
        if new and request.snapshots:
            _log.info("registry_returned", node=request.node, models=[each.model for each in request.snapshots])
        return node_pb2.PutSnapshotsResponse(wanted=wanted)

    def __getattr__(self, name: str) -> Callable[[Any, Any], Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda request, call: None  # never called: `_Waiting` refuses it


def registry_key(config: Config) -> bytes | None:
    """Return the key of seals; None without one. Raises ConfigError."""
    try:
        return read_key(config.registry_key) if config.registry_key is not None else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--registry-key: {error}") from error


def restore_from_nodes(config: Config, options: list[tuple[str, Any]], ended: threading.Event) -> str:
    """Restore the folder of a daemon from what nodes return; return what was restored, empty once `ended` is set before.

    Only snapshots that are sealed with `config.registry_key` count, if it is set.

    Raises ConfigError for a folder that is not empty, and for snapshots that are not of one registry, and the errors of a medium.
    """
    try:
        with closing(StoreFolder(config.store, shared=False, take_over=config.take_over)):
            prepare(config.store)
            returned = ReturnedSnapshots(registry_key(config))
            if not _gather(config, options, returned, ended):
                return ""
            snapshots = returned.newest()
            term = restore(config.store, returned)
    except DaemonError as error:
        raise ConfigError(f"--from-nodes: {error}") from error
    nodes, versions = ", ".join(f"nodes/{id}" for id in sorted(returned.nodes)), ", ".join(versions_of(snapshots)) or "none"
    _log.info("registry_restored", registry=term.registry, term=term.number, nodes=nodes, versions=versions)
    return f"of what {nodes} kept; versions: {versions}"


def _gather(config: Config, options: list[tuple[str, Any]], returned: ReturnedSnapshots, ended: threading.Event) -> bool:
    """Take snapshots from nodes. Returns False if `ended` is set before there are any. Raises ConfigError, SnapshotsDiffer."""
    tls = web.tls_context(config.security) if config.security is not None else None
    access = Access(config.security, Limits(config.caller_rate, config.caller_calls), config.max_message_bytes, _NoFleets())
    dispatcher = Dispatcher(
        _Waiting(access), lambda server: "", lambda reason: None, waits=config.threads, transfers=config.transfers
    )
    services: dict[Any, Callable[[Any, Any], None]] = {
        _Service(returned): add
        for add in (
            node_pb2_grpc.add_NodeServiceServicer_to_server,
            publisher_pb2_grpc.add_PublisherServiceServicer_to_server,
            server_pb2_grpc.add_ServerServiceServicer_to_server,
            direct_pb2_grpc.add_DirectServiceServicer_to_server,
            operator_pb2_grpc.add_OperatorServiceServicer_to_server,
        )
    }
    try:
        page = StandbyPage(config.web_listen, tls)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--web-listen: cannot listen on {config.web_listen}: {why_not_bound(config.web_listen) or error}"
        ) from error
    with closing(page):
        try:
            server = RpcServer(dispatcher, services, partial(add_port, listen=config.listen, security=config.security), options)
        except RuntimeError as error:
            raise ConfigError(f"--listen: cannot listen on {config.listen}: {why_not_bound(config.listen) or error}") from error
        server.start()
        server.report(serving=False)
        page.report(f"it waits for nodes to return the registry, at {config.listen}")
        try:
            return _await(returned, config.lease_seconds, ended)
        finally:
            server.stop(grace=1)


def _await(
    returned: ReturnedSnapshots, seconds: float, ended: threading.Event, clock: Callable[[], float] = time.monotonic
) -> bool:
    first = None
    while not ended.wait(_LOOK_SECONDS):
        if returned.conflict is not None:
            raise returned.conflict
        if first is None and returned.newest():
            first = clock()
        if first is not None and clock() - first >= seconds:
            return True
    return False
