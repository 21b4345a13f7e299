"""`resharderd`, the daemon's command. By default it listens on the loopback interface and stores versions in shared memory."""

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC's core logs lines of its own; grpc reads it on import

# isort: split
import structlog
import typer
from resharder.converters.failpoints import failpoint
from resharder.converters.printable import printable_output
from resharder.server.archive.archive import Archive
from resharder.server.archive.follower import Follower
from resharder.server.config import Config, ConfigError, check_store, load, why_not_bound
from resharder.server.data.checksums import PieceChecksums
from resharder.server.data.chunk_writes import ChunkWrites
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort, open_port
from resharder.server.data.versions import StoredVersions
from resharder.server.direct.direct import Direct
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.fleets.canary_checks import Checks
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Fleets
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.fleets.worker_requests import Profiles, Verifications
from resharder.server.from_nodes import registry_key, restore_from_nodes
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.piece_requests import LIMITS
from resharder.server.holding.tls import certificate_of
from resharder.server.holding.transfers import HttpTransfer
from resharder.server.infra.addresses import is_loopback, reachable_at
from resharder.server.infra.descriptors import Descriptors, raise_descriptor_limit
from resharder.server.infra.end_signals import ignore_end_signals, set_at_end_signals
from resharder.server.infra.event_log import Events
from resharder.server.infra.medium import medium_error
from resharder.server.infra.process_memory import configure_collections, raise_malloc_thresholds
from resharder.server.ingest.intake import Intake
from resharder.server.logs import configure_logs, log_event
from resharder.server.nodes.borrowing import Borrowing
from resharder.server.nodes.homes import HomeRegister
from resharder.server.nodes.records import DrainedNodes, LostNodes
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.nodes.snapshots import Snapshots
from resharder.server.nodes.store_fetch import StoreFetcher
from resharder.server.observability.tracing.collector import Traced
from resharder.server.observability.tracing.ids import Tracing
from resharder.server.options import flags_of, version_option
from resharder.server.rpc.convert import Views
from resharder.server.rpc.direct_service import DirectService
from resharder.server.rpc.dispatch import Dispatcher
from resharder.server.rpc.node_service import NodeService
from resharder.server.rpc.operator_service import OperatorService
from resharder.server.rpc.publisher_service import PublisherService
from resharder.server.rpc.server import RpcServer
from resharder.server.rpc.server_service import ServerService
from resharder.server.security import web
from resharder.server.security.access import Access, add_port
from resharder.server.security.files import SecurityFilesError
from resharder.server.security.limits import Limits
from resharder.server.security.settings import node_tls
from resharder.server.standby.lease import Lease, LeaseStore
from resharder.server.standby.lease_file import LeaseFile
from resharder.server.standby.tenure import Tenure, begin_term, end_process, raise_term, read_term
from resharder.server.state.errors import DaemonError
from resharder.server.state.server import Settings
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.returned_snapshots import PART, unfinished
from resharder.server.store.store import Store
from resharder.server.web.server import RELEASE, Shown
from resharder.server.web.standby import StandbyPage
from resharder.v1 import (
    direct_pb2_grpc,
    node_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    publisher_pb2_grpc,
    resources_pb2,
    server_pb2_grpc,
)

_log = structlog.get_logger("resharder.main")


class Daemon:
    """All parts of a daemon, from `start` to `stop`.

    The constructor locks and restores the store and binds the ports. It raises DaemonError, SecurityFilesError or OSError, and
    SystemExit if an address cannot be bound.

    `lease` is held, and is released at the end.
    """

    def __init__(self, config: Config, lease: Lease | None = None) -> None:
        self.config, self._lease, key = config, lease, registry_key(config)
        # Before anything else: the daemon that this one takes over from ends once it sees the higher term.
        if lease is not None:
            begin_term(config.store, lease.term)
        elif config.take_over:
            raise_term(config.store)
        self.store = Store(
            config.store,
            limit_bytes=config.store_limit_bytes,
            hold=config.hold == "all",
            keep_count=config.keep_count,
            keep_bytes=config.keep_bytes,
            shared=config.shared_memory,
            take_over=config.take_over or lease is not None,
        )
        self.tenure = Tenure(config.store, begin_term(config.store))
        self.events = Events(config.store)
        self.events.added.connect(log_event)
        self.store.catalogue.version_changed.connect(self._note_version)
        self.checks = Checks(config.checks, config.check_seconds)
        offered = OfferedVersions()
        self.fleets = Fleets(
            self.store.catalogue,
            self.store.lifecycle,
            offers=offered,
            settings=replace(Settings(), lease=config.lease_seconds, forget=config.forget_seconds),
            files=FleetFiles(config.store / "fleets"),
            pause_mode=resources_pb2.PauseMode.Value(config.pause_mode.upper()),
            note=self.events.add,
            checks=self.checks,
        )
        self._versions, self._checksums = StoredVersions(self.store.reader), PieceChecksums()
        self.snapshots = Snapshots(
            config.store,
            self.store.catalogue,
            self.fleets.following,
            self._checksums.get,
            self.tenure.term,
            self.fleets.start_number,
            # Beside this host, which may have a node of its own only if it holds no versions.
            0 if config.replicas == 1 else config.replicas - 1 if self.store.hold else config.replicas,
            config.replica_seconds,
            key,
        )
        tls = node_tls(config.security)
        self.nodes = NodeRegistry(
            self.store.reader.manifest,
            self.store.catalogue.get,
            lease_seconds=config.lease_seconds,
            forget_seconds=config.forget_seconds,
            note=self.events.add,
            drained=DrainedNodes(config.store / "drained_nodes.json"),
            homes=HomeRegister(self.store.folder, LostNodes(config.store / "lost_nodes.json"), self.store.hold),
            verified=self.store.reader.verified,
            lose=self.store.lifecycle.lose,
            replicas=config.replicas,
            replica_seconds=config.replica_seconds,
            hold=self.store.hold,
            snapshots=self.snapshots,
        )
        self.store.catalogue.version_changed.connect(self.nodes.version_changed)
        transfer = HttpTransfer(HeldFiles.checksum, tls, LIMITS.stalled)
        self.borrowing = Borrowing(self.nodes, transfer)
        self.store.reader.borrow = None if self.store.hold else self.borrowing.reading
        self.fetcher = StoreFetcher(
            self.store.lifecycle, self.nodes, transfer, self.store.reader.borrow, self.snapshots.await_keepers
        )
        self.intake = Intake(
            self.store,
            lease_seconds=config.lease_seconds,
            chunk_bytes=config.chunk_bytes,
            threads=config.digest_threads,
            replicate=self.fetcher.hold,
            nodes=self.nodes.homes,
            audience=self.fleets.serving,
            read_only=bool(config.follow),
        )
        self.fleets.serving_changed.connect(self.intake.serving_changed)
        self.tracing = Tracing()
        if self.tracing.on:
            traced = Traced(self.tracing, self.store.catalogue)
            self.intake.version_ended.connect(traced.version_ended)
            self.fleets.server_stepped.connect(traced.server_stepped)
        self.archive = self._archive()
        self.follower = Follower(self.archive, config.store / "followed.json") if self.archive and config.follow else None
        limits = Limits(self.config.caller_rate, self.config.caller_calls)
        self.access = Access(self.config.security, limits, self.config.max_message_bytes, self.fleets)
        self.shown = self._shown()
        self.direct = Direct(
            self.fleets.awaiting,
            self.fleets.processes,
            taking=self.fleets.taking_ahead,
            hosts=self.fleets.hosts_of,
            model_of=self.fleets.model_of,
            offered=offered,
            staging_bytes=config.direct_staging_bytes,
            seconds=config.direct_seconds,
            open_network=config.direct_trusted_fabric or config.security is None,
        )
        self.direct.transferred.connect(self.shown.observed.transferred)
        self.store.catalogue.version_changed.connect(lambda record: self.direct.version_changed(record.model))
        self.data = self._data()
        self.server = self._server()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="leases", daemon=True)

    def _archive(self) -> Archive | None:
        def report(name: str, what: str, reason: str) -> None:
            self.events.add("archive", name, what, reason)

        config = self.config
        if config.follow and config.archive_url:
            raise ConfigError(
                "--follow: a daemon that follows an archive writes none, and archive_url is set too: set one of them"
            )
        if config.follow and config.hold == "none":
            raise ConfigError("--follow: it restores versions on this host, which holds none with hold: none: set it to all")
        try:
            if config.follow:
                return Archive(self.store, config.follow, read_only=True, report=report)
            if not config.archive_url:
                return None
            full_every, keep = config.archive_full_every, config.archive_keep
            return Archive(self.store, config.archive_url, config.archive_every, full_every=full_every, keep=keep, report=report)
        except DaemonError as error:
            raise ConfigError(f"--{'follow' if config.follow else 'archive-url'}: {error}") from error

    def _server(self) -> RpcServer:
        config = self.config
        observed, model_of = self.shown.observed, self.fleets.model_of
        dispatcher = Dispatcher(
            self.access, model_of, observed.refused, terms=self.tenure, waits=config.threads, transfers=config.transfers
        )
        add = partial(add_port, listen=config.listen, security=config.security)
        try:
            return RpcServer(dispatcher, self._services(), add, channel_options(config))
        except RuntimeError as error:
            why = why_not_bound(config.listen) or error
            raise ConfigError(f"--listen: cannot listen on {config.listen}: {why}") from error

    def _services(self) -> dict[Any, Callable[[Any, Any], None]]:
        views = Views(self.intake, self.fleets, self.tracing, self._data_address())
        daemon = operator_pb2.Daemon(
            release=RELEASE,
            store_folder=str(self.config.store),
            store_limit_bytes=self.store.capacity.limit_bytes,
        )
        daemon.start_time.GetCurrentTime()
        operations = Operations(self.fleets, self.config.checks)
        profiles = Profiles(self.fleets)
        verifications = Verifications(self.fleets)
        return {
            PublisherService(self.intake, views, self.direct.withhold): publisher_pb2_grpc.add_PublisherServiceServicer_to_server,
            ServerService(
                self.fleets, self.store, profiles, verifications, self.config.digest_threads, self._data_address()
            ): server_pb2_grpc.add_ServerServiceServicer_to_server,
            NodeService(
                self.nodes,
                self._versions,
                self._checksums,
                partial(certificate_of, node_tls(self.config.security)),
                self.snapshots,
            ): node_pb2_grpc.add_NodeServiceServicer_to_server,
            DirectService(self.direct, self.intake): direct_pb2_grpc.add_DirectServiceServicer_to_server,
            OperatorService(
                views, operations, self.nodes, self.events, self.archive, profiles, verifications, daemon
            ): operator_pb2_grpc.add_OperatorServiceServicer_to_server,
        }

    def _data_address(self) -> str:
        if self.data is None:
            return ""
        return self.config.data_address or reachable_at(self.config.data_port, self.data.port)

    def _shown(self) -> Shown:
        security = self.config.security
        check, tls = (web.access_check(self.access), web.tls_context(security)) if security is not None else (None, None)
        try:
            following = tuple if self.follower is None else self.follower.followed
            return Shown(
                self.config.web_listen, self.intake, self.fleets, self.nodes, self.events, check, tls, following=following
            )
        except (OSError, ValueError) as error:
            why = why_not_bound(self.config.web_listen) or (error.strerror if isinstance(error, OSError) else error)
            raise ConfigError(f"--web-listen: cannot listen on {self.config.web_listen}: {why}") from error

    def _data(self) -> DataPort | None:
        """Return the data port, or None if it is turned off."""
        listen, security = self.config.data_port, self.config.security
        if not listen:
            return None
        given = self.config.data_listen is not None
        reads = DataReads(
            self._versions,
            self.access.reading,
            local_only=security is None and is_loopback(listen),
            checksums=self._checksums,
            writes=ChunkWrites(self.access.writing, partial(self.intake.land, transport="http"), self.config.chunk_bytes),
        )
        tls = web.tls_context(security, required=True) if security is not None else None
        try:
            return open_port(listen, reads, tls, given=given)
        except OSError as error:
            option, at = ("--data-listen", listen) if given else ("--listen", self.config.listen)
            raise ConfigError(f"{option}: cannot listen on {at}: {why_not_bound(at) or error.strerror}") from error

    def _note_version(self, record: VersionRecord) -> None:
        self.events.add("version", record.name, record.state.lower(), record.reason, step=record.step, epoch=record.epoch)
        if record.state == READY and (change := self.store.reader.config_change(record)):
            self.events.add("version", record.name, "config", change)

    def start(self) -> None:
        """Read the archive, listen for calls, and report ready. Returns once calls are accepted."""
        if self.follower is not None:
            self.follower.start()
        elif self.archive is not None:
            self.archive.start(self.config.archive_restore)
        self.events.add("daemon", "daemon", "started", release=RELEASE)
        self.tenure.start()
        failpoint("serve.listen")
        self.server.start()
        if self.config.security is None:
            log, whom = (
                (_log.info, "of this host") if is_loopback(self.config.listen) else (_log.warning, "that reaches the port")
            )
            log("no_security", listen=self.config.listen, allowed=f"everybody {whom}")
        records = (record for model in self.store.catalogue.models() for record in self.store.catalogue.versions(model))
        self.nodes.start(record.name for record in records if record.state == READY)
        self._ticker.start()
        self.fetcher.start()
        self.snapshots.start()
        self.shown.set_ready()
        listens = {"listen": self.config.listen, "web": self.shown.listen, "data": self._data_address()}
        limit, term = self.store.capacity.limit_bytes, self.tenure.term.number
        _log.info("listening", **listens, store=str(self.config.store), limit=limit, term=term)

    def _tick(self) -> None:
        descriptors, lost = Descriptors(), ""
        while not self._ended.wait(min(1.0, self.config.lease_seconds / 4)):
            descriptors.look()
            try:
                if (problem := self.store.folder.problem()) != lost:
                    lost = problem
                    self._report_store(problem)
                self.intake.expire()
                self.nodes.expire()
            except Exception as error:
                _log.error("leases_failed", exc_info=error)

    def _report_store(self, problem: str) -> None:
        """Report that the store was removed or replaced, or is back where it was."""
        self.server.report(serving=not problem)
        self.events.add("daemon", "daemon", "store_lost" if problem else "store_back", problem)

    def stop(self) -> None:
        """Wait up to `drain_seconds` for UPLOADING versions to finish, then end all calls and threads and unlock the store."""
        _log.info("daemon_drains", seconds=self.config.drain_seconds)
        self.server.drain()
        self.intake.drain(self.config.drain_seconds)
        self._ended.set()
        self.nodes.close()
        self.checks.close()
        self.fleets.close()
        self.events.close()
        self.server.stop(grace=2)
        if self.data is not None:
            self.data.close()
        self.fetcher.close()
        self.snapshots.close()
        self.borrowing.close()
        if self.follower is not None:
            self.follower.close()
        elif self.archive is not None:
            self.archive.close()
        self.tracing.close()
        self.shown.close()
        self.store.close()
        self.tenure.close()
        if self._lease is not None:
            self._lease.release()
        _log.info("daemon_stopped")


def channel_options(config: Config) -> list[tuple[str, Any]]:
    """Return gRPC's options for the daemon's port."""
    return [
        ("grpc.so_reuseport", 0),  # otherwise two daemons could share one port
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Read-ahead for each upload: gRPC's own estimate grew to 600 MiB on a busy host.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 8 << 20),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ]


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
@flags_of(Config)
def run(
    config: Annotated[Path | None, typer.Option(help="YAML file; keys are these options", envvar="RESHARDERD_CONFIG")] = None,
    version: Annotated[bool, version_option(f"resharderd {RELEASE}")] = False,
    **given: Any,
) -> None:
    """Store versions of models and install them on vLLM servers. Every option is also RESHARDERD_NAME in the environment."""
    try:
        serve(load(config, given))
    except ConfigError as error:
        print(f"resharderd: {error}", file=sys.stderr)
        sys.exit(2)


def serve(config: Config) -> None:
    """Run a daemon until SIGTERM or SIGINT. Raises ConfigError if it cannot start with these options."""
    check_store(config.store)
    raise_malloc_thresholds()
    configure_collections()
    configure_logs(config.log_format, config.log_level)
    log_descriptor_limit = raise_descriptor_limit()
    ended = threading.Event()
    set_at_end_signals(ended)
    try:
        lease = held_lease(config, ended)
        restored = "" if ended.is_set() else restored_registry(config, ended)
        if ended.is_set():
            if lease is not None:
                lease.release()
            return
        daemon = Daemon(config, lease)
        if restored:
            daemon.events.add("daemon", "daemon", "restored", restored)
    except DaemonError as error:
        sys.exit(f"resharderd: --store: {error}")
    except SecurityFilesError as error:
        raise ConfigError(f"security: {error}") from error
    except OSError as error:
        sys.exit(f"resharderd: --store: {medium_error(error)}")
    daemon.start()
    log_descriptor_limit()  # not in front of the line of an option with which it cannot start
    while not ended.wait(1.0):  # with a timeout, so that a signal delivered to another thread is noticed
        pass
    daemon.stop()
    ignore_end_signals()


def restored_registry(config: Config, ended: threading.Event) -> str:
    """Restore the folder from what nodes return, with `--from-nodes`, and return what was restored; empty without it.

    Raises ConfigError, DaemonError, OSError.
    """
    if config.from_nodes:
        return restore_from_nodes(config, channel_options(config), ended)
    if unfinished(config.store):
        raise ConfigError(
            f"--store: an earlier start has not finished to restore {config.store} from nodes: start with --from-nodes again, "
            f"or remove {config.store / PART} and what is beside it"
        )
    return ""


def held_lease(config: Config, ended: threading.Event) -> Lease | None:
    """Wait as a standby until this process holds the lease, and return it; None without one, and once `ended` is set.

    Raises ConfigError, SecurityFilesError.
    """
    if (store := _lease_store(config)) is None:
        return None
    holder = f"{socket.gethostname()}/{os.getpid()}-{secrets.token_hex(4)}"
    lease = Lease(store, holder, config.daemon_lease_seconds, end_process)
    tls = web.tls_context(config.security) if config.security is not None else None
    try:
        page = StandbyPage(config.web_listen, tls)
    except (OSError, ValueError) as error:
        why = why_not_bound(config.web_listen) or error
        raise ConfigError(f"--web-listen: cannot listen on {config.web_listen}: {why}") from error
    try:
        if not lease.acquire(lambda: _folder_term(config.store), ended, page.report, at_once=config.take_over):
            return None
        lease.start()
        return lease
    finally:
        page.close()


def _lease_store(config: Config) -> LeaseStore | None:
    if config.lease_file is not None and config.kubernetes_lease:
        raise ConfigError("--kubernetes-lease: there is one lease, and lease_file is set too: set one of them")
    if config.lease_file is not None:
        return LeaseFile(config.lease_file)
    if not config.kubernetes_lease:
        return None
    try:
        from resharder.server.standby.kubernetes_lease import KubernetesLease
    except ImportError as error:
        raise ConfigError(f"--kubernetes-lease: {error.name} is missing: pip install 'resharder[kubernetes]'") from error
    try:
        namespace, _, name = config.kubernetes_lease.partition("/")
        return KubernetesLease(namespace, name, config.daemon_lease_seconds)
    except OSError as error:
        raise ConfigError(f"--kubernetes-lease: {error}") from error


def _folder_term(root: Path) -> int:
    return found.number if (found := read_term(root)) is not None else 0


def main() -> None:
    """Run the command line. Entry point of `resharderd`."""
    with printable_output("resharderd"):
        app()


if __name__ == "__main__":
    main()
