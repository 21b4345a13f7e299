"""Commands on versions: copies, the archive, and deletion. A version is its number, with its model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from resharder.client.operator.answers import ArchivedVersion, CollectedVersions, ExportedVersion, VersionStatus
from resharder.client.operator.convert import answer
from resharder.client.operator.export import appearing, plain_name, same_files, write_parts, write_synced
from resharder.client.operator.queries import OperatorQueries
from resharder.v1 import operator_pb2, server_pb2, server_pb2_grpc

_DAY = 24 * 3600.0


class VersionCommands(OperatorQueries):
    """Commands named as in `resharder`. `model` may be omitted if the daemon has one model."""

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
            NotFound: No such READY version.
        """
        found = self.version(version, model=model)
        with appearing(folder) as beside:
            request = operator_pb2.ExportVersionRequest(version=found.name)
            parts = self._channel.stream(self._channel.begin(self._stub.ExportVersion, request, timeout=_DAY))
            files, size = write_parts(beside, parts, lambda done: progress(done, max(done, found.size_bytes)))
        return ExportedVersion(found, folder, files, size)

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

    def gc(self, versions: Sequence[int] = (), *, keep: int = 0, dry_run: bool = False, model: str = "") -> CollectedVersions:
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
        return answer(CollectedVersions, self._call(self._stub.RetireVersions, request))

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

    def restore(self, version: int, *, model: str = "") -> VersionStatus:
        """Restore an archived version, READY under its own number.

        Args:
            version: Number of the version.
            model: Name of the model; required by a daemon with an empty store.

        Returns:
            The version.
        """
        request = operator_pb2.RestoreVersionRequest(version=self._version_name(version, model))
        return answer(VersionStatus, self._channel.call(self._stub.RestoreVersion, request, timeout=_DAY))
