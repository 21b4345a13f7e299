"""Failed file operations as errors that name the operation, the file and the errno."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resharder.server.infra.filesystem import MediumRefused
from resharder.server.state.errors import DaemonError, Reason, ResourceExhausted, Unavailable

MEDIUM: frozenset[Reason] = frozenset(("NO_DESCRIPTORS", "STORE_FAILED", "STORE_FULL"))
"""Reasons of failures that end when the medium works again: the same call may then succeed."""
_FULL, _DESCRIPTORS = (errno.ENOSPC, errno.EDQUOT), (errno.EMFILE, errno.ENFILE)
_REFUSALS = (*_FULL, *_DESCRIPTORS, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)


def is_refusal(error: BaseException) -> bool:
    """Return whether a medium, rather than the daemon, caused `error`."""
    return isinstance(error, MediumRefused) or (isinstance(error, OSError) and error.errno in _REFUSALS)


def medium_error(error: OSError) -> DaemonError:
    """Return the error for a failed file operation: STORE_FAILED, STORE_FULL or NO_DESCRIPTORS, by its errno."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    doing, path = getattr(error, "doing", "using"), error.filename or "a file"
    what = f"{doing} {path}: {name} ({error.strerror or error})"
    if error.errno in _DESCRIPTORS:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return ResourceExhausted("NO_DESCRIPTORS", f"{what}; the limit is {limit} descriptors: raise it (ulimit -n)")
    if error.errno in _FULL:
        needed, free = getattr(error, "needed", 0) or "some", _free(str(path))
        return ResourceExhausted("STORE_FULL", f"{what}; needed: {needed} bytes, free: {free}; free space on this medium")
    return Unavailable("STORE_FAILED", f"{what}; try again once this medium works")


def _free(path: str) -> str:
    """Return the free bytes at the location of `path`."""
    for folder in (Path(path), *Path(path).parents):
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        return f"{found.f_bavail * found.f_frsize} bytes"
    return "unknown"


@contextmanager
def medium_errors() -> Iterator[None]:
    """Convert an OSError of the block to STORE_FAILED, STORE_FULL or NO_DESCRIPTORS; a decorator as well."""
    try:
        yield
    except OSError as error:
        raise medium_error(error) from error
