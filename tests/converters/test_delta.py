"""Pieces as differences: exact for any bytes, and refused where anything was changed."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.storage.delta import BadPiece, StoredPiece, decode, encode

SIZES = st.integers(0, 5000)


@st.composite
def steps(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A piece and the same piece some steps earlier: alike, or not at all."""
    size, share, seed = draw(SIZES), draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])), draw(st.integers(0, 1 << 30))
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, size, np.uint8)
    changed = np.where(random.random(size) < share, random.integers(0, 256, size, np.uint8), base).astype(np.uint8)
    return changed.tobytes(), base.tobytes()


@given(steps())
def test_a_piece_comes_back_exactly_and_never_takes_more_than_its_bytes(step: tuple[bytes, bytes]) -> None:
    content, base = step
    piece, stored = encode(content, base)
    assert piece.size == len(stored) <= len(content)
    assert bytes(decode(piece, bytes(stored), base, len(content))) == content


@given(st.binary(max_size=300))
def test_a_piece_without_a_base_is_stored_as_it_is(content: bytes) -> None:
    piece, stored = encode(content, None)
    assert (piece.how, bytes(stored)) == ("whole", content)
    assert decode(piece, content, None, len(content)) == content


@given(steps(), steps(), st.data())
def test_any_change_is_refused_or_changes_nothing(
    step: tuple[bytes, bytes], other: tuple[bytes, bytes], data: st.DataObject
) -> None:
    content, base = step
    piece, stored = encode(content, base)
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "another", "base"]))
    harmed, used = bytearray(stored), base
    if kind == "flip" and harmed:
        harmed[data.draw(st.integers(0, len(harmed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del harmed[data.draw(st.integers(0, len(harmed))) :]
    elif kind == "longer":
        harmed += b"\0"
    elif kind == "another":
        harmed = bytearray(encode(*other)[1])
    else:
        used = other[1]
    with suppress(BadPiece):
        assert bytes(decode(piece, bytes(harmed), used, len(content))) == content


def test_a_small_step_takes_little_and_noise_is_stored_whole() -> None:
    random = np.random.default_rng(0)
    base = random.standard_normal(1 << 18, np.float32).view(np.uint16)[1::2].copy()
    step = base.copy()
    step[random.random(step.size) < 0.03] ^= 1
    piece, _ = encode(step.tobytes(), base.tobytes())
    assert piece.how == "xor"
    assert step.nbytes / piece.size > 20
    noise = random.integers(0, 256, 1 << 16, np.uint8).tobytes()
    assert encode(noise, bytes(1 << 16))[0].how == "whole"


def test_a_frame_that_claims_another_size_is_refused_before_it_is_decoded() -> None:
    piece, stored = encode(bytes(1 << 20), bytes(1 << 20))
    with pytest.raises(BadPiece, match="expected a frame of 100 bytes, found 1048576"):
        decode(piece, bytes(stored), bytes(100), 100)
    with pytest.raises(BadPiece, match="not a zstd frame"):
        decode(StoredPiece("xor", 5, "0"), b"abcde", bytes(9), 9)
    with pytest.raises(BadPiece, match="expected a base of 1048576 bytes, found none"):
        decode(piece, bytes(stored), None, 1 << 20)
