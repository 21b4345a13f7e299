"""The operator SDK: what is where, moving fleets, and copies of versions.

    with Operator("daemon:7677") as operator:
        for version in operator.versions("policy"):
            print(version.number, version.step)
        operator.export(operator.find_version("12"), Path("checkpoint"))
        asked = operator.update_fleet("policy", want=Want(kind=Want.NUMBER, version=12))
        operator.wait_moved(asked)

Answers are the messages of `resharder.v1`.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resharder.client.operator import waiting
from resharder.client.operator.export import appearing, plain_name, write_parts, write_synced
from resharder.client.operator.queries import Reader, server_name
from resharder.v1 import operator_pb2, resources_pb2, server_pb2, server_pb2_grpc

Want, Motion = resources_pb2.Want, resources_pb2.Motion
_DAY = 24 * 3600.0


def _quiet(fleet: resources_pb2.Fleet, servers: Sequence[resources_pb2.Server]) -> None: ...


class Exported(NamedTuple):
    version: resources_pb2.Version
    folder: Path
    files: int
    bytes: int


class Operator(Reader):
    """A connection to one daemon. `patience`: seconds to try while it cannot be reached; `timeout`: seconds for one answer."""

    # Moving fleets. Each is kept by the daemon before it is answered, and may be repeated.

    def update_fleet(
        self,
        name: str,
        *,
        want: resources_pb2.Want | None = None,
        motion: resources_pb2.Motion | None = None,
        pause_mode: resources_pb2.PauseMode | None = None,
        max_skew: int | None = None,
        serve_ahead: bool | None = None,
        model: str = "",
        accept_refused: bool = False,
    ) -> resources_pb2.Fleet:
        """Changes what is given; makes the fleet if there is none of that name. `accept_refused`: versions that a failed move or
        a rollback refused may be taken again."""
        fleet = resources_pb2.Fleet(
            name=name,
            model=model,
            want=want,
            motion=motion,
            pause_mode=pause_mode,
            max_skew=max_skew or 0,
            serve_ahead=bool(serve_ahead),
        )
        request = operator_pb2.UpdateFleetRequest(fleet=fleet, accept_refused=accept_refused)
        given = {
            "want": want,
            "motion": motion,
            "pause_mode": pause_mode,
            "max_skew": max_skew,
            "serve_ahead": serve_ahead,
        }
        request.update_mask.paths.extend(field for field, value in given.items() if value is not None)
        return self._fleet(self._stub.UpdateFleet, request)

    def roll_back(self, fleet: str, version: int = 0, reason: str = "", request_id: str = "") -> resources_pb2.Fleet:
        """To `version`, or to the READY one before; the ones after it are refused from then on. The same `request_id` again is
        no second step."""
        request = operator_pb2.RollBackFleetRequest(
            fleet=fleet, version=version, reason=reason, request_id=request_id or uuid.uuid4().hex
        )
        return self._fleet(self._stub.RollBackFleet, request)

    def decide(self, fleet: str, go_on: bool, reason: str = "", move: int = 0) -> resources_pb2.Fleet:
        """A move on to its end, or back; 0: the fleet's current one."""
        move = move or self.fleet(fleet).move.id
        return self._fleet(
            self._stub.DecideMove, operator_pb2.DecideMoveRequest(fleet=fleet, move=move, go_on=go_on, reason=reason)
        )

    def profile_install(self, server: str, timeout: float = 600.0) -> Iterator[resources_pb2.Profile]:
        """What the server serves is installed once more, under a profiler in every worker; each worker's profile as it comes.

        Raises Refused where the server is at anything else or the install fails, WaitTimeout after `timeout` seconds, NotFound.
        """
        request = operator_pb2.ProfileInstallRequest(server=server_name(server), wait_seconds=timeout)
        yield from self._channel.stream(self._stub.ProfileInstall(request, timeout=timeout + 30))

    def verify(self, server: str, timeout: float = 600.0) -> list[resources_pb2.Verification]:
        """Has each worker compare its memory with the version that it holds, while the server serves; the results by rank. A
        server with a worker that finds a difference leaves service, and gets its version again.

        Raises Refused where not all workers are there, WaitTimeout after `timeout` seconds, NotFound.
        """
        request = operator_pb2.VerifyServerRequest(server=server_name(server), wait_seconds=timeout)
        answer: operator_pb2.VerifyServerResponse = self._channel.call(self._stub.VerifyServer, request, timeout=timeout + 30)
        return list(answer.verifications)

    def set_power(self, fleet: str, power: resources_pb2.Power, server: str = "") -> resources_pb2.Fleet:
        """Of one server, or of all, those that come later too."""
        request = operator_pb2.SetPowerRequest(fleet=fleet, server=server_name(server), power=power)
        return self._fleet(self._stub.SetPower, request)

    def set_drained(self, fleet: str, drained: bool, server: str = "") -> resources_pb2.Fleet:
        """Of one server, or of all that there are now."""
        request = operator_pb2.SetDrainedRequest(fleet=fleet, server=server_name(server), drained=drained)
        return self._fleet(self._stub.SetDrained, request)

    def wait_moved(
        self, asked: resources_pb2.Fleet, progress: waiting.Progress = _quiet, timeout: float = 0
    ) -> resources_pb2.Fleet:
        """Until the move that a command began has ended and the servers are where the fleet wants them; `waiting.went_well`
        says how. `asked` is what the command answered. Servers that are lost, asleep or drained are not waited for.

        `progress(fleet, servers)` is told of every look. Raises WaitTimeout after `timeout` seconds; 0: never.
        """
        return self._until(waiting.moved(asked), asked.name, "the move's end", progress, timeout)

    def wait_power(
        self,
        fleet: str,
        power: resources_pb2.Power,
        server: str = "",
        progress: waiting.Progress = _quiet,
        timeout: float = 0,
    ) -> resources_pb2.Fleet:
        what = resources_pb2.Power.Name(power)
        return self._until(waiting.powered(power, server_name(server)), fleet, what, progress, timeout)

    def wait_drained(
        self,
        fleet: str,
        server: str = "",
        progress: waiting.Progress = _quiet,
        timeout: float = 0,
    ) -> resources_pb2.Fleet:
        """Until no request is being answered any more."""
        return self._until(waiting.drained(server_name(server)), fleet, "the last answers", progress, timeout)

    def wait_serving(
        self,
        fleet: str,
        server: str = "",
        progress: waiting.Progress = _quiet,
        timeout: float = 0,
    ) -> resources_pb2.Fleet:
        return self._until(waiting.serving(server_name(server)), fleet, "SERVING", progress, timeout)

    # Versions: copies of them, and their end.

    def export(
        self, version: resources_pb2.Version, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Exported:
        """Writes a READY version into `folder`, whole or not at all: as `from_pretrained` opens it.

        `progress(bytes so far, bytes expected)` is told of every part. Raises UsageError for a folder that is not empty,
        CorruptData for a wrong checksum, NotFound.
        """
        with appearing(folder) as beside:
            request = operator_pb2.ExportVersionRequest(version=version.name)
            parts = self._channel.stream(self._stub.ExportVersion(request, timeout=_DAY))
            files, size = write_parts(beside, parts, lambda done: progress(done, max(done, version.size_bytes)))
        return Exported(version, folder, files, size)

    def fetch_config(self, model: str, folder: Path) -> list[str]:
        """Writes config.json and the tokenizer's files for `vllm serve FOLDER`; their names. Raises UsageError, NotFound."""
        stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
        found = self._call(stub.GetModel, server_pb2.GetModelRequest(model=model))
        with appearing(folder) as beside:
            for file in found.files:
                write_synced(beside / plain_name(file.path), file.content)
        return [file.path for file in found.files]

    def retire(
        self, model: str, versions: Sequence[int] = (), keep: int = 0, dry_run: bool = False
    ) -> operator_pb2.RetireVersionsResponse:
        """Drops these versions, or all but the newest `keep`; those in use are kept. `dry_run`: says what it would do."""
        request = operator_pb2.RetireVersionsRequest(model=model, versions=versions, keep=keep, dry_run=dry_run)
        answer: operator_pb2.RetireVersionsResponse = self._call(self._stub.RetireVersions, request)
        return answer

    def archive(self, version: str) -> operator_pb2.ArchivedVersion:
        """Writes models/{model}/versions/{number} to the archive; returns when it is verified there."""
        request = operator_pb2.ArchiveVersionRequest(version=version)
        answer: operator_pb2.ArchivedVersion = self._channel.call(self._stub.ArchiveVersion, request, timeout=_DAY)
        return answer

    def archived(self, model: str = "") -> list[operator_pb2.ArchivedVersion]:
        answer: operator_pb2.ListArchiveResponse = self._call(
            self._stub.ListArchive, operator_pb2.ListArchiveRequest(model=model)
        )
        return list(answer.versions)

    def restore(self, version: str) -> resources_pb2.Version:
        """An archived version becomes READY again, under its own number."""
        request = operator_pb2.RestoreVersionRequest(version=version)
        answer: resources_pb2.Version = self._channel.call(self._stub.RestoreVersion, request, timeout=_DAY)
        return answer

    def _fleet(self, method: Callable[..., Any], request: Any) -> resources_pb2.Fleet:
        answer: resources_pb2.Fleet = self._call(method, request)
        return answer
