"""Processes as on a host of their own: folders of other hosts, in shared memory, are empty to them."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def hiding(folders: Iterable[Path], namespace: Sequence[str] = ("unshare", "--mount")) -> list[str]:
    """Return a command that is put before another one, to whose process these folders are empty. Needs root.

    The process replaces this command, and does not start if a folder cannot be hidden.

    Args:
        folders: Folders that exist.
        namespace: Command that enters a mount namespace of its own, as `ip netns exec` does too.
    """
    mounts = " && ".join([*(f"mount -t tmpfs none {folder}" for folder in folders), 'exec "$@"'])
    return [*namespace, "sh", "-c", mounts, "sh"]
