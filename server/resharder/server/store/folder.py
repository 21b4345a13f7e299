"""The folder of a store: its lock, the nonce that identifies clients that can read the folder, and the paths of versions.

The folder itself is locked, which no removal of a file ends, and a file in it, because some network filesystems lock no folders.
"""

import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import structlog
from resharder.converters.failpoints import failpoint
from resharder.server.infra.filesystem import make_folder, move, sync, touching, unused_elsewhere, write_file
from resharder.server.state.errors import FailedPrecondition, Unavailable
from resharder.server.state.version import READY, UPLOADING, VersionRecord

ATTEMPTS = 10
"""Attempts at a file operation whose failure would leave a version in two states."""
_LOCK = "lock"
_LOCK_ATTEMPTS, _LOCK_PAUSE = 40, 0.05  # 2 s, in which a process that runs has noticed that another one takes over
_log = structlog.get_logger("resharder.store")


class StoreFolder:
    """The locked folder of one daemon or node. `shared`: whether clients on this host may map the files.

    `take_over`: a process that does not give up its lock within some seconds (it is stopped, or its host is gone) loses it.

    Raises FailedPrecondition (STORE_OWNER, STORE_LOCKED, STORE_FILESYSTEM) or OSError.
    """

    def __init__(self, root: Path, *, shared: bool, take_over: bool = False) -> None:
        self.root, self.shared = make_folder(root), shared
        self.nonce_file, self.nonce = root / "nonce", secrets.token_bytes(32)
        self._guards = _lock_from_another(root) if take_over else _lock(root)
        try:
            write_file(self.nonce_file, self.nonce)
            self._own = {path: _identity(path) for path in (root, self.nonce_file)}
            self._lock_file = _identity(root / _LOCK)
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

    def problem(self) -> str:
        """Return why this process can no longer use the folder: it was removed or replaced under it. Empty if it can.

        A file that cannot be looked up is no reason: file operations report a medium that fails. Nor is the removal of one of the
        two files: the lock of the folder itself stays, and without the nonce clients come over the network.
        """
        try:
            for path, own in self._own.items():
                try:
                    found = _identity(path)
                except (FileNotFoundError, NotADirectoryError):
                    if path == self.nonce_file and (self.root / _LOCK).exists():
                        continue
                    return f"{path} was removed under the running process: restart the process"
                if found != own:
                    return (
                        f"{path} was replaced under the running process: stop what else uses {self.root}, and restart the process"
                    )
            with suppress(FileNotFoundError):
                if _identity(self.root / _LOCK) != self._lock_file:
                    return f"{self.root / _LOCK} was replaced: stop the other process that uses {self.root}, and restart this one"
        except OSError:
            return ""
        return ""

    def check(self) -> None:
        """Raise Unavailable (STORE_FAILED) if the folder was removed or replaced, before something is written there."""
        if problem := self.problem():
            raise Unavailable("STORE_FAILED", problem)

    def close(self) -> None:
        """Unlock the folder, which another daemon may use then."""
        for guard in self._guards:
            with suppress(OSError):
                os.close(guard)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _lock(root: Path) -> list[int]:
    """Lock the folder and the file in it, and return their descriptors."""
    owner = root.stat().st_uid
    if owner != os.geteuid():  # any user can write to /dev/shm
        raise FailedPrecondition("STORE_OWNER", f"{root} belongs to user {owner}, and this process runs as {os.geteuid()}")
    root.chmod(0o700)
    guards: list[int] = []
    try:
        for path, flags in ((root, os.O_RDONLY | os.O_DIRECTORY), (root / _LOCK, os.O_RDWR | os.O_CREAT)):
            with touching(path, "opening"):
                guards.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
            try:
                fcntl.flock(guards[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedPrecondition(
                    "STORE_LOCKED", f"another process uses {root}: stop it, or choose another folder"
                ) from None
            except OSError:
                if path != root:
                    raise
    except BaseException:
        for guard in guards:
            os.close(guard)
        raise
    return guards


def _lock_from_another(root: Path) -> list[int]:
    """Lock the folder, and take the lock of a process that does not end. That one finds its lock file replaced (`problem`)."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            return _lock(root)
        except FailedPrecondition as error:
            if error.reason != "STORE_LOCKED":
                raise
        time.sleep(_LOCK_PAUSE)
    mine = root / f"{_LOCK}.new"
    with touching(mine, "opening"):
        guard = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        move(mine, root / _LOCK)
        sync(root)
    except BaseException:
        os.close(guard)
        raise
    _log.warning("lock_taken", folder=str(root))
    return [guard]


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
