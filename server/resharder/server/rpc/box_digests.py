"""Digests of boxes of a READY version."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from resharder.converters.geometry.layout import full_box
from resharder.converters.storage.files import Array
from resharder.server.store.box_reads import CheckedBoxes
from resharder.server.store.digests import digest_boxes
from resharder.server.store.reader import VersionReader

_CACHED_DIGESTS = 1 << 21  # 8 bytes each
_CACHED_REQUESTS = 256


class BoxDigester:
    """Digests of boxes in the store. Thread-safe.

    The last 256 answers are cached, because workers of a fleet request the same boxes. Concurrent requests divide the threads.
    """

    def __init__(self, reader: VersionReader, threads: int) -> None:
        self._reader, self._threads = reader, threads
        self._lock, self._asking = threading.Lock(), 0
        self._known: OrderedDict[tuple[str, bytes], Array] = OrderedDict()

    def digests(self, boxes: CheckedBoxes) -> list[int]:
        """Return the digests, in the order of the boxes. Raises as `VersionReader.open` does."""
        record = boxes.manifest.record
        # by fingerprint, because numbers restart with a new store
        key = (record.fingerprint, hashlib.sha256(repr([(b.spec.name, b.box) for b in boxes.boxes]).encode()).digest())
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None:
            with self._share() as threads:
                known = np.array(self._compute(boxes, threads), dtype=np.uint64)
            self._keep(key, known)
        return [int(value) for value in known]

    @contextmanager
    def _share(self) -> Iterator[int]:
        with self._lock:
            self._asking += 1
            threads = max(1, self._threads // self._asking)
        try:
            yield threads
        finally:
            with self._lock:
                self._asking -= 1

    def _compute(self, boxes: CheckedBoxes, threads: int) -> list[int]:
        record, whole = boxes.manifest.record, boxes.manifest.digests
        parts = [each for each in boxes.boxes if each.box != full_box(each.spec.shape)]
        with self._reader.open(record.model, record.number, {each.spec.name for each in parts}) as files:
            found = iter(digest_boxes(files, parts, threads))
        return [whole[spec.name] if box == full_box(spec.shape) else next(found) for spec, box in boxes.boxes]

    def _keep(self, key: tuple[str, bytes], values: Array) -> None:
        with self._lock:
            self._known[key] = values
            while len(self._known) > _CACHED_REQUESTS or sum(v.size for v in self._known.values()) > _CACHED_DIGESTS:
                self._known.popitem(last=False)
