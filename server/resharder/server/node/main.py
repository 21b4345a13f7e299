"""`resharder-node`, the command of a node: it holds versions in the shared memory of a host on which no daemon runs.

    resharder-node --endpoint daemon:7677 --listen 0.0.0.0:7679 --insecure

Workers of vLLM servers on its host map its files as they map the daemon's store on the daemon's host. It fetches pieces of
versions from the daemon's data port and from other nodes, and passes them on.
"""

import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC's core logs lines of its own; grpc reads it on import

# isort: split
import structlog
import typer
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from resharder.converters.printable import printable_output
from resharder.converters.wire.endpoint import addresses_of, check_endpoint, route_options
from resharder.server.config import ConfigError, problem_of, why_not_bound
from resharder.server.data.connection import DER, DataReads
from resharder.server.data.port import open_port
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.deltas import Deltas
from resharder.server.holding.memory import EngineFailed
from resharder.server.holding.piece_fetcher import PieceFetcher
from resharder.server.holding.piece_requests import LIMITS, UPLOADS
from resharder.server.holding.tls import NodeTls, certificate_id
from resharder.server.holding.transfers import HttpTransfer, PieceTransfer, ReceivedBytes
from resharder.server.infra.addresses import TcpAddress, is_loopback, parse_listen, reachable_at
from resharder.server.infra.descriptors import raise_descriptor_limit
from resharder.server.infra.end_signals import ignore_end_signals, set_at_end_signals
from resharder.server.infra.medium import medium_error
from resharder.server.infra.process_memory import raise_malloc_thresholds
from resharder.server.logs import configure_logs
from resharder.server.node.agent import NodeAgent, NodeIdentity
from resharder.server.node.box_gathering import BoxGatherer
from resharder.server.node.copies import NodeCopies
from resharder.server.node.daemon_client import CheckedPieces, DaemonClient
from resharder.server.node.engine_transfer import EngineTransfer
from resharder.server.node.file_sets import FileSets
from resharder.server.node.nixl import NixlEngine
from resharder.server.options import OptionalPath, flags_of, version_option
from resharder.server.security import identities, web
from resharder.server.security.files import SecurityFilesError
from resharder.server.security.settings import Security
from resharder.server.state.errors import DaemonError, PermissionDenied
from resharder.server.store.folder import StoreFolder
from resharder.server.web.server import RELEASE

_SHARE = 0.8
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_log = structlog.get_logger("resharder.node")


class NodeConfig(BaseSettings):
    """Options of a node: flags, then the environment (RESHARDER_NODE_*), then the defaults here."""

    model_config = SettingsConfigDict(env_prefix="RESHARDER_NODE_", extra="forbid")

    endpoint: str = Field(
        "127.0.0.1:7677",
        description="host:port of the daemon, or those of a daemon and its [standbys](standby.md), with commas",
    )
    name: str = Field(
        default_factory=socket.gethostname,
        pattern=_NAME,
        description="id of this node; by default the host's name",
        json_schema_extra={"default": "the host's name"},
    )
    listen: TcpAddress = Field(
        "127.0.0.1:7679",
        description="host:port at which other nodes and the daemon fetch pieces. If the daemon is on another host, a loopback "
        "address is refused. If the default port is taken, as by a daemon, it is a free one",
    )
    address: TcpAddress = Field(
        "",
        description="host:port at which they reach it, if it is not the one of `listen`",
        json_schema_extra={"default": "this host's address on the route to the daemon"},
    )
    folder: Path = Field(
        Path(f"/dev/shm/resharder-node-{os.getuid()}"),
        description="folder in shared memory",
        json_schema_extra={"default": "`/dev/shm/resharder-node-UID`"},
    )
    limit_bytes: int | None = Field(
        None,
        ge=0,
        description="bound on the bytes of versions. With 0 the node holds none, and workers on its host read from the daemon",
        json_schema_extra={"default": "80 % of the space that is free at the start"},
    )
    tls_ca: OptionalPath = Field(
        None,
        description="PEM file with the authority of the daemon's and of other nodes' certificates. Read again when it changes",
    )
    tls_cert: OptionalPath = Field(
        None, description="PEM file with this node's certificate, with which it calls and answers. Read again when it changes"
    )
    tls_key: OptionalPath = Field(None, description="PEM file with its key. Read again when it changes")
    tls_name: str = Field("", description="name in the daemon's certificate, if not the endpoint's host")
    tls_peer_name: str = Field("", description="name in other nodes' certificates, if not their address")
    token_file: OptionalPath = Field(None, description="file with the token of calls of the daemon. Read again for each call")
    insecure: bool = Field(False, description="listen beyond the loopback interface without certificates")
    drain_seconds: float = Field(
        60.0,
        ge=0,
        description="time after SIGTERM for the daemon to copy [what this node alone holds](#stop-a-node). A second SIGTERM "
        "ends it",
    )
    transfer: Literal["http", "nixl"] = Field(
        "http", description="`http`, or `nixl`: [a transfer engine](#transfer-engines) between nodes that both have it"
    )
    log_format: Literal["console", "json"] = Field("console", description="`console` or `json`, on standard error")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="`debug`, `info`, `warning` or `error`")

    @field_validator("endpoint")
    @classmethod
    def _checked(cls, endpoint: str) -> str:
        return check_endpoint(endpoint)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        route_options(endpoint=self.endpoint)
        given = [self.tls_ca, self.tls_cert, self.tls_key]
        if any(given) and not self.tls_name and len(addresses_of(self.endpoint)) > 1:
            raise ValueError(
                f"{self.endpoint} has several addresses, and which name is in their certificates? Set tls_name to a name that "
                "all of them have"
            )
        if any(given) and not all(given):
            raise ValueError("tls_ca, tls_cert and tls_key are needed together: set all three")
        if self.token_file is not None and not any(given):
            raise ValueError(
                "token_file needs tls_ca, tls_cert and tls_key: a token is sent over TLS alone, and other nodes admit this "
                "one by its certificate"
            )
        if not any(given) and not self.insecure and not is_loopback(self.listen):
            raise ValueError(
                f"expected a loopback address without certificates, got {self.listen}: every client could read every version. "
                "Set tls_ca, tls_cert and tls_key, or insecure to trust that network"
            )
        if self.transfer != "http" and (any(given) or not self.insecure):
            raise ValueError(
                f"transfer {self.transfer} needs insecure, and no certificates: it listens on every interface, encrypts "
                f"nothing, and lets every client read and write versions in this node's memory"
            )
        return self

    @property
    def tls(self) -> NodeTls | None:
        """Certificates; None without."""
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            return None
        return NodeTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name, self.tls_peer_name, self.token_file)


class Node:
    """All parts of a node, from `start` to `stop`.

    The constructor locks the folder and binds the port. It raises ConfigError, DaemonError, SecurityFilesError or OSError.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config, tls = config, config.tls
        if tls is not None:
            try:
                tls.headers()
            except OSError as error:
                raise ConfigError(f"--token-file: {error}") from error
        self.folder = StoreFolder(config.folder, shared=True)
        self.engine = _engine(config)
        limit = _free_share(config.folder) if config.limit_bytes is None else config.limit_bytes
        self.copies = NodeCopies(config.folder, limit, self.engine)
        self.daemon, instance = DaemonClient(config.endpoint, tls), secrets.token_hex(8)
        checksums, received = CheckedPieces(self.daemon), ReceivedBytes()
        gatherer = BoxGatherer(tls, received)
        self.sets = FileSets(config.folder, self.copies, self.daemon, config.name, instance, gatherer)
        self._sent, self._sent_lock = 0, threading.Lock()
        local = tls is None and is_loopback(config.listen)
        reads = DataReads(
            ServedFiles(self.copies, self.sets),
            self._check,
            local_only=local,
            checksums=checksums.known,
            sent=self._count_sent,
            places=threading.Semaphore(UPLOADS),
            engine=self.engine.keys if self.engine is not None else None,
        )
        try:
            context = web.tls_context(_security(tls), required=True) if tls is not None else None
            self.port = open_port(config.listen, reads, context, given="listen" in config.model_fields_set)
        except OSError as error:
            raise ConfigError(
                f"--listen: cannot listen on {config.listen}: {why_not_bound(config.listen) or error.strerror}"
            ) from error
        self.address = _address(config, self.port.port)
        deltas = Deltas(self.copies.all)
        transfer: PieceTransfer = HttpTransfer(checksums.of, tls, LIMITS.stalled, deltas=deltas)
        session = ""
        if self.engine is not None:
            session = self.engine.at(self.address)
            transfer = EngineTransfer(self.engine, checksums.of, transfer, received)
        self.agent = NodeAgent(
            NodeIdentity(
                config.name,
                self.address,
                self.folder.nonce_file,
                self.folder.nonce,
                session,
            ),
            self.daemon,
            self.copies,
            lambda changed: PieceFetcher(transfer, received, changed, deltas=deltas),
            received,
            lambda: (self._sent, self.port.transfers),
            self.sets,
            instance,
        )

    def start(self) -> None:
        """Begin to report to the daemon."""
        self.agent.start()
        _log.info(
            "listening", node=self.config.name, data=self.address, folder=str(self.config.folder), limit=self.copies.limit_bytes
        )

    def stop(self) -> None:
        """Leave the daemon, end all transfers, and remove the versions that no worker has mapped."""
        if self.engine is not None:
            self.engine.close()
        self.agent.close()
        self.port.close()
        self.daemon.close()
        for version in self.copies.all():
            with suppress(OSError):  # the folder may be gone
                self.copies.drop(version.name)
        self.folder.close()

    def _count_sent(self, size: int) -> None:
        with self._sent_lock:
            self._sent += size

    @contextmanager
    def _check(self, headers: Sequence[str], certificate: Mapping[str, Any] | None, host: str, model: str) -> Iterator[bool]:
        """Admit a reader: any without certificates, else nodes that the daemon lets read the model."""
        if self.config.tls is not None:
            names = identities.of_ssl(certificate)
            if certificate and DER in certificate:
                names = (*names, certificate_id(certificate[DER]))
            if self.agent.readers(model).isdisjoint(names):
                raise PermissionDenied(
                    "NOT_ALLOWED",
                    f"{', '.join(names)} may not read model {model}: the daemon allows no such node. Give it the role node:FLEET",
                )
        yield True


class ServedFiles:
    """Versions that a node's data port serves: the ones that it holds, and to the daemon verified files of UPLOADING ones."""

    def __init__(self, copies: NodeCopies, sets: FileSets) -> None:
        self._copies, self._sets = copies, sets

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        """Retain a version meanwhile. Raises ResourceNotFound (VERSION_UNKNOWN)."""
        held = self._copies.get(f"models/{model}/versions/{number}") is not None
        with (self._copies if held else self._sets).pinned(model, number) as served:
            yield served


def _security(tls: NodeTls) -> Security:
    return Security(certificate=tls.certificate, key=tls.key, client_ca=tls.ca, tokens=None, roles={})


def _free_share(folder: Path) -> int:
    found = os.statvfs(folder)
    return int(_SHARE * found.f_bavail * found.f_frsize)


def _engine(config: NodeConfig) -> NixlEngine | None:
    """Return the transfer engine; None for HTTP alone. Raises ConfigError."""
    try:
        return NixlEngine() if config.transfer == "nixl" else None
    except EngineFailed as error:
        raise ConfigError(f"--transfer {config.transfer}: {error}") from error


def _address(config: NodeConfig, port: int) -> str:
    """Return host:port at which other hosts reach a port; for every address, this host's one on the route to the daemon.

    Raises ConfigError if the daemon is on another host and the address is a loopback one: pieces that this node holds, and what
    ranks write here, would be out of reach.
    """
    found = config.address or reachable_at(config.listen, port)
    if found.startswith(":"):
        here = _route(config.endpoint)
        return f"[{here}]{found}" if ":" in here else f"{here}{found}"
    if is_loopback(found) and not is_loopback(f"{_route(config.endpoint)}:0"):
        raise ConfigError(
            f"--listen: other hosts cannot reach {found}, and the daemon at {config.endpoint} is on another host: set it to "
            f"0.0.0.0:{port}, with certificates or with --insecure"
        )
    return found


def _route(endpoint: str) -> str:
    """Return this host's address on the route to an endpoint. Raises ConfigError if there is none."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*parse_listen(addresses_of(endpoint)[0]), type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as trial:  # sends nothing
            trial.connect(target)
            return str(trial.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--endpoint: no route to {endpoint}: {error.strerror or error}") from error


def load(flags: dict[str, Any]) -> NodeConfig:
    """Load the options. Raises ConfigError."""
    try:
        return NodeConfig(**flags)
    except ValidationError as error:
        raise ConfigError(problem_of(error, NodeConfig)) from None


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
@flags_of(NodeConfig)
def run(
    version: Annotated[bool, version_option(f"resharder-node {RELEASE}")] = False,
    **given: Any,
) -> None:
    """Hold versions in this host's shared memory for the vLLM servers on it. Every option is also RESHARDER_NODE_NAME."""
    try:
        serve(load(given))
    except ConfigError as error:
        print(f"resharder-node: {error}", file=sys.stderr)
        sys.exit(2)


def serve(config: NodeConfig) -> None:
    """Run a node until SIGTERM or SIGINT; a second one ends the wait for copies of what this node alone holds.

    Raises ConfigError if it cannot start with these options.
    """
    raise_malloc_thresholds()
    configure_logs(config.log_format, config.log_level)
    log_descriptor_limit = raise_descriptor_limit()
    ended, forced = threading.Event(), threading.Event()
    set_at_end_signals(ended, forced)
    try:
        node = Node(config)
    except DaemonError as error:
        sys.exit(f"resharder-node: --folder: {error}")
    except SecurityFilesError as error:
        raise ConfigError(f"--tls-cert: {error}") from error
    except OSError as error:
        sys.exit(f"resharder-node: --folder: {medium_error(error)}")
    node.start()
    log_descriptor_limit()  # not in front of the line of an option with which it cannot start
    while not ended.is_set() and not node.agent.wait(0.5):
        if problem := node.folder.problem():
            node.stop()
            sys.exit(f"resharder-node: --folder: {problem}")
    if node.agent.failure is None:
        node.agent.drain(config.drain_seconds, forced)
    node.stop()
    ignore_end_signals()
    if node.agent.failure is not None:
        sys.exit(f"resharder-node: {node.agent.failure}")


def main() -> None:
    """Run the command line."""
    with printable_output("resharder-node"):
        app()


if __name__ == "__main__":
    main()
