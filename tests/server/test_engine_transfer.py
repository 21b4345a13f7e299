"""Pieces by a transfer engine, which is a copy within this process here: what it delivers, and what happens when it does not."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.storage.pages import Span
from resharder.converters.wire.pieces import Bitmap, PieceSpan
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.memory import EngineFailed, PieceTaken
from resharder.server.holding.transfers import HttpTransfer, PieceBusy, PieceSource, ReceivedBytes
from resharder.server.node.copies import HeldVersion, NodeCopies
from resharder.server.node.daemon_client import RemoteVersion
from resharder.server.node.engine_transfer import EngineTransfer

FILES = tuple(lay_out([TensorSpec("a", "BF16", (20 << 10, 1024))]))
NAME, FILE, SIZE = "models/policy/versions/7", FILES[0].path, FILES[0].size
REMOTE = RemoteVersion(NAME, "fingerprint", FILES, "daemon:1", {"a": 1})
PIECES = 3
LAST = SIZE - 2 * PIECE_BYTES
CONTENT = b"".join(bytes([number]) * PIECE_BYTES for number in range(1, PIECES + 1))[:SIZE]


class LocalEngine:
    """Engine whose peers are in this process. `during` is called between the copy and the end of each read."""

    session = "local/here"

    def __init__(self) -> None:
        self.registered: set[Span] = set()
        self.during: Callable[[Span], object] = lambda target: None
        self.refuses = False
        self.reads = 0

    def register(self, span: Span) -> None:
        if self.refuses:
            raise EngineFailed("no memory can be registered")
        self.registered.add(span)

    def unregister(self, span: Span) -> None:
        self.registered.remove(span)

    def read(self, session: str, address: int, target: Span) -> None:
        self.reads += 1
        size = target[1] - target[0]
        if not any(begin <= address and address + size <= end for begin, end in self.registered):
            raise EngineFailed(f"{session}: {address:#x} is not registered")
        ctypes.memmove(target[0], address, size)
        self.during(target)

    def close(self) -> None: ...


class Checksums:
    """Checksums of the content."""

    def __call__(self, version: HeldVersion, part: PieceSpan) -> int:
        return xxhash.xxh3_64_intdigest(CONTENT[part.start : part.end])


class OtherWay:
    """Way that always delivers, in the place of HTTP."""

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def fetch(self, version: HeldVersion, piece: int, source: PieceSource) -> int:
        with version.claims.fetching(piece, in_place=False):
            return fill(version, piece)

    def close_idle(self) -> None: ...


def fill(version: HeldVersion, piece: int) -> int:
    span = version.numbering.span(piece)
    version.write(span, np.frombuffer(CONTENT[span.start : span.end], np.uint8))
    return span.end - span.start


class Two:
    """A peer that holds the version, and this node, each with its folder and both with the same engine."""

    def __init__(self, root: Path) -> None:
        self.now, self.engine, self.received, self.other = 0.0, LocalEngine(), ReceivedBytes(), OtherWay()
        self.peers, self.copies = NodeCopies(root / "peer", 1 << 30, self.engine), NodeCopies(root / "here", 1 << 30, self.engine)
        self.peer, self.version = self.peers.add(REMOTE), self.copies.add(REMOTE)
        for piece in range(PIECES):
            fill(self.peer, piece)
        self.transfer = EngineTransfer(
            self.engine,
            Checksums(),
            self.other,
            self.received,
            clock=lambda: self.now,  # type: ignore[arg-type]
        )

    def renew(self) -> None:
        """Begin again without any piece."""
        assert self.copies.drop(NAME)
        self.version = self.copies.add(REMOTE)

    def source(self, **others: object) -> PieceSource:
        known = {"address": "peer:1", "daemon": False, "session": LocalEngine.session, "addresses": self.peer.addresses()}
        return PieceSource(**known | others)  # type: ignore[arg-type]

    def fetch(self, piece: int, **others: object) -> int:
        """Fetch a piece, check its bytes in the file, and return how many the engine has delivered."""
        before, span = self.received.engine, self.version.numbering.span(piece)
        assert self.transfer.fetch(self.version, piece, self.source(**others)) == span.end - span.start
        assert (self.version.folder / FILE).read_bytes()[span.start : span.end] == CONTENT[span.start : span.end]
        return self.received.engine - before


@pytest.fixture
def two(root: Path) -> Iterator[Two]:
    return Two(root)


def test_pieces_arrive_in_their_place_by_the_engine(two: Two) -> None:
    assert [two.fetch(piece) for piece in range(PIECES)] == [PIECE_BYTES, PIECE_BYTES, LAST]
    assert (two.version.folder / FILE).read_bytes() == CONTENT


@pytest.mark.parametrize("others", [{"session": ""}, {"addresses": ()}, {"addresses": (1, 2)}])
def test_without_a_session_that_has_the_version_a_piece_comes_by_the_other_way(two: Two, others: dict[str, object]) -> None:
    assert two.fetch(1, **others) == 0
    assert (two.engine.reads, two.fetch(2)) == (0, LAST), "and the session is asked for the next one"


def _fail(target: Span) -> None:
    raise EngineFailed("the peer is gone")


def _damage(target: Span) -> None:
    ctypes.memset(target[0] + 5, 0xFF, 1)


@pytest.mark.parametrize("fault", [_fail, _damage])
def test_a_session_that_fails_or_sends_wrong_bytes_is_left_alone_for_twice_as_long_each_time(
    two: Two, fault: Callable[[Span], object]
) -> None:
    two.engine.during = fault
    for reads, pause in enumerate((1.0, 2.0, 4.0), 1):
        assert (two.fetch(0), two.engine.reads) == (0, reads)
        two.now += pause - 0.01
        assert (two.fetch(1), two.engine.reads) == (0, reads)
        two.now += 0.01
        two.renew()
    two.engine.during = lambda target: None
    assert two.fetch(0) == PIECE_BYTES


def test_a_slow_session_is_left_alone_after_its_piece(two: Two) -> None:
    two.engine.during = lambda target: setattr(two, "now", two.now + 6.0)
    assert two.fetch(0) == PIECE_BYTES
    assert (two.fetch(1), two.engine.reads) == (0, 1)


def test_a_piece_that_the_engine_writes_is_not_fetched_by_another_way_and_its_version_is_not_dropped(two: Two) -> None:
    """Else bytes that arrive late would be in a piece that counts as checked, or in memory of another purpose."""
    began, end = threading.Event(), threading.Event()
    two.engine.during = lambda target: (began.set(), end.wait(30))
    http = HttpTransfer(Checksums(), None, 1.0)  # type: ignore[arg-type]
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(two.fetch, 0)
        assert began.wait(30)
        with pytest.raises(PieceBusy, match="piece 0 is arriving"):
            http.fetch(two.version, 0, two.source())
        assert not two.copies.drop(NAME)
        end.set()
        assert reading.result() == PIECE_BYTES
    assert two.copies.drop(NAME)


def test_the_engine_never_writes_to_a_piece_that_is_complete_or_arrives_by_another_way(two: Two) -> None:
    claims = two.version.claims
    with claims.fetching(0, in_place=False):
        with claims.fetching(0, in_place=False):
            pass
        with pytest.raises(PieceTaken), claims.fetching(0, in_place=True):
            pass
    with pytest.raises(PieceTaken), claims.fetching(0, in_place=True):
        pass
    with pytest.raises(OSError, match="cut"), claims.fetching(1, in_place=False):
        raise OSError("cut")
    with claims.fetching(1, in_place=True):
        pass
    with pytest.raises(PieceTaken), claims.fetching(1, in_place=True):
        pass


def test_only_wanted_pieces_are_registered_and_none_of_a_version_that_was_dropped(root: Path) -> None:
    engine = LocalEngine()
    copies = NodeCopies(root, 1 << 30, engine)
    version = copies.add(REMOTE, Bitmap.of(PIECES, [0]))
    (base,) = version.addresses()
    assert engine.registered == {(base, base + PIECE_BYTES)}
    copies.want(version, Bitmap.full(PIECES))
    assert engine.registered == {(base, base + PIECE_BYTES), (base + PIECE_BYTES, base + SIZE)}
    with (version.folder / FILE).open("rb"):
        assert not copies.drop(NAME), "a worker has it open"
        assert (engine.registered, version.addresses()) == (set(), ())
    assert copies.drop(NAME)
    assert not version.folder.exists()


def test_a_version_that_cannot_be_registered_is_not_offered_and_comes_by_the_other_way(two: Two) -> None:
    two.engine.refuses = True
    two.renew()
    assert (two.version.addresses(), two.fetch(0), two.engine.reads) == ((), 0, 0)


def test_a_file_of_two_versions_takes_no_further_bytes_of_the_engine(root: Path) -> None:
    """A version that wants more of it gets a copy, which the engine has not mapped: its pieces come another way."""
    engine = LocalEngine()
    copies = NodeCopies(root, 1 << 30, engine)
    one = copies.add(REMOTE, Bitmap.of(PIECES, [0]))
    (part,) = one.numbering.parts(0)
    one.write(part, np.full(part.end - part.start, 1, np.uint8))
    one.add(0)
    other = copies.add(replace(REMOTE, name="models/policy/versions/8"), Bitmap.of(PIECES, [0]))
    assert (list(other.held()), other.memory is not None) == ([0], True)
    copies.want(other, Bitmap.of(PIECES, [0, 1]))
    assert (other.memory, list(other.missing())) == (None, [1])
    assert one.memory is not None
