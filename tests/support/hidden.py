"""Processes as on a host of their own: folders of other hosts, in shared memory, are empty to them."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_OWN_MOUNTS = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")


def hide(folders: Iterable[Path | str]) -> None:
    """Make folders empty to this process, which has no threads yet."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if user else 0)):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for folder in folders:
        subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)


def hiding(folders: Iterable[Path], namespace: Sequence[str] = _OWN_MOUNTS) -> list[str]:
    """Return a command that is put before another one, to whose process these folders are empty.

    The process replaces this command, and does not start if a folder cannot be hidden.

    Args:
        folders: Folders that exist.
        namespace: Command that enters a mount namespace of its own, as `ip netns exec` does too.
    """
    mounts = " && ".join([*(f"mount -t tmpfs none {folder}" for folder in folders), 'exec "$@"'])
    return [*namespace, "sh", "-c", mounts, "sh"]


def unavailable() -> str:
    """Return why no folder can be hidden here; empty if one can."""
    if not shutil.which("unshare"):
        return "expected util-linux"
    tried = subprocess.run([*hiding([]), "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no mount namespaces: {tried.stderr.strip()}"
