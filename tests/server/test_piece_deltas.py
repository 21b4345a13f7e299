"""Pieces that come as deltas: when a host asks for one, over a real port, and what becomes of those that are wrong."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.pieces import Bitmap, PieceNumbering, PieceSpan, number_pieces
from resharder.converters.wire.ranges import PIECE_BYTES, base_header, parse_base
from resharder.server.data.connection import DataReads
from resharder.server.data.deltas import DeltaEncoder
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.deltas import (
    DELTA_SECONDS,
    WHOLE_SECONDS,
    Deltas,
    PeerDeltas,
    Rate,
    after_refusal,
    asks_delta,
    nearest_base,
)
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.transfers import HttpTransfer, PieceSource
from resharder.server.state.errors import ResourceNotFound
from resharder.v1 import resources_pb2

from tests.support.observing import wait_until

FILES = tuple(lay_out([TensorSpec("a", "BF16", (20 << 10, 1024))]))  # three pieces, the last one short
PIECES = number_pieces(FILES)
FILE, SIZE = FILES[0].path, FILES[0].size
SLOW, FAST, DECODING = 1e7, 1e10, 1e9


@pytest.mark.parametrize(
    ("whole", "delta", "asks"),
    [
        (Rate(), Rate(), False),
        (Rate(SLOW, 10), Rate(), True),
        (Rate(FAST, 10), Rate(), False),
        (Rate(SLOW, 10), Rate(2 * SLOW, 10), True),
        (Rate(SLOW, 10), Rate(SLOW / 2, 10), False),
        (Rate(FAST, 10), Rate(2 * FAST, 10), True),
        (Rate(SLOW, 10 - WHOLE_SECONDS), Rate(2 * SLOW, 10), False),
        (Rate(SLOW, 10), Rate(SLOW / 2, 10 - DELTA_SECONDS), True),
        (Rate(FAST, 10), Rate(SLOW, 10 - DELTA_SECONDS), False),
    ],
    ids=["a whole part first", "slow", "fast", "sooner", "later", "sooner on a fast link", "old", "again", "not again"],
)
def test_a_delta_is_asked_for_where_the_link_is_slower_than_decoding_and_then_where_it_is_sooner(
    whole: Rate, delta: Rate, asks: bool
) -> None:
    seen = PeerDeltas(whole, delta)
    assert asks_delta(seen, DECODING, 10) is asks
    assert not asks_delta(replace(seen, retry_at=11), DECODING, 10)


def test_a_peer_is_asked_for_no_delta_for_twice_as_long_after_each_that_was_refused() -> None:
    seen, pauses = PeerDeltas(), []
    for _ in range(8):
        seen = after_refusal(seen, "why", 100.0)
        pauses.append(seen.retry_at - 100.0)
    assert (pauses, seen.problem) == ([1, 2, 4, 8, 16, 32, 60, 60], "why")


def test_a_rate_is_an_average_until_it_is_old() -> None:
    rate = Rate().with_part(100, 1, 0.0)
    assert rate == Rate(100, 0.0)
    assert rate.with_part(200, 1, 1.0) == Rate(130, 1.0)
    assert rate.with_part(200, 1, WHOLE_SECONDS) == Rate(200, WHOLE_SECONDS)
    assert rate.with_part(200, 1, 5.0, 5.0) == Rate(200, 5.0)


@pytest.mark.parametrize("text", ["", "7", "7 ", "x abc", "7 a b", "-1 abc", "7 " + "a" * 129, "7 a\u00e4"])
def test_a_header_that_names_no_base_is_none(text: str) -> None:
    assert parse_base(text) is None
    assert parse_base(base_header(7, "abc")) == (7, "abc")


def content(step: int) -> np.ndarray:
    """A version's file: each step changes one in a thousand bytes."""
    made = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    for each in range(1, step + 1):
        random = np.random.default_rng(each)
        made[random.integers(0, SIZE, SIZE // 1000)] ^= 1
    return made


CONTENTS = {number: content(number) for number in (6, 7, 8)}


@dataclass
class Holder:
    """Versions that a port serves, by number, and the bytes that it has sent."""

    folder: Path
    fingerprints: dict[int, str] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    lacks: frozenset[int] = frozenset()

    def add(self, number: int) -> Path:
        folder = self.folder / str(number)
        folder.mkdir()
        (folder / FILE).write_bytes(CONTENTS[number].tobytes())
        self.fingerprints[number] = f"of-{number}"
        return folder / FILE

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        if number not in self.fingerprints:
            raise ResourceNotFound("VERSION_UNKNOWN", f"no version {number}")

        @contextmanager
        def reading(spans: list[PieceSpan]) -> Iterator[None]:
            if number != 8 and any(span.start // PIECE_BYTES in self.lacks for span in spans):
                raise ResourceNotFound("VERSION_UNKNOWN", "not there yet")
            yield

        name, folder = f"models/{model}/versions/{number}", self.folder / str(number)
        yield ServedVersion(name, self.fingerprints[number], {FILE: SIZE}, folder, reading)  # type: ignore[arg-type]


class Asker:
    """A host that holds version 7, and fetches version 8 over a link, by a clock that knows the bytes on the link alone."""

    def __init__(self, root: Path, port: DataPort, sent: list[int], rate: float) -> None:
        self.root, self.held = root, list[HeldFiles]()
        self.base = self.add(7)
        held = CONTENTS[7].tobytes()
        for piece in range(PIECES.count):
            span = PIECES.span(piece)
            self.base.write(span, np.frombuffer(held[span.start : span.end], np.uint8))
            self.base.add(piece)

        def clock() -> float:
            wait_until(lambda: not port.transfers)
            return sum(sent) / rate

        self.deltas = Deltas(lambda: self.held, clock)
        self.source = PieceSource(f"127.0.0.1:{port.port}", daemon=False, peer="nodes/holder")
        self.transfer = HttpTransfer(self._checksum, None, 5.0, deltas=self.deltas)

    def add(self, number: int) -> HeldFiles:
        folder = self.root / f"held-{number}"
        folder.mkdir()
        with (folder / FILE).open("wb") as file:
            file.truncate(SIZE)
        self.held.append(HeldFiles(f"models/policy/versions/{number}", f"of-{number}", folder, {FILE: SIZE}, PIECES))
        return self.held[-1]

    @staticmethod
    def _checksum(version: object, part: PieceSpan) -> int:
        return xxhash.xxh3_64_intdigest(CONTENTS[8][part.start : part.end])

    def fetch(self) -> None:
        """Fetch all pieces of version 8, and compare them."""
        version = self.add(8)
        for piece in range(PIECES.count):
            self.transfer.fetch(version, piece, self.source)
            version.add(piece)
        assert (version.folder / FILE).read_bytes() == CONTENTS[8].tobytes()

    @property
    def link(self) -> resources_pb2.NodeLink:
        return self.deltas.shown(resources_pb2.NodeLink(peer="nodes/holder"))


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    return Holder(tmp_path)


@pytest.fixture
def encoder() -> DeltaEncoder:
    return DeltaEncoder()


@pytest.fixture
def asker(holder: Holder, encoder: DeltaEncoder, root: Path, request: pytest.FixtureRequest) -> Iterator[Asker]:
    holder.add(8)
    reads = DataReads(holder, lambda *_: nullcontext(True), local_only=False, sent=holder.sent.append, deltas=encoder)
    port = DataPort("127.0.0.1", 0, reads)
    asker = Asker(root, port, holder.sent, getattr(request, "param", SLOW))
    yield asker
    asker.transfer.close_idle()
    port.close()


def whole(*pieces: int) -> list[int]:
    return [PIECES.size_of(Bitmap.of(PIECES.count, [piece])) for piece in pieces]


def test_after_a_whole_piece_that_shows_a_slow_link_the_others_come_as_deltas(holder: Holder, asker: Asker) -> None:
    holder.add(7)
    asker.fetch()
    assert holder.sent[0] == whole(0)[0]
    assert [sent < size / 20 for sent, size in zip(holder.sent[1:], whole(1, 2), strict=True)] == [True, True]
    link = asker.link
    assert (link.delta_bytes, link.delta_part_bytes, link.delta_problem) == (sum(holder.sent[1:]), sum(whole(1, 2)), "")
    assert link.delta_rate > 0 < link.whole_rate


@pytest.mark.parametrize("asker", [FAST], indirect=True)
def test_over_a_fast_link_all_pieces_come_whole(holder: Holder, asker: Asker) -> None:
    holder.add(7)
    asker.fetch()
    assert holder.sent == whole(0, 1, 2)
    assert asker.link.delta_bytes == 0


@pytest.mark.parametrize("lack", ["the version", "this version of the number", "a piece", "a file of the size", "a place"])
def test_pieces_come_whole_from_a_holder_that_lacks_the_base(
    holder: Holder, asker: Asker, encoder: DeltaEncoder, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = holder.add(7)
    if lack == "the version":
        del holder.fingerprints[7]
    elif lack == "this version of the number":
        holder.fingerprints[7] = "of another one"
    elif lack == "a piece":
        holder.lacks = frozenset([0, 1, 2])
    elif lack == "a file of the size":
        base.write_bytes(base.read_bytes()[:-4])
        holder.pinned = _shorter(holder)  # type: ignore[method-assign]
    else:
        encoder._places = threading.Semaphore(0)
        monkeypatch.setattr("resharder.server.data.deltas._PATIENCE", 0.01)
    asker.fetch()
    assert holder.sent == whole(0, 1, 2)
    assert (asker.link.delta_bytes, asker.link.delta_rate, asker.link.delta_problem) == (0, 0, "")


def _shorter(holder: Holder) -> object:
    pinned = holder.pinned

    @contextmanager
    def found(model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        with pinned(model, number, replicates=replicates) as served:
            yield replace(served, sizes={FILE: SIZE - 4}) if number == 7 else served

    return found


def test_a_delta_of_a_base_with_other_bytes_is_refused_by_name_and_the_piece_comes_whole(holder: Holder, asker: Asker) -> None:
    with holder.add(7).open("r+b") as file:
        file.seek(PIECE_BYTES + 5)
        file.write(bytes(8))
    asker.fetch()
    first, delta, again, last = holder.sent
    assert [first, again] == whole(0, 1)
    assert delta < whole(1)[0] / 20 > last, "the piece took longer than the pause"
    link = asker.link
    assert link.delta_failures == 1
    assert link.delta_problem.startswith(
        f"models/policy/versions/8, {FILE}, bytes {PIECE_BYTES} to {2 * PIECE_BYTES}, as a delta: expected checksum "
    )
    assert link.delta_bytes == last


def test_a_delta_of_a_damaged_base_of_the_asking_host_is_refused_too(holder: Holder, asker: Asker) -> None:
    holder.add(7)
    with (asker.base.folder / FILE).open("r+b") as file:
        file.seek(PIECE_BYTES + 5)
        file.write(bytes(8))
    asker.fetch()
    assert "expected checksum" in asker.link.delta_problem


def test_pieces_that_have_nothing_in_common_come_whole_and_are_asked_for_as_deltas_no_more(
    holder: Holder, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.add(7).write_bytes(np.random.default_rng(9).integers(0, 256, SIZE, np.uint8).tobytes())
    asker.fetch()
    assert holder.sent == whole(0, 1, 2)
    assert asker.link.delta_rate > 0


def test_the_base_is_the_nearest_version_of_the_model_that_has_the_piece(root: Path) -> None:
    def version(name: str, fingerprint: str, *pieces: int, size: int = SIZE) -> HeldFiles:
        held = Bitmap.of(PIECES.count, pieces)
        return HeldFiles(f"models/{name}", fingerprint, root, {FILE: size}, PieceNumbering([(FILE, size)]), held=held)

    held = [
        wanted := version("policy/versions/8", "8", 0),
        version("policy/versions/4", "4", 0, 1),
        version("policy/versions/10", "10", 0),
        version("other/versions/8", "8", 0, 1, 2),
        version("policy/versions/7", "", 0, 1, 2),
        version("policy/versions/9", "9", 0, 1, 2, size=SIZE - 4),
    ]
    found = [nearest_base(held, wanted, PIECES.span(piece)) for piece in range(3)]
    assert [each and each.fingerprint for each in found] == ["10", "4", None]
