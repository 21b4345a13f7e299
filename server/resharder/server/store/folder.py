"""The folder of a store: its lock, the nonce that identifies clients that can read the folder, and the paths of versions."""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

import structlog
from resharder.converters.failpoints import failpoint
from resharder.server.infra.filesystem import make_folder, move, sync, touching, unused_elsewhere, write_file
from resharder.server.state.errors import FailedPrecondition
from resharder.server.state.version import READY, UPLOADING, VersionRecord

ATTEMPTS = 10
"""Attempts at a file operation whose failure would leave a version in two states."""
_log = structlog.get_logger("resharder.store")


class StoreFolder:
    """The locked folder of one daemon. `shared`: whether clients on this host may map the files.

    Raises FailedPrecondition (STORE_OWNER, STORE_LOCKED, STORE_FILESYSTEM) or OSError.
    """

    def __init__(self, root: Path, *, shared: bool) -> None:
        self.root, self.shared = make_folder(root), shared
        self.nonce_file, self.nonce = root / "nonce", secrets.token_bytes(32)
        self._guard = _lock(root)
        try:
            write_file(self.nonce_file, self.nonce)
            if shared and not unused_elsewhere(self.nonce_file):
                raise FailedPrecondition(
                    "STORE_FILESYSTEM",
                    f"{root}: this filesystem does not report open files (it lacks file leases), so clients must not map them: "
                    "choose another folder, or shared_memory=false",
                )
        except BaseException:
            self.close()
            raise

    def path(self, record: VersionRecord) -> Path:
        """Return the folder of the version's files. It exists while the version is UPLOADING or READY."""
        kind = {UPLOADING: "staging", READY: "versions"}.get(record.state, "retired")
        return self.root / "models" / record.model / kind / f"{record.number:08}"

    def close(self) -> None:
        """Unlock the folder, which another daemon may use then."""
        with suppress(OSError):
            os.close(self._guard)


def _lock(root: Path) -> int:
    owner = root.stat().st_uid
    if owner != os.geteuid():  # any user can write to /dev/shm
        raise FailedPrecondition("STORE_OWNER", f"{root} belongs to user {owner}, expected {os.geteuid()}")
    root.chmod(0o700)
    with touching(root / "lock", "opening"):
        descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FailedPrecondition("STORE_LOCKED", f"another daemon uses the store {root}") from None
    return descriptor


def sync_or_undo(source: Path, target: Path) -> None:
    """Sync the parent of `target`, to which `source` was renamed; rename it back and raise OSError if that fails.

    Both are tried several times in turn. If all fail, `target` stays, durable or not.
    """
    for _ in range(ATTEMPTS):
        try:
            failpoint("commit.sync")
            sync(target.parent)
            return
        except OSError as error:
            refused = error
        try:
            move(target, source)
        except OSError:
            continue
        raise refused
    _log.error("version_not_synced", folder=str(target), error=str(refused))
