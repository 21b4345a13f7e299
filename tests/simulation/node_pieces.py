"""Nodes that hold pieces of versions: some commits lack pieces of the store, which a task of the daemon fetches.

Nodes live on when the daemon's process or its host's power ends. A node that is lost takes its pieces with it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import xxhash
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.server.infra.medium import is_refusal
from resharder.server.state.errors import DaemonError
from resharder.server.state.version import VersionRecord
from resharder.server.store.lifecycle import ProvenVersion
from resharder.server.store.manifest import MANIFEST_FILE
from resharder.server.store.partial import MissingPieces, VerifiedVersion
from resharder.server.store.store import Store

from tests.simulation.medium import Medium
from tests.simulation.schedule import Schedule

PIECE_BYTES = 64
_MODEL, _NODE = "policy", "one"


class NodePieces:
    """Contents of versions on a node, by number, until the node loses them."""

    def __init__(self, random: Random, medium: Medium) -> None:
        self._random, self._medium = random, medium
        self.held: dict[int, Mapping[str, bytes]] = {}
        self.gone: set[int] = set()
        self.peaceful = False
        self.counts = Counter[str]()

    @property
    def _schedule(self) -> Schedule:
        return self._medium.schedule

    def attach(self, store: Store) -> None:
        """Let some of the store's commits lack pieces."""
        commit = store.lifecycle.commit

        def without_some(record: VersionRecord, digests: Any, slots: Any, *others: ProvenVersion, **options: Any) -> Any:
            if self._random.random() < 0.7:
                options |= {"missing": self._take(store, record), "before_ready": self._fetch_early}
            return commit(record, digests, slots, *others, **options)

        store.lifecycle.commit = without_some  # type: ignore[method-assign]

    def _fetch_early(self, versions: Sequence[VerifiedVersion]) -> None:
        """Fetch some missing pieces, or all, before the version is READY."""
        for version in versions:
            missing = list(version.held().missing())
            for piece in self._random.sample(missing, self._random.randint(0, len(missing))):
                self._bring(version, piece)
                self.counts["pieces fetched before READY"] += 1

    def _take(self, store: Store, record: VersionRecord) -> MissingPieces:
        """Move pieces of a verified version to the node, and leave other bytes in their places, as recycled files have.

        The store has all of a file that another version has too.
        """
        folder, layouts = str(store.folder.path(record)), store.lifecycle.layouts(record)
        inodes = {layout.path: self._medium.files.find(f"{folder}/{layout.path}") for layout in layouts}
        content = {path: bytes(inode.data) for path, inode in inodes.items()}
        self.held[record.number] = content
        numbering = number_pieces(layouts)
        shared = {path for path, inode in inodes.items() if self._medium.files.links(inode) > 1}
        own = [piece for piece in range(numbering.count) if numbering.span(piece).file not in shared]
        lacks = [piece for piece in own if self._random.random() < 0.6]
        self.counts["files of nodes that versions share"] += len(shared)
        headers = {layout.path: len(layout.header) for layout in layouts}
        for piece in lacks:
            span = numbering.span(piece)
            start = min(max(span.start, headers[span.file]), span.end)
            self._medium.files.write(inodes[span.file], bytes(255 - x for x in inodes[span.file].data[start : span.end]), start)
        parts = [part for piece in range(numbering.count) for part in numbering.parts(piece)]
        checksums = tuple(xxhash.xxh3_64_intdigest(content[part.file][part.start : part.end]) for part in parts)
        held = Bitmap.full(numbering.count) - Bitmap.of(numbering.count, lacks)
        return MissingPieces(held, checksums, frozenset([_NODE]))

    def fetch(self, store: Callable[[], Store | None]) -> None:
        """Fetch missing pieces in a task of the daemon's process, and tell it of lost ones."""
        while True:
            self._schedule.pause(None, self._schedule.now + self._random.random() * (0.2 if self.peaceful else 12.0))
            found = store()
            for partial in found.lifecycle.partials() if found is not None else ():
                try:
                    self._advance(found, partial)
                except (DaemonError, FileNotFoundError):
                    continue
                except OSError as error:
                    if not is_refusal(error):
                        raise

    def _advance(self, store: Store, partial: VerifiedVersion) -> None:
        number, missing = partial.record.number, list(partial.held().missing())
        if missing and not self.peaceful and self._random.random() < 0.05:
            self.gone.add(number)
        if missing and number in self.gone:
            self.counts["versions lost"] += 1
            store.lifecycle.lose(_MODEL, number, "its node is gone")
            return
        self._random.shuffle(missing)
        for piece in missing[: self._random.randint(1, 3)]:
            self._bring(partial, piece)
            self.counts["pieces fetched"] += 1
        settled = store.lifecycle.settle(partial)
        assert not settled or partial.held().whole(), f"version {number} is settled without all pieces"
        self.counts["versions made whole"] += settled

    def _bring(self, partial: VerifiedVersion, piece: int) -> None:
        for part in partial.numbering.parts(piece):
            data = self.held[partial.record.number][part.file][part.start : part.end]
            partial.write(part, np.frombuffer(data, np.uint8))
        partial.add(piece)

    def tensors(self, number: int, layouts: Sequence[FileLayout]) -> dict[str, bytes]:
        """Return the content of a version that lacked pieces; of any other nothing."""
        files = self.held.get(number, {})
        placed = [(files[layout.path], each) for layout in layouts if layout.path in files for each in layout.tensors]
        return {each.spec.name: data[each.offset : each.offset + each.spec.size] for data, each in placed}

    def is_partial(self, folder: str) -> bool:
        """Return whether a version's manifest is that of one which lacks pieces."""
        return b'"format":3' in bytes(self._medium.files.find(f"{folder}/{MANIFEST_FILE}").data)
