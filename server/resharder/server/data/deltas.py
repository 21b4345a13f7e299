"""Pieces that a data port sends as deltas of another version that it has, because the reader has that one too."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from resharder.converters.storage.delta import encode
from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.ranges import parse_base
from resharder.server.data.versions import PinnedVersion, ServedVersions
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import DaemonError

_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Pieces that a process encodes at a time. The other cores are the trainer's or the engine's."""
_PATIENCE = 1.0  # seconds for which a piece waits to be encoded, before it is sent whole


class BasePiece(NamedTuple):
    """The piece `span` of a base, in the file `descriptor`."""

    descriptor: int
    span: PieceSpan


class DeltaEncoder:
    """Encodes pieces, a few at a time. Thread-safe."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = threading.Semaphore(at_once)

    @contextmanager
    def base(self, versions: ServedVersions, model: str, header: str, span: PieceSpan, size: int) -> Iterator[BasePiece | None]:
        """Yield a piece of the base that a request names; None if it is not here, or its file has not `size` bytes.

        Args:
            versions: The versions that are here, which the reader may read.
            model: Model of the base.
            header: What the request names.
            span: The piece.
            size: Bytes of its file.
        """
        with ExitStack() as stack:
            yield self._opened(stack, versions, model, header, span, size)

    def _opened(
        self, stack: ExitStack, versions: ServedVersions, model: str, header: str, span: PieceSpan, size: int
    ) -> BasePiece | None:
        if (named := parse_base(header)) is None:
            return None
        number, fingerprint = named
        try:
            version = PinnedVersion(versions, model, number, replicates=False)
            stack.callback(version.close)
            if version.served.fingerprint != fingerprint:
                return None
            descriptor, found = version.open(span.file)
            stack.enter_context(version.served.reading([span]))
        except DaemonError:  # retired, or dropped, or in part
            return None
        return BasePiece(descriptor, span) if found == size else None

    def encode(self, descriptor: int, base: BasePiece) -> bytes | None:
        """Return the delta from the base's piece to the same piece of a file; empty if it would not be smaller, None if too many
        others are being encoded.

        Raises Unavailable (STORE_FAILED).
        """
        if not self._places.acquire(timeout=_PATIENCE):
            return None
        try:
            start, size = base.span.start, base.span.end - base.span.start
            with medium_errors():
                content, before = (os.pread(each, size, start) for each in (descriptor, base.descriptor))
            if len(content) != len(before):
                return None
            piece, stored = encode(content, before)
            return bytes(stored) if piece.how == "xor" else b""
        finally:
            self._places.release()
