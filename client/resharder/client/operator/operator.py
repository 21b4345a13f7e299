"""One connection of an operator to one daemon, with a method for every command of `resharder`."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from resharder.client.errors import DaemonUnreachable, NotFound, Refused, UsageError, WaitTimeout
from resharder.client.operator import waiting
from resharder.client.operator.answers import (
    ArchivedVersion,
    BaseBinding,
    Daemon,
    Event,
    ExportedVersion,
    Fleet,
    Node,
    PauseMode,
    Power,
    Profile,
    ReplicaShortage,
    RetireVersionsResponse,
    ServeAhead,
    Server,
    UpdateStrategy,
    Verification,
    Version,
    VersionTarget,
)
from resharder.client.operator.convert import answer, keywords
from resharder.client.operator.export import appearing, plain_name, same_files, write_synced, write_version
from resharder.client.rpc.channel import Channel, endpoint_or_default
from resharder.client.rpc.tls import Tls
from resharder.converters.extras import explained
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.backoff import Backoff
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

Found = TypeVar("Found")
_PAGE = 500
_POLL = 0.2
_RESTART = 60.0  # seconds for which a wait, or a stream of events, survives a restart of the daemon
_LONGEST_WAIT = 3600.0  # seconds; the daemon's bound
_DAY = 24 * 3600.0
_MANIFEST_FILE = "resharder.json"
_SLEEP = {1: Power.ASLEEP_1, 2: Power.ASLEEP_2}


def _ignore(fleet: Fleet, servers: Sequence[Server]) -> None: ...


class Operator:
    """Connection to one daemon, with a method for every command of `resharder`.

    The daemon stores the effect of each command before it answers; each may be repeated. Each `wait_` method waits for the end
    of one of them. `model` and `fleet` may be omitted where the daemon has one.

    Args:
        endpoint: Address as `host:port`; by default RESHARDER_ENDPOINT, else 127.0.0.1:7677.
        timeout: Bound on one answer in seconds; None is no bound.
        connect_timeout: Seconds for which calls are retried while the daemon cannot be reached; None is no bound.
        tls: TLS settings; by default those of the RESHARDER_TLS_* variables.

    Raises:
        UsageError: The endpoint or the TLS settings are invalid.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float | None = 30.0,
        connect_timeout: float | None = 2.0,
        tls: Tls | None = None,
    ) -> None:
        self._channel = Channel(endpoint_or_default(endpoint), connect_timeout, tls, interruptible=True)
        self._timeout = timeout
        self._stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)

    @property
    def endpoint(self) -> str:
        """Address of the daemon, `host:port`."""
        return self._channel.endpoint

    def daemon(self) -> Daemon:
        """Return the daemon's state: release, store, models and publishers."""
        return answer(Daemon, self._call(self._stub.GetDaemon, operator_pb2.GetDaemonRequest()))

    def only_model(self) -> str:
        """Return the name of the daemon's model. Raises UsageError unless there is exactly one."""
        models = self.daemon().models
        if len(models) != 1:
            there = f"several models, {', '.join(models)}" if models else "no model yet"
            raise UsageError(f"the daemon has {there}: pass --model")
        return models[0]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def clock_difference(self) -> float:
        """Return the seconds by which the daemon's clock is ahead of this host's, to within half a round trip."""
        self.daemon()  # connects, so that the round trip below does not include it
        before = time.time()
        there = self.daemon().time
        return (there.timestamp() if there else 0.0) - (before + time.time()) / 2

    def versions(self, model: str = "") -> list[Version]:
        """Return versions, newest first.

        Args:
            model: Name of the model; empty for all models.
        """
        return list(self._versions(model))

    def versions_after(self, number: int, *, model: str) -> list[Version]:
        """Return the versions with higher numbers, newest first, without reading further pages.

        Args:
            number: Number of a version.
            model: Name of the model.
        """
        return list(takewhile(lambda version: version.number > number, self._versions(model)))

    def version(self, number: int, *, model: str = "") -> Version:
        """Return one version.

        Args:
            number: Number of the version.
            model: Name of the model; may be omitted if the daemon has one.

        Raises:
            NotFound: No such version.
            UsageError: `model` is empty, and the daemon does not have exactly one model.
        """
        request = operator_pb2.GetVersionRequest(version=self._version_name(number, model))
        return answer(Version, self._call(self._stub.GetVersion, request))

    def latest(self, model: str = "") -> Version:
        """Return the newest READY version.

        Args:
            model: Name of the model; may be omitted if the daemon has one.

        Raises:
            NotFound: No version is READY.
            UsageError: `model` is empty, and the daemon does not have exactly one model.
        """
        model = model or self.only_model()
        ready = [version for version in self.versions(model) if version.state == Version.State.READY]
        if not ready:
            raise NotFound(f"model {model!r} has no READY version yet")
        return max(ready, key=lambda version: version.number)

    def servers(self, fleet: str = "") -> list[Server]:
        """Return servers, sorted by id.

        Args:
            fleet: Name of the fleet; empty for all servers.
        """
        return self._servers(fleet)

    def server(self, name: str) -> Server:
        """Return one server.

        Args:
            name: Id, or `servers/{id}`.

        Raises:
            NotFound: No such server.
        """
        return one_of({server.name: server for server in self.servers()}, server_name(name), "server")

    def fleets(self) -> list[Fleet]:
        """Return all fleets, sorted by name."""
        return self._fleets()

    def fleet(self, name: str = "") -> Fleet:
        """Return one fleet.

        Args:
            name: Name of the fleet; may be omitted if the daemon has one.

        Raises:
            NotFound: No such fleet.
            UsageError: The daemon has several fleets.
        """
        fleets = {fleet.name: fleet for fleet in self.fleets()}
        if not name and len(fleets) > 1:
            raise UsageError(f"the daemon has several fleets, {', '.join(fleets)}: pass --fleet")
        return one_of(fleets, name or next(iter(fleets), ""), "fleet")

    def events(self, *, after: int = 0, last: int = 0, subject: str = "", follow: bool = False) -> Iterator[Event]:
        """Yield events, oldest first, up to the newest one; with `follow` also later ones.

        Args:
            after: Id of an event; only later ones are yielded.
            last: Number of the newest events, if `after` is 0; 0 is 100.
            subject: Resource name; only events about it or resources below it are yielded.
            follow: Wait for further events, over restarts of the daemon.

        Raises:
            DaemonUnreachable: The daemon cannot be reached; with `follow`, for a minute.
        """
        request = operator_pb2.ListEventsRequest(after=after, last=last, subject=subject, follow=follow)
        lost = Backoff(_RESTART)
        while True:
            try:
                for event in self._channel.stream(self._channel.begin(self._stub.ListEvents, request)):
                    request.after, request.last, lost = event.id, 0, Backoff(_RESTART)
                    yield answer(Event, event)
                if not follow:
                    return
            except DaemonUnreachable:
                if not follow:
                    raise
            if not lost.wait():
                raise DaemonUnreachable(f"the daemon at {self.endpoint} did not come back within {_RESTART:g} s")

    def export(
        self,
        version: int,
        folder: Path,
        *,
        model: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> ExportedVersion:
        """Write a READY version into `folder` as a checkpoint for `from_pretrained`, complete or not at all.

        Args:
            version: Number of the version.
            folder: New or empty folder.
            model: Name of the model; may be omitted if the daemon has one.
            progress: Called with the bytes so far and the bytes expected, for every part.

        Returns:
            Number of files and bytes written.

        Raises:
            UsageError: The folder is not empty.
            CorruptData: A checksum is wrong.
            DaemonUnreachable: The daemon, or its data port (DATA_PORT), cannot be reached.
            NotFound: No such READY version.
        """
        with explained("client"):  # nothing else that operators ask for needs more than gRPC
            from resharder.client.versions.manifest import get_manifest
            from resharder.client.versions.port_reader import PortReader
        found = self.version(version, model=model)
        with appearing(folder) as beside:
            manifest, files = get_manifest(self._channel, found.name), self._files_of(found)
            reader = PortReader(self._channel, manifest)
            size = write_version(beside, files, manifest, reader, lambda done: progress(done, max(done, found.size_bytes)))
        return ExportedVersion(found, folder, len(files) + len(manifest.files), size)

    def _files_of(self, version: Version) -> dict[str, bytes]:
        """Return all files of a READY version but the weights. Raises Refused if the daemon is too old to name them."""
        stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
        model, _, number = version.name.removeprefix("models/").partition("/versions/")
        found = self._call(stub.GetModel, server_pb2.GetModelRequest(model=model, version=int(number)))
        files = {file.path: file.content for file in found.files}
        if _MANIFEST_FILE not in files:
            raise Refused(
                f"the daemon at {self.endpoint} is of an older release: export with that release, or upgrade the daemon"
            )
        return files

    def fetch_config(self, folder: Path, *, model: str = "", fleet: str = "") -> list[str]:
        """Write config.json and the tokenizer's files of the version that a server boots now into a folder for `vllm serve`.

        Args:
            folder: New or empty folder, or one that has these files already.
            model: Name of the model; may be omitted if the daemon has one.
            fleet: Name of the server's fleet, by default the model's.

        Returns:
            The names of the files.

        Raises:
            UsageError: The folder has other content.
            NotFound: No such model.
        """
        stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
        found = self._call(stub.GetModel, server_pb2.GetModelRequest(model=model or self.only_model(), fleet=fleet))
        files = {plain_name(file.path): file.content for file in found.files}
        if not same_files(folder, files):
            with appearing(folder) as beside:
                for name, content in files.items():
                    write_synced(beside / name, content)
        return list(files)

    def gc(
        self, versions: Sequence[int] = (), *, keep: int = 0, dry_run: bool = False, model: str = ""
    ) -> RetireVersionsResponse:
        """Delete versions, except those in use.

        Args:
            versions: Numbers of versions; empty for all but the newest `keep`.
            keep: Number of versions to retain; at least 1 if `versions` is empty.
            dry_run: Delete nothing.
            model: Name of the model; may be omitted if the daemon has one.

        Returns:
            The deleted versions, and the named ones that are in use.
        """
        model = model or self.only_model()
        request = operator_pb2.RetireVersionsRequest(model=model, versions=versions, keep=keep, dry_run=dry_run)
        return answer(RetireVersionsResponse, self._call(self._stub.RetireVersions, request))

    def archive(self, version: int, *, model: str = "") -> ArchivedVersion:
        """Write a version to the archive and verify it there.

        Args:
            version: Number of the version.
            model: Name of the model; may be omitted if the daemon has one.

        Returns:
            The archived version.
        """
        request = operator_pb2.ArchiveVersionRequest(version=self._version_name(version, model))
        return answer(ArchivedVersion, self._channel.call(self._stub.ArchiveVersion, request, timeout=_DAY))

    def archived(self, model: str = "") -> list[ArchivedVersion]:
        """Return archived versions.

        Args:
            model: Name of the model; empty for all.
        """
        found = self._call(self._stub.ListArchive, operator_pb2.ListArchiveRequest(model=model))
        return [answer(ArchivedVersion, one) for one in found.versions]

    def restore(self, version: int, *, model: str = "") -> Version:
        """Restore an archived version, READY under its own number.

        Args:
            version: Number of the version.
            model: Name of the model; required by a daemon with an empty store.

        Returns:
            The version.
        """
        request = operator_pb2.RestoreVersionRequest(version=self._version_name(version, model))
        return answer(Version, self._channel.call(self._stub.RestoreVersion, request, timeout=_DAY))

    def set_fleet(
        self,
        name: str,
        *,
        target: VersionTarget | None = None,
        strategy: UpdateStrategy | None = None,
        pause_mode: PauseMode | None = None,
        max_skew: int | None = None,
        serve_ahead: bool | ServeAhead | None = None,
        base_binding: BaseBinding | None = None,
        model: str = "",
        accept_refused: bool = False,
    ) -> Fleet:
        """Change the given settings of a fleet; with `model`, create it if it does not exist.

        Args:
            name: Name of the fleet.
            model: Model of a new fleet.
            target: Version to serve.
            strategy: Order in which an update reaches the servers.
            pause_mode: Treatment of requests in flight.
            max_skew: Bound on the difference between versions served at the same time; 0 is no bound.
            serve_ahead: Whether servers take versions before READY, over the direct path; `ServeAhead.AUTO` returns to the
                default, which is to take them in a fleet that moves all at once without a skew bound.
            base_binding: For a fleet of an adapter: whether a version waits for the version of the base that it was trained on.
            accept_refused: Permit versions again that a failed move or a rollback has refused.

        Returns:
            The fleet after the change.
        """
        fleet = resources_pb2.Fleet(
            name=name,
            model=model,
            target=resources_pb2.VersionTarget(**keywords(target)) if target else None,
            strategy=resources_pb2.UpdateStrategy(**keywords(strategy)) if strategy else None,
            pause_mode=pause_mode.value if pause_mode else None,
            max_skew=max_skew or 0,
            serve_ahead=serve_ahead is True or serve_ahead == ServeAhead.ON,
            serve_ahead_setting=serve_ahead.value if isinstance(serve_ahead, ServeAhead) else None,
            base_binding=base_binding.value if base_binding else None,
        )
        request = operator_pb2.UpdateFleetRequest(fleet=fleet, accept_refused=accept_refused)
        given = {
            "target": target,
            "strategy": strategy,
            "pause_mode": pause_mode,
            "max_skew": max_skew,
            "base_binding": base_binding,
            "serve_ahead_setting" if serve_ahead == ServeAhead.AUTO else "serve_ahead": serve_ahead,
        }
        request.update_mask.paths.extend(field for field, value in given.items() if value is not None)
        return self._fleet(self._stub.UpdateFleet, request)

    def update(self, fleet: str = "", version: int | None = None, *, accept_refused: bool = False) -> Fleet:
        """Set a fleet's target to one version, or to the latest version, now and in future.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            version: Number of the version; None follows the latest.
            accept_refused: Permit refused versions again.

        Returns:
            The fleet after the change, for `wait_moved`.
        """
        found = self.fleet(fleet)
        if version is not None:
            target = VersionTarget(VersionTarget.Kind.NUMBER, version)
        else:
            every = found.target.every_seconds if found.target.kind == VersionTarget.Kind.LATEST else 0.0
            target = VersionTarget(VersionTarget.Kind.LATEST, every_seconds=every)
        return self.set_fleet(found.name, target=target, accept_refused=accept_refused)

    def pin(self, fleet: str = "", version: int | None = None) -> Fleet:
        """Pin a fleet to a version until `update`.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            version: Number of the version; None is the one served now.

        Returns:
            The fleet after the change.

        Raises:
            UsageError: The fleet serves no version.
        """
        found = self.fleet(fleet)
        number = version or found.settled_version
        if not number:
            raise UsageError(f"fleet {found.name} serves no version yet: give a version's number")
        return self.set_fleet(found.name, target=VersionTarget(VersionTarget.Kind.NUMBER, number))

    def rollback(self, fleet: str = "", version: int | None = None, *, reason: str = "", request_id: str = "") -> Fleet:
        """Return a fleet to an earlier version, and refuse the later ones.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            version: Number of the version; None is the newest READY one before the one served now.
            reason: Reason for the journal.
            request_id: Id of the request; a repetition with the same id changes nothing. By default a new one.

        Returns:
            The fleet after the change, for `wait_moved`.
        """
        request = operator_pb2.RollBackFleetRequest(
            fleet=self.fleet(fleet).name, version=version or 0, reason=reason, request_id=request_id or uuid.uuid4().hex
        )
        return self._fleet(self._stub.RollBackFleet, request)

    def approve(self, fleet: str = "", *, reason: str = "", move: int | None = None) -> Fleet:
        """Continue a move that waits or has stopped.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            reason: Reason for the journal.
            move: Id of the move; None is the current one.

        Returns:
            The fleet after the change, for `wait_moved`.

        Raises:
            NotFound: The fleet has never moved.
            Refused: The fleet is at another move, or its move has ended.
        """
        return self._decide(fleet, True, reason, move)

    def back(self, fleet: str = "", *, reason: str = "", move: int | None = None) -> Fleet:
        """End a move by returning to the previous version, and refuse the new one.

        Args:
            fleet: Name of the fleet; may be omitted if the daemon has one.
            reason: Reason for the journal.
            move: Id of the move; None is the current one.

        Returns:
            The fleet after the change, for `wait_moved`.

        Raises:
            NotFound: The fleet has never moved.
            Refused: The fleet is at another move, or its move has ended.
        """
        return self._decide(fleet, False, reason, move)

    def sleep(self, fleet: str, server: str = "", *, level: int = 1) -> Fleet:
        """Free the GPUs of one server, or of all in the fleet, including later ones.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            level: Sleep level of vLLM: 1 moves weights to host memory, 2 drops them.

        Returns:
            The fleet after the change, for `wait_power`.

        Raises:
            UsageError: `level` is neither 1 nor 2.
        """
        if level not in _SLEEP:
            raise UsageError(f"expected sleep level 1 or 2, got {level}")
        return self._set_power(fleet, server, _SLEEP[level])

    def wake(self, fleet: str, server: str = "", *, tag: Literal["weights"] | None = None) -> Fleet:
        """Wake one server or the whole fleet.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            tag: `weights` restores the weights only; a second `wake` restores the KV cache.

        Returns:
            The fleet after the change, for `wait_power`.
        """
        return self._set_power(fleet, server, Power.WEIGHTS_AWAKE if tag else Power.AWAKE)

    def drain(self, fleet: str, server: str = "") -> Fleet:
        """Close one server, or all present servers of the fleet, to new requests.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.

        Returns:
            The fleet after the change, for `wait_drained`.
        """
        return self._set_drained(fleet, server, True)

    def resume(self, fleet: str, server: str = "") -> Fleet:
        """Open drained servers to requests again.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.

        Returns:
            The fleet after the change, for `wait_serving`.
        """
        return self._set_drained(fleet, server, False)

    def wait_moved(self, asked: Fleet, listener: waiting.FleetListener = _ignore, *, timeout: float | None = None) -> Fleet:
        """Wait until the move of a command has ended and the servers have reached the target.

        Servers that are lost, asleep or drained are not awaited. A move that loses servers ends STOPPED or FAILED, with their
        names. `went_well` judges the result.

        Args:
            asked: The command's answer.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet at the end.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.moved(asked), asked.name, "the move has not ended", listener, timeout)

    def wait_power(
        self,
        fleet: str,
        power: Power,
        server: str = "",
        listener: waiting.FleetListener = _ignore,
        *,
        timeout: float | None = None,
    ) -> Fleet:
        """Wait until servers are in a power state; with AWAKE, until they serve.

        Args:
            fleet: Name of the fleet.
            power: Power state.
            server: Id of the server; empty for all.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        awaited = f"its servers are not {power.value}"
        return self._until(waiting.powered(power, server_name(server)), fleet, awaited, listener, timeout)

    def wait_drained(
        self, fleet: str, server: str = "", listener: waiting.FleetListener = _ignore, *, timeout: float | None = None
    ) -> Fleet:
        """Wait until drained servers have answered their last request.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.drained(server_name(server)), fleet, "requests are still being answered", listener, timeout)

    def wait_serving(
        self, fleet: str, server: str = "", listener: waiting.FleetListener = _ignore, *, timeout: float | None = None
    ) -> Fleet:
        """Wait until servers serve or sleep.

        Args:
            fleet: Name of the fleet.
            server: Id of the server; empty for all.
            listener: Called with the fleet and its servers at every poll.
            timeout: Bound in seconds; None is no bound.

        Returns:
            The fleet.

        Raises:
            WaitTimeout: `timeout` seconds have passed.
        """
        return self._until(waiting.serving(server_name(server)), fleet, "its servers are not SERVING", listener, timeout)

    def delete_fleet(self, fleet: str) -> None:
        """Delete a fleet without servers. A model's default fleet has default settings from then on.

        Args:
            fleet: Name of the fleet.

        Raises:
            Refused: The fleet has servers.
            NotFound: No such fleet.
        """
        self._call(self._stub.DeleteFleet, operator_pb2.DeleteFleetRequest(fleet=fleet))

    def forget(self, server: str) -> None:
        """Forget a LOST server, as the daemon does `forget_seconds` after the loss.

        Args:
            server: Id of the server.

        Raises:
            Refused: The server is not LOST.
            NotFound: No such server.
        """
        self._call(self._stub.ForgetServer, operator_pb2.ForgetServerRequest(server=server_name(server)))

    def profile_install(self, server: str, *, timeout: float | None = 600.0) -> Iterator[Profile]:
        """Install the version that a server serves once more, under a profiler.

        Args:
            server: Id of the server.
            timeout: Bound in seconds; None is the daemon's bound, an hour.

        Returns:
            An iterator of profiles, each yielded when its worker has sent it.

        Raises:
            Refused: The server does not serve, or the install fails.
            WaitTimeout: `timeout` seconds have passed.
            NotFound: No such server.
        """
        seconds = _LONGEST_WAIT if timeout is None else timeout
        request = operator_pb2.ProfileInstallRequest(server=server_name(server), wait_seconds=seconds)
        call = self._channel.begin(self._stub.ProfileInstall, request, timeout=seconds + 30)
        for profile in self._channel.stream(call):
            yield answer(Profile, profile)

    def verify(self, server: str, *, timeout: float | None = 600.0) -> tuple[Verification, ...]:
        """Compare the memory of each worker with its version, while the server serves.

        A server with a worker that finds a difference leaves service, and its version is installed again.

        Args:
            server: Id of the server.
            timeout: Bound in seconds; None is the daemon's bound, an hour.

        Returns:
            One result per worker, by rank.

        Raises:
            Refused: A worker is missing.
            WaitTimeout: `timeout` seconds have passed.
            NotFound: No such server.
        """
        seconds = _LONGEST_WAIT if timeout is None else timeout
        request = operator_pb2.VerifyServerRequest(server=server_name(server), wait_seconds=seconds)
        found = self._channel.call(self._stub.VerifyServer, request, timeout=seconds + 30)
        return tuple(answer(Verification, one) for one in found.verifications)

    def nodes(self) -> list[Node]:
        """Return nodes, sorted by id."""
        return list(self._pages(self._stub.ListNodes, operator_pb2.ListNodesRequest(), "nodes", Node))

    def replica_shortages(self) -> list[ReplicaShortage]:
        """Return the versions with fewer replicas than the daemon's `replicas`, if that is above 1."""
        found = self._call(self._stub.ListNodes, operator_pb2.ListNodesRequest(page_size=1))
        return [answer(ReplicaShortage, each) for each in found.shortages]

    def drain_node(self, node: str) -> Node:
        """Let a node take no further version, and drop versions that no process maps.

        Args:
            node: Id, or `nodes/{id}`.

        Returns:
            The node after the change.

        Raises:
            NotFound: No such node.
        """
        return self._set_node_drained(node, True)

    def resume_node(self, node: str) -> Node:
        """Let a drained node take versions again.

        Args:
            node: Id, or `nodes/{id}`.

        Returns:
            The node after the change.

        Raises:
            NotFound: No such node.
        """
        return self._set_node_drained(node, False)

    def _call(self, method: Callable[..., Any], request: Any, connect_timeout: float | None = None) -> Any:
        """Return the answer of a call. `connect_timeout` replaces the connection's own."""
        failpoint("operator.call")
        return self._channel.call(method, request, timeout=self._timeout, patience=connect_timeout)

    def _pages(
        self, method: Callable[..., Any], request: Any, field: str, kind: type[Found], connect_timeout: float | None = None
    ) -> Iterator[Found]:
        request.page_size = _PAGE
        while True:
            page = self._call(method, request, connect_timeout)
            yield from (answer(kind, one) for one in getattr(page, field))
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _version_name(self, number: int, model: str) -> str:
        return f"models/{model or self.only_model()}/versions/{number}"

    def _versions(self, model: str) -> Iterator[Version]:
        request = operator_pb2.ListVersionsRequest(model=model)
        return self._pages(self._stub.ListVersions, request, "versions", Version)

    def _fleets(self, connect_timeout: float | None = None) -> list[Fleet]:
        request = operator_pb2.ListFleetsRequest()
        return list(self._pages(self._stub.ListFleets, request, "fleets", Fleet, connect_timeout))

    def _servers(self, fleet: str, connect_timeout: float | None = None) -> list[Server]:
        request = operator_pb2.ListServersRequest(fleet=fleet)
        return list(self._pages(self._stub.ListServers, request, "servers", Server, connect_timeout))

    def _decide(self, fleet: str, go_on: bool, reason: str, move: int | None) -> Fleet:
        found = self.fleet(fleet)
        if move is None and found.move is None:
            raise NotFound(f"fleet {found.name} has made no move yet: there is nothing to approve or turn back")
        id = move if move is not None else found.move.id if found.move else 0
        request = operator_pb2.DecideMoveRequest(fleet=found.name, move=id, go_on=go_on, reason=reason)
        return self._fleet(self._stub.DecideMove, request)

    def _set_power(self, fleet: str, server: str, power: Power) -> Fleet:
        request = operator_pb2.SetPowerRequest(fleet=fleet, server=server_name(server), power=power.value)
        return self._fleet(self._stub.SetPower, request)

    def _set_drained(self, fleet: str, server: str, drained: bool) -> Fleet:
        request = operator_pb2.SetDrainedRequest(fleet=fleet, server=server_name(server), drained=drained)
        return self._fleet(self._stub.SetDrained, request)

    def _fleet(self, method: Callable[..., Any], request: Any) -> Fleet:
        return answer(Fleet, self._call(method, request))

    def _until(
        self, done: waiting.Condition, name: str, what: str, listener: waiting.FleetListener, timeout: float | None
    ) -> Fleet:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            fleet = one_of({fleet.name: fleet for fleet in self._fleets(_RESTART)}, name, "fleet")
            servers = self._servers(name, _RESTART)
            listener(fleet, servers)
            if done(fleet, servers):
                return fleet
            if end is not None and time.monotonic() > end:
                raise WaitTimeout(f"fleet {name}: {what} after {timeout:g} s; {waiting.why(fleet, servers)}")
            time.sleep(_POLL)

    def _set_node_drained(self, node: str, drained: bool) -> Node:
        request = operator_pb2.SetNodeDrainedRequest(node=_node_name(node), drained=drained)
        return answer(Node, self._call(self._stub.SetNodeDrained, request))


_FIRST = {"fleet": ". A fleet appears when the first vLLM server connects, or with `resharder fleet set NAME --model MODEL`"}


def one_of(found: dict[str, Found], name: str, kind: str) -> Found:
    """Return the resource with this name. Raises NotFound, with the names that exist."""
    if name not in found:
        if name or found:
            listed = f"the daemon has {', '.join(found)}" if found else f"there are none yet{_FIRST.get(kind, '')}"
            raise NotFound(f"there is no {kind} {name or 'without a name'}: {listed}")
        raise NotFound(f"there are no {kind}s yet{_FIRST.get(kind, '')}")
    return found[name]


def server_name(name: str) -> str:
    """Return the resource name of a server, `servers/{id}`, from its id or its resource name; empty for an empty one."""
    return f"servers/{name}" if name and not name.startswith("servers/") else name


def _node_name(node: str) -> str:
    return f"nodes/{node.removeprefix('nodes/')}"
