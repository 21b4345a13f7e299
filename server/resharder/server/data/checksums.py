"""Checksums of the pieces of READY versions, computed when first requested."""

import threading
from collections import OrderedDict
from collections.abc import Callable

_MOST_CACHED = 1 << 20  # pieces; 16 TiB of versions


class PieceChecksums:
    """Checksums by version's fingerprint, file and first byte. Thread-safe. The least recently used are dropped."""

    def __init__(self, most: int = _MOST_CACHED) -> None:
        self._most, self._lock = most, threading.Lock()
        self._known: OrderedDict[tuple[str, str, int], int] = OrderedDict()

    def get(self, key: tuple[str, str, int], read: Callable[[], int]) -> int:
        """Return the checksum of a piece; `read` computes it, without the lock."""
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        computed = read()
        self.put(key, computed)
        return computed

    def put(self, key: tuple[str, str, int], checksum: int) -> None:
        with self._lock:
            self._known[key] = checksum
            while len(self._known) > self._most:
                self._known.popitem(last=False)
